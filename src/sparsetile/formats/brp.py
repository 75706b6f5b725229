"""BRP: groups of Tensor-Core tiles with the same number of entries, and residual rows.

BRP-SpMM, sections IV-B and IV-C. A window is sixteen rows (in the plan's order); its entries are
sorted column-major. *Fixed Non-zero*: each column of a 16x8 tile holds exactly ``fixed`` entries
(f) of one column of A, so a column of a window is cut into slices of f entries. A *TC Block Group*
is ``group`` tiles (g) of one window. Entries that fill no slice, and slices that fill no group, go
to the residual rows. The paper has f = 1 and g = 4. Names are the paper's:

    group_window_id[i]  window of group i, ascending                            [groups]
    local_id[e]         8 * row + column in the tile, 0 to 127                  [8 f g groups]
    old_col_id[c]       column of A (row of B) behind each tile column          [8 g groups]
    res_rows_id[i]      row of A of residual row i                              [residual rows]
    res_row_offset[i]   its first residual entry                                [residual rows + 1]
    res_col_id[e]       column of A of residual entry e                         [residual entries]

The two ``values`` arrays are one: ``entries`` holds entry numbers, groups first, residual rows
after them. Element e of a group part is entry e % f of tile column e // f.

Choices that the paper leaves open:
- ``old_col_id`` has one element for each tile column, not for each entry. For f = 1 that is the
  same; for f > 1 it is f times smaller.
- ``local_id`` has one byte for each entry; the paper's four bytes hold no more information.
- A group's 4-byte values start at a multiple of 32 f g bytes: 128 in the paper. Groups are not
  padded, so f * g must be a multiple of 4 for 128-byte alignment. Any f and g keep whole 32-byte
  sectors.
- Entries of a column are in the order of their positions. Residual rows are in the plan's order;
  rows without residual entries are omitted, and columns ascend inside a row.

Built with tensor operations on A's device: two key sorts and prefix sums, no loop over windows, no
atomics, the same bits in every run. Keys have 32 bits if window, column and row fit, else 64. For
f = 1 the host waits twice: for the numbers of groups and of residual rows; f > 1 adds three waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import Format, Variants
from sparsetile.formats.cells import checked_values, gather_values
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR, offsets, owners
from sparsetile.reorder.permutation import positions

__all__ = ["BRP", "TILE_COLUMNS", "WINDOW_ROWS", "ColumnMajor", "check_parameters", "sort_windows"]

WINDOW_ROWS = 16
TILE_COLUMNS = 8
_ROW_BITS = 4  # log2 of WINDOW_ROWS


@dataclass(frozen=True, eq=False)
class ColumnMajor:
    """Entries sorted by (window, column, row in the window), the start of every partition."""

    # int32 or int64 [nnz]: the three as one number, ascending: row in the lowest four bits, then
    # the column.
    keys: Tensor
    entry: Tensor  # int64 [nnz]: canonical entry number of each key
    window_entry: Tensor  # int64 [windows + 1]: first sorted entry of each window
    column_bits: int  # bits of the column in a key

    @cached_property
    def pair_entry(self) -> Tensor:
        """First sorted entry of each (window, column) pair, and their number: [pairs + 1]."""
        return _run_offsets(self.keys >> _ROW_BITS)

    def slices(self, fixed: int) -> tuple[Tensor, Tensor]:
        """Return the first slice of ``fixed`` entries of each pair, and of each window; int64."""
        pair_slice = offsets((self.pair_entry[1:] - self.pair_entry[:-1]) // fixed)
        # A window begins with a pair, so its first entry is among the pairs' first.
        window_pair = torch.searchsorted(self.pair_entry, self.window_entry)
        return pair_slice, pair_slice[window_pair]


def sort_windows(csr: CSR, order: Tensor | None = None) -> ColumnMajor:
    """Sort the entries of each window of sixteen rows column-major; fewer than 2^31 entries."""
    device, (rows, cols) = csr.device, csr.shape
    windows = -(-rows // WINDOW_ROWS)
    lengths, start = csr.row_lengths(), csr.indptr
    place = torch.arange(rows, device=device)
    if order is not None:
        order = order.to(torch.int64)
        place, start = positions(order), offsets(lengths[order])
    column_bits = max(cols - 1, 0).bit_length()
    bits = max(windows - 1, 0).bit_length() + column_bits + _ROW_BITS
    row_keys = (place >> _ROW_BITS << (column_bits + _ROW_BITS)) | (place & (WINDOW_ROWS - 1))
    row_keys = row_keys.to(torch.int32 if bits < 32 else torch.int64)
    keys = torch.repeat_interleave(row_keys, lengths, output_size=csr.nnz)
    keys, entry = torch.sort(keys.add_(csr.indices, alpha=WINDOW_ROWS))
    first_row = torch.arange(windows + 1, device=device) * WINDOW_ROWS
    return ColumnMajor(keys, entry, start[first_row.clamp_(max=rows)], column_bits)


@dataclass(frozen=True, eq=False)
class BRP(Format):
    """See the module's docstring for the arrays."""

    name = "brp"
    variants: ClassVar[Variants] = {
        "paper": {},
        "one tile": {"fixed": 1, "group": 1},
        "pairs": {"fixed": 2, "group": 4},
        "threes": {"fixed": 3, "group": 1},
        "full columns": {"fixed": 16, "group": 2},
    }
    index_arrays = (
        "group_window_id", "local_id", "old_col_id",
        "res_rows_id", "res_row_offset", "res_col_id",
    )  # fmt: skip
    value_maps = ("entries",)

    # group_window_id, old_col_id, res_rows_id, res_row_offset, res_col_id: int32.
    group_window_id: Tensor
    local_id: Tensor  # uint8
    old_col_id: Tensor
    res_rows_id: Tensor
    res_row_offset: Tensor
    res_col_id: Tensor
    # int32 [nnz]: canonical entry number of each packed value: groups, then residual rows.
    entries: Tensor
    # int32 [M]: row of A at each position; window w has the positions from 16 * w on. None: the
    # given order.
    order: Tensor | None
    shape: tuple[int, int]  # (M, K) of A
    fixed: int = 1  # entries of each tile column
    group: int = 4  # tiles of each group

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, fixed: int = 1, group: int = 4) -> Self:
        """CSR of fewer than 2^31 entries -> BRP of ``fixed`` entries a column, ``group`` tiles a
        group.
        """
        return cls.pack_sorted(csr, order, sort_windows(csr, order), fixed=fixed, group=group)

    @classmethod
    def pack_sorted(
        cls, csr: CSR, order: Tensor | None, found: ColumnMajor, *, fixed: int, group: int
    ) -> Self:
        """CSR -> BRP, given :func:`sort_windows` of the same matrix and order."""
        check_parameters(fixed, group)
        device, columns = csr.device, TILE_COLUMNS * group
        pair_slice = None
        window_slice = found.window_entry  # f = 1: every sorted entry is a slice
        if fixed > 1:
            pair_slice, window_slice = found.slices(fixed)
        groups_of = (window_slice[1:] - window_slice[:-1]) // columns
        window_group = offsets(groups_of)
        groups = int(window_group[-1])
        window = owners(groups_of, groups)
        # Slices of each group, then the sorted entries of each slice.
        first = window_slice[window] + _ranges(-window_group[:-1], groups_of, groups) * columns
        source = (first.unsqueeze(1) + torch.arange(columns, device=device)).reshape(-1)
        if pair_slice is None:
            grouped = groups_of * columns
            left = window_slice[1:] - window_slice[:-1] - grouped
            begin = window_slice[:-1] + grouped - offsets(left)[:-1]
            rest = _ranges(begin, left, csr.nnz - source.numel())
        else:
            slices_of = pair_slice[1:] - pair_slice[:-1]
            begin = found.pair_entry[:-1] - pair_slice[:-1] * fixed
            slice_entry = _ranges(begin, slices_of, int(pair_slice[-1]), fixed)
            source = slice_entry[source].unsqueeze(1) + torch.arange(fixed, device=device)
            source = source.reshape(-1)
            outside = torch.ones(csr.nnz, dtype=torch.bool, device=device)
            outside.index_fill_(0, source, False)
            rest = torch.nonzero(outside).squeeze(1)
        entry = found.entry[source]
        # The row is in a key's lowest bits: one byte is enough.
        local = found.keys[source].to(torch.uint8).bitwise_and_(WINDOW_ROWS - 1)
        local = local.mul_(TILE_COLUMNS).reshape(-1, TILE_COLUMNS, fixed)
        local = local.add_(torch.arange(TILE_COLUMNS, dtype=torch.uint8, device=device)[:, None])
        place, offset, res_col, res_entry = _residual_rows(found, rest)
        res_rows = place if order is None else order[place]
        entries = torch.empty(csr.nnz, dtype=torch.int32, device=device)
        entries[: entry.numel()] = entry
        entries[entry.numel() :] = res_entry
        return cls(
            window.to(torch.int32), local.reshape(-1), csr.indices[entry[::fixed]],
            res_rows.to(torch.int32), offset.to(torch.int32), res_col, entries,
            None if order is None else order.to(torch.int32), csr.shape, fixed, group,
        )  # fmt: skip

    @property
    def window_count(self) -> int:
        return -(-self.shape[0] // WINDOW_ROWS)

    @property
    def group_count(self) -> int:
        return self.group_window_id.numel()

    @property
    def tile_count(self) -> int:
        return self.group_count * self.group

    @property
    def group_entries(self) -> int:
        """Entries of each group: 8 f g."""
        return TILE_COLUMNS * self.fixed * self.group

    @property
    def tile_share(self) -> float:
        """Share of the entries in groups."""
        return self.local_id.numel() / max(self.entries.numel(), 1)

    def units(self) -> Units:
        """Windows; a unit's list is its groups. Residual rows: :meth:`residual_units`."""
        windows = torch.arange(self.window_count + 1, device=self.entries.device)
        return Units.from_offsets(torch.searchsorted(self.group_window_id.to(torch.int64), windows))

    def residual_units(self) -> Units:
        """Residual rows, labelled with rows of A; a unit's list is its residual entries."""
        offset = self.res_row_offset.to(torch.int64)
        rows = self.res_rows_id.to(torch.int64)
        bundled = torch.zeros_like(rows, dtype=torch.bool)
        return Units(rows, offset[:-1], offset[1:] - offset[:-1], bundled)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> values of groups, then those of residual rows."""
        values = checked_values(values, self.entries.numel(), dtype, self.entries.device)
        return gather_values(values, self.entries)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every packed value in order."""
        window = self.group_window_id.to(torch.int64).repeat_interleave(self.group_entries)
        row = window * WINDOW_ROWS + self.local_id.to(torch.int64) // TILE_COLUMNS
        if self.order is not None:
            row = self.order.to(torch.int64)[row]
        rest = self.residual_units()
        row = torch.cat([row, torch.repeat_interleave(rest.label, rest.length)])
        column = torch.cat([self.old_col_id.repeat_interleave(self.fixed), self.res_col_id])
        return row, column.to(torch.int64), torch.arange(row.numel(), device=row.device)


def check_parameters(fixed: int, group: int) -> None:
    """Raise unless ``fixed`` and ``group`` are in range."""
    if not 1 <= fixed <= WINDOW_ROWS:
        raise value_error(
            "BRP.pack", "fixed", f"from 1 to {WINDOW_ROWS}", fixed,
            "Choose how many entries each tile column holds",
        )  # fmt: skip
    if group < 1:
        raise value_error(
            "BRP.pack", "group", "at least 1", group, "Choose how many tiles each group has"
        )


def _residual_rows(found: ColumnMajor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted entries -> positions of their rows, offsets of these, columns and entry numbers.

    The second sort: keys with column and row exchanged bring entries back to rows.
    """
    bits, keys = found.column_bits, found.keys[rest]
    columns = (1 << bits) - 1
    place = (keys >> (bits + _ROW_BITS) << _ROW_BITS) | (keys & (WINDOW_ROWS - 1))
    keys, by_row = torch.sort((place << bits) | ((keys >> _ROW_BITS) & columns))
    place = keys >> bits
    offset = _run_offsets(place)
    column = (keys & columns).to(torch.int32)
    return place[offset[:-1]].to(torch.int64), offset, column, found.entry[rest[by_row]]


def _run_offsets(keys: Tensor) -> Tensor:
    """First element of each run of equal keys, and the number of keys: int64 [runs + 1]."""
    is_first = torch.ones(keys.numel() + 1, dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:-1])
    return torch.nonzero(is_first).squeeze(1)


def _ranges(begin: Tensor, counts: Tensor, total: int, step: int = 1) -> Tensor:
    """Ranges of ``counts`` numbers one after the other: element i is begin of its range + i * step.

    Callers subtract the elements before a range from its ``begin``. ``total`` is the sum of counts.
    """
    number = torch.arange(0, total * step, step, device=begin.device)
    return number.add_(torch.repeat_interleave(begin, counts, output_size=total))
