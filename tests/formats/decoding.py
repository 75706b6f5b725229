"""Every format with the options that its tests run it with, and its entries read back.

``decode`` uses index arrays and bits alone, so it proves the layout that a module's text promises.
Systems' own tensors and packed values are decoded by ``tests/kernels/test_decode_*.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.formats import BCSR, WCSR, BitTCF, BMat, RowBundles
from sparsetile.formats.base import Format
from sparsetile.formats.bundles import MAX_COLUMNS, scatter_values
from sparsetile.formats.cells import WORD_BITS, checked_values, scatter_cells, set_places
from sparsetile.intake.csr import CSR, offsets, owners

__all__ = ["FORMATS", "VARIANTS", "decode", "pack_values", "packed", "unpack"]

FORMATS: dict[str, Any] = {
    "bcsr": BCSR, "bittcf": BitTCF, "bmat": BMat, "bundles": RowBundles, "wcsr": WCSR,
}  # fmt: skip
VARIANTS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "bcsr": {f"blocks of {size}": {"block": size} for size in (32, 64, 128)},
    "bittcf": {"stack 1": {}, "stack 2": {"stack": 2}, "even": {"stack": 2, "even": True}},
    "bmat": {"windows of 16": {}, "windows of 32": {"stack": 2}},
    "bundles": {
        "every window": {},
        "windows that share": {"min_sharing": 1.5},
        "no window": {"min_sharing": 100.0},
    },
    "wcsr": {
        "16x8": {"height": 16},
        "32x8": {"height": 32},
        "64x16": {"pad": 16},
        "128x16": {"height": 128, "pad": 16},
    },
}

Decoded = tuple[Tensor, Tensor, Tensor]


def packed(name: str, variant: str, csr: CSR, order: Tensor | None = None) -> Any:
    """A matrix in a format with some of its options."""
    return FORMATS[name].pack(csr, order, **VARIANTS[name][variant])


def _rows(form: Any, position: Tensor) -> Tensor:
    return position if form.order is None else form.order.to(torch.int64)[position]


@functools.singledispatch
def decode(form: Format, csr: CSR) -> Decoded:
    """(row, column, place in the packed values) of every entry, in the format's own order.

    Only loose rows of bundles, which stay where they are, are read from ``csr``.
    """
    raise NotImplementedError


@decode.register
def _(form: BCSR, csr: CSR) -> Decoded:
    size = form.block
    place = torch.arange(form.cell_count) if form.bitmaps is None else set_places(form.bitmaps)
    block = place // size**2
    block_row = owners(form.block_row_ptr.diff())
    position = block_row[block] * size + place // size % size
    column = form.block_col_idx.to(torch.int64)[block] * size + place % size
    inside = (position < form.shape[0]) & (column < form.shape[1])
    return _rows(form, position[inside]), column[inside], place[inside]


@decode.register
def _(form: BitTCF, csr: CSR) -> Decoded:
    window = owners(form.tiles_per_window())
    cell = set_places(form.tc_local_bit)
    part, bit = cell // WORD_BITS, cell % WORD_BITS
    tile = part // form.stack
    position = (window[tile] * form.stack + part % form.stack) * 8 + bit // 8
    column = form.sparse_a_to_b[tile * 8 + bit % 8]
    return _rows(form, position), column.to(torch.int64), torch.arange(cell.numel())


@decode.register
def _(form: BMat, csr: CSR) -> Decoded:
    cell = set_places(form.bitmaps.view(torch.int64))
    part, word, lane = cell // 128, cell // 32 % 4, cell % 32
    tile, part = part // form.stack, part % form.stack
    window = owners(form.tiles_per_window())
    position = (window[tile] * form.stack + part) * 16 + lane // 4 + word % 2 * 8
    column = form.columns[tile * 8 + lane % 4 + word // 2 * 4]
    return _rows(form, position), column.to(torch.int64), torch.arange(cell.numel())


@decode.register
def _(form: WCSR, csr: CSR) -> Decoded:
    cell = set_places(form.bitmaps)
    tile = cell // (form.height * form.pad)
    window = owners(form.tiles_per_window())
    position = window[tile] * form.height + cell // form.pad % form.height
    column = form.window_col_idx[tile * form.pad + cell % form.pad]
    return _rows(form, position), column.to(torch.int64), torch.arange(cell.numel())


def _loose_entries(form: RowBundles, csr: CSR) -> Tensor:
    """Canonical numbers of the loose rows' entries, in the order of ``loose``."""
    return csr.with_values(None).select_rows(form.loose)[1]


@decode.register
def _(form: RowBundles, csr: CSR) -> Decoded:
    bundle = owners(form.indptr.diff())
    tagged = form.tagged.to(torch.int64) & (2**32 - 1)
    bits, column = tagged // MAX_COLUMNS, tagged % MAX_COLUMNS
    present = (bits.unsqueeze(1) >> torch.arange(4)) & 1
    element, member = torch.nonzero(present, as_tuple=True)
    row = form.rows.to(torch.int64)[bundle[element], member]
    loose = _loose_entries(form, csr)
    behind = form.element_count * 4 + torch.arange(loose.numel())
    return (
        torch.cat([row, csr.row_ids()[loose]]),
        torch.cat([column[element], csr.indices[loose].to(torch.int64)]),
        torch.cat([element * 4 + member, behind]),
    )


def pack_values(
    form: Any, csr: CSR, values: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Canonical values [nnz], or None for ones, in the places of the format, as runners put them.

    Values of loose rows follow those of bundles.
    """
    values = checked_values(values, csr.nnz, dtype, csr.device)
    if isinstance(form, BCSR):
        blocks = scatter_cells(values, form.places, form.cell_count)
        return blocks.reshape(form.block_count, form.block, form.block)
    if isinstance(form, RowBundles):
        bundled = scatter_values(values, form.entries, form.slots, form.element_count)
        return torch.cat([bundled, values[_loose_entries(form, csr)]])
    return values[form.entries.to(torch.int64)]


def unpack(form: Any, csr: CSR, values: Tensor | None = None) -> CSR:
    """The matrix in canonical form, with the packed ``values`` if they are given."""
    row, column, place = decode(form, csr)
    rows, cols = form.shape
    by_place = torch.argsort(row * max(cols, 1) + column)
    indptr = offsets(torch.bincount(row, minlength=rows))
    found = None if values is None else values.reshape(-1)[place[by_place]]
    return CSR(indptr, column[by_place].to(torch.int32), found, form.shape)
