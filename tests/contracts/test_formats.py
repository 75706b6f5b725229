"""What every format must do: hold each entry of A exactly once, and give its bits back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats import (
    BUNDLE_ROWS,
    LIST_STEP,
    RowBundles,
    pack_bcsr,
    pack_bittcf,
    pack_bundles,
    pack_rows,
    pack_wcsr,
)
from sparsetile.formats.bundles import MAX_COLUMNS
from tests.contracts.cases import MATRICES, csr_of, random_matrix

Triple = tuple[int, int, float]


@dataclass(frozen=True)
class Unpacked:
    """A matrix read back from a format: (row, column, value) triples, in any order."""

    triples: list[Triple]
    shape: tuple[int, int]
    bytes: int


def read_rows(csr: CSR) -> Unpacked:
    packed = pack_rows(csr)
    back = packed.unpack(csr.values)
    triples = zip(back.row_ids().tolist(), back.indices.tolist(), back.values.tolist(), strict=True)
    return Unpacked(list(triples), back.shape, packed.format_bytes)


def walk_bundles(bundles: RowBundles) -> list[tuple[int, int, int]]:
    """Return (place in the packed values, row, column) of every bit, as the module's text says."""
    words = bundles.tagged.numpy().view(np.uint32)
    bundle = np.repeat(np.arange(bundles.bundle_count), np.diff(bundles.indptr.numpy()))
    found = []
    for member in range(BUNDLE_ROWS):
        held = np.nonzero(words >> (28 + member) & 1)[0]
        rows = bundles.rows.numpy()[bundle[held], member]
        columns = words[held] & (MAX_COLUMNS - 1)
        places = held * BUNDLE_ROWS + member
        found += zip(places.tolist(), rows.tolist(), columns.tolist(), strict=True)
    return found


def read_bundles(min_sharing: float) -> Callable[[CSR], Unpacked]:
    def read(csr: CSR) -> Unpacked:
        bundles = pack_bundles(csr, None, min_sharing)
        values = bundles.pack_values(csr.values).tolist()
        triples = [(row, column, values[at]) for at, row, column in walk_bundles(bundles)]
        loose = torch.isin(csr.row_ids(), bundles.loose)
        triples += zip(
            csr.row_ids()[loose].tolist(),
            csr.indices[loose].tolist(),
            csr.values[loose].tolist(),
            strict=True,
        )
        return Unpacked(triples, bundles.shape, bundles.format_bytes)

    return read


def read_bittcf(order: Callable[[CSR], Tensor] | None, stack: int = 1) -> Callable[[CSR], Unpacked]:
    def read(csr: CSR) -> Unpacked:
        tiles = pack_bittcf(csr, order and order(csr), stack)
        rows, columns = tiles.unpack()
        values = tiles.pack_values(csr.values)
        triples = zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
        return Unpacked(list(triples), tiles.shape, tiles.format_bytes)

    return read


def read_bcsr(block: int, order: Callable[[CSR], Tensor] | None) -> Callable[[CSR], Unpacked]:
    def read(csr: CSR) -> Unpacked:
        blocks = pack_bcsr(csr, block, order and order(csr))
        rows, columns, places = blocks.unpack()
        values = blocks.pack_values(csr.values).flatten()[places]
        triples = zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
        return Unpacked(list(triples), blocks.shape, blocks.format_bytes)

    return read


def read_wcsr(
    height: int, pad: int, variant: str, order: Callable[[CSR], Tensor] | None
) -> Callable[[CSR], Unpacked]:
    def read(csr: CSR) -> Unpacked:
        tiles = pack_wcsr(csr, height, pad, order and order(csr))
        rows, columns, places = tiles.unpack()
        values = tiles.pack_values(csr.values, variant=variant)
        values = values.flatten()[places] if variant == "dense" else values
        triples = zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
        return Unpacked(list(triples), tiles.shape, tiles.format_bytes)

    return read


def reversed_rows(csr: CSR) -> Tensor:
    return torch.arange(csr.shape[0]).flip(0)


FORMATS: dict[str, Callable[[CSR], Unpacked]] = {
    "BCSR of 32": read_bcsr(32, None),
    "BCSR of 64, reversed rows": read_bcsr(64, reversed_rows),
    "BCSR of 128": read_bcsr(128, None),
    "WCSR 16x8, bitmap": read_wcsr(16, 8, "bitmap", None),
    "WCSR 64x8, dense": read_wcsr(64, 8, "dense", None),
    "WCSR 64x16, bitmap, reversed rows": read_wcsr(64, 16, "bitmap", reversed_rows),
    "WCSR 128x16, dense, reversed rows": read_wcsr(128, 16, "dense", reversed_rows),
    "BitTCF": read_bittcf(None),
    "BitTCF of reversed rows": read_bittcf(reversed_rows),
    "stacked BitTCF": read_bittcf(None, 2),
    "stacked BitTCF of reversed rows": read_bittcf(reversed_rows, 2),
    "rows": read_rows,
    "bundles of every window": read_bundles(0.0),
    "bundles of windows that share": read_bundles(1.5),
    "no bundles": read_bundles(100.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("form", FORMATS)
def test_holds_every_entry_once_and_gives_its_bits_back(form, name, dtype):
    csr = csr_of(MATRICES[name](), dtype=dtype)
    found = FORMATS[form](csr)
    expected = list(
        zip(csr.row_ids().tolist(), csr.indices.tolist(), csr.values.tolist(), strict=True)
    )
    assert found.shape == csr.shape
    assert sorted(found.triples) == expected


@pytest.mark.parametrize("form", FORMATS)
def test_keeps_negative_zeros_denormals_infinities_and_stored_zeros(form):
    csr = csr_of(random_matrix(24, 16, 0.4))
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-45, -3.0]
    csr.values[:] = torch.tensor((special * csr.nnz)[: csr.nnz])
    found = FORMATS[form](csr)
    values = torch.tensor([value for _, _, value in sorted(found.triples, key=lambda t: t[:2])])
    assert torch.equal(values.view(torch.int32), csr.values.view(torch.int32))


@pytest.mark.parametrize("form", FORMATS)
def test_counts_its_bytes(form):
    csr = csr_of(MATRICES["odd sizes"]())
    if "BitTCF" in form:
        stack, words = (2, 14) if form.startswith("stacked") else (1, 11)
        order = reversed_rows(csr) if "reversed" in form else None
        tiles, windows = pack_bittcf(csr, order, stack).tile_count, -(-csr.shape[0] // (8 * stack))
        assert FORMATS[form](csr).bytes == 4 * (windows + words * tiles + 2)
        return
    if form.startswith("BCSR"):
        block = int(form.split()[2].rstrip(","))
        blocks = pack_bcsr(csr, block, reversed_rows(csr) if "reversed" in form else None)
        rows, bits = -(-csr.shape[0] // block), block * block // 8  # A has holes: bits are there
        expected = 4 * (rows + 1) + (4 + bits) * blocks.block_count
        assert FORMATS[form](csr).bytes == expected
        return
    if form.startswith("WCSR"):
        height, pad = (int(side) for side in form.split()[1].rstrip(",").split("x"))
        order = reversed_rows(csr) if "reversed" in form else None
        slots = pad * pack_wcsr(csr, height, pad, order).tile_count
        assert FORMATS[form](csr).bytes == 4 * (-(-csr.shape[0] // height) + 1 + slots)
        return
    if form == "rows":
        assert FORMATS[form](csr).bytes == 8 * (csr.shape[0] + 1) + 4 * csr.nnz
    else:
        bundles = pack_bundles(csr, None, {"no bundles": 100.0}.get(form, 0.0))
        assert bundles.format_bytes == (
            4 * bundles.element_count
            + 8 * (bundles.bundle_count + 1)
            + 4 * BUNDLE_ROWS * bundles.bundle_count
        )


def bundled(name: str, min_sharing: float, order: Tensor | None = None) -> tuple[CSR, RowBundles]:
    csr = csr_of(MATRICES[name]())
    return csr, pack_bundles(csr, order, min_sharing)


def shuffled(csr: CSR) -> Tensor:
    return torch.randperm(csr.shape[0])


@pytest.mark.parametrize("order", [None, shuffled], ids=["given order", "shuffled"])
@pytest.mark.parametrize("min_sharing", [0.0, 1.2, 2.0])
@pytest.mark.parametrize("name", MATRICES)
def test_each_row_is_in_one_bundle_or_loose(name, min_sharing, order):
    csr = csr_of(MATRICES[name]())
    bundles = pack_bundles(csr, order and order(csr), min_sharing)
    rows = bundles.rows.flatten()
    together = torch.cat([rows[rows >= 0].long(), bundles.loose])
    assert torch.equal(together.sort().values, torch.arange(csr.shape[0]))


@pytest.mark.parametrize("min_sharing", [0.0, 1.2, 2.0])
@pytest.mark.parametrize("name", MATRICES)
def test_each_entry_is_in_one_place_of_a_bundle_or_in_a_loose_row(name, min_sharing):
    csr, bundles = bundled(name, min_sharing)
    loose = torch.nonzero(torch.isin(csr.row_ids(), bundles.loose)).flatten()
    together = torch.cat([bundles.entries, loose])
    assert torch.equal(together.sort().values, torch.arange(csr.nnz))
    assert bundles.slots.unique().numel() == bundles.slots.numel()


@pytest.mark.parametrize("name", MATRICES)
def test_packed_values_land_where_unpack_says(name):
    csr, bundles = bundled(name, 0.0)
    row, column = bundles.unpack()
    packed = bundles.pack_values(torch.arange(1.0, csr.nnz + 1))
    held = torch.nonzero(packed).flatten()  # in bundle order, like unpack
    entry = packed[held].long() - 1
    assert torch.equal(csr.row_ids()[entry], row)
    assert torch.equal(csr.indices.long()[entry], column)


@pytest.mark.parametrize("name", MATRICES)
def test_bits_say_exactly_which_rows_hold_the_column(name):
    matrix = MATRICES[name]()
    csr, bundles = bundled(name, 0.0)
    present = np.zeros(csr.shape, dtype=bool)
    present[csr.row_ids().numpy(), csr.indices.numpy()] = True
    seen = np.zeros_like(present)
    for _, row, column in walk_bundles(bundles):
        assert not seen[row, column]
        seen[row, column] = True
    assert np.array_equal(seen, present)
    assert bundles.entries.numel() == matrix.nnz


@pytest.mark.parametrize("name", ["odd sizes", "equal rows", "one dense column", "one column"])
def test_a_bundle_lists_each_column_once_in_ascending_order(name):
    _, bundles = bundled(name, 0.0)
    for bundle in range(bundles.bundle_count):
        begin, end = bundles.indptr[bundle : bundle + 2].tolist()
        words = bundles.tagged[begin:end].long() & (2**32 - 1)
        columns, bits = (words % MAX_COLUMNS).tolist(), (words // MAX_COLUMNS).tolist()
        held = [column for column, bit in zip(columns, bits, strict=True) if bit]
        assert held == sorted(set(held)) and held
        padding = columns[len(held) :]
        assert len(columns) % LIST_STEP == 0 and len(padding) < LIST_STEP
        assert set(padding) <= {held[-1]}, "padding reads what was read before"


@pytest.mark.parametrize("min_sharing", [1.2, 1.9, 4.0])
def test_a_window_is_bundled_exactly_when_it_shares_enough(min_sharing):
    csr = csr_of(random_matrix(130, 40, 0.2))
    bundles = pack_bundles(csr, None, min_sharing)
    chosen = {min(row for row in window if row >= 0) // 4 for window in bundles.rows.tolist()}
    dense = torch.zeros(132, 40, dtype=torch.int64)
    dense[csr.row_ids(), csr.indices.long()] = 1
    windows = dense.reshape(33, 4, 40)
    entries, distinct = windows.sum((1, 2)), windows.amax(1).sum(1)
    expected = {
        window
        for window in range(33)
        if distinct[window] and entries[window] >= min_sharing * distinct[window]
    }
    assert chosen == expected


def test_windows_are_cut_from_the_order_given():
    csr = csr_of(MATRICES["equal rows"]())
    order = torch.arange(csr.shape[0]).flip(0)
    bundles = pack_bundles(csr, order, 0.0)
    assert bundles.rows[0].tolist() == order[:4].tolist()
    assert bundles.rows[-1].tolist() == [*order[64:].tolist(), -1]


def test_the_last_of_the_columns_that_28_bits_can_name_is_kept():
    last = MAX_COLUMNS - 1
    csr = CSR(
        torch.tensor([0, 2, 3, 4, 6]),
        torch.tensor([0, last, last, 5, 5, last], dtype=torch.int32),
        torch.arange(1.0, 7.0),
        (4, MAX_COLUMNS),
    )
    found = read_bundles(0.0)(csr)
    expected = zip(csr.row_ids().tolist(), csr.indices.tolist(), csr.values.tolist(), strict=True)
    assert sorted(found.triples) == list(expected)
