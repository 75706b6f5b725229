"""BRP's groups of entries: slices of columns of windows, tiles of slices, groups of tiles.

BRP-SpMM, sections IV-B and IV-C. A window is sixteen rows (in the plan's order); its entries are
sorted column-major. *Fixed Non-zero*: each column of a 16x8 tile holds exactly ``fixed`` entries
(f) of one column of A, so a column of a window is cut into slices of f entries. A *TC Block Group*
is ``group`` tiles (g) of one window. The paper has f = 1 and g = 4. Entries that fill no slice, and
slices that fill no group, are left over. Entries of a column are in the order of their positions.

Built with tensor operations on A's device: two key sorts and prefix sums, no loop over windows, no
atomics, the same bits in every run. Keys have 32 bits if window, column and row fit, else 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR, offsets
from sparsetile.reorder.permutation import positions

__all__ = ["TILE_COLUMNS", "WINDOW_ROWS", "ColumnMajor", "sort_windows"]

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
        pairs = self.keys >> _ROW_BITS
        is_first = torch.ones(pairs.numel() + 1, dtype=torch.bool, device=pairs.device)
        torch.ne(pairs[1:], pairs[:-1], out=is_first[1:-1])
        return torch.nonzero(is_first).squeeze(1)

    def slices(self, fixed: int) -> tuple[Tensor, Tensor]:
        """Return the first slice of ``fixed`` entries of each pair, and of each window; int64."""
        pair_slice = offsets((self.pair_entry[1:] - self.pair_entry[:-1]) // fixed)
        # A window begins with a pair, so its first entry is among the pairs' first.
        window_pair = torch.searchsorted(self.pair_entry, self.window_entry)
        return pair_slice, pair_slice[window_pair]

    def grouped(self, fixed: int, columns: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return the groups of ``columns`` slices of each window marked by ``kept``, 0 for others,
        and the sorted entries in them."""
        pair_slice, window_slice = None, self.window_entry  # f = 1: each sorted entry is a slice
        if fixed > 1:
            pair_slice, window_slice = self.slices(fixed)
        groups = torch.where(kept, window_slice.diff() // columns, 0)
        source = _ranges(window_slice[:-1], groups * columns)
        if pair_slice is not None:
            entry_of_slice = _ranges(self.pair_entry[:-1], pair_slice.diff(), fixed)
            inside = torch.arange(fixed, device=source.device)
            source = (entry_of_slice[source].unsqueeze(1) + inside).reshape(-1)
        return groups, source

    def by_row(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sorted entries row by row: positions of their rows, columns and entry numbers.

        The second sort: keys with column and row exchanged bring entries back to rows.
        """
        bits, keys = self.column_bits, self.keys[chosen]
        columns = (1 << bits) - 1
        place = (keys >> (bits + _ROW_BITS) << _ROW_BITS) | (keys & (WINDOW_ROWS - 1))
        keys, order = torch.sort((place << bits) | ((keys >> _ROW_BITS) & columns))
        return (keys >> bits).to(torch.int64), keys & columns, self.entry[chosen[order]]


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


def _ranges(begin: Tensor, counts: Tensor, step: int = 1) -> Tensor:
    """Ranges of ``counts`` numbers one after the other, each from its ``begin`` in steps."""
    before = offsets(counts)
    number = torch.arange(int(before[-1]), device=begin.device)
    return torch.repeat_interleave(begin - before[:-1] * step, counts) + number * step
