"""The split of rows between Tensor-Core windows and CUDA cores: RSH-SpMM, section 3.3.1.

A window is eight or sixteen neighbouring rows (in the plan's order) and may begin at any row. Two
rules:

``threshold``   Algorithm 1 of the paper. Row r adds ``delta`` columns to the rows after it. With
                few entries and few new columns it is left to CUDA cores; otherwise it opens a
                window.
``cost``        ours: the split with the least predicted time. Every row has a time on CUDA cores,
                every possible window one on Tensor Cores; the best split is a shortest path from
                the first row to the last, found in one pass from the end.

Both use the same counts. For all rows at once, ``delta`` depends on the next row with the same
column: one sort by (column, position), on A's device. Only the walk is sequential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.bittcf import TILE_COLUMNS
from sparsetile.formats.row_parts import counted_in_parts, row_parts
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = [
    "Counts", "Partition", "RowCosts", "cheapest_partition", "count_columns", "split_by_cost",
    "split_by_threshold",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Partition:
    """Positions in the plan's order; all int64."""

    # [windows]: first position of each window; a window has ``height`` positions, the last maybe
    # fewer.
    windows: Tensor
    # [rows outside]: positions in no window, ascending, including rows without entries.
    residual: Tensor
    # rows, height: rows of A, and of a window.
    rows: int
    height: int

    @cached_property
    def tiled(self) -> Tensor:
        """Positions inside windows, window after window."""
        inside = torch.arange(self.height, device=self.windows.device)
        found = (self.windows.unsqueeze(1) + inside).reshape(-1)
        # Windows ascend, so only the last may reach past the rows.
        past = 0
        if found.numel():
            past = max(int(self.windows[-1]) + self.height - self.rows, 0)
        return found[: found.numel() - past]


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts of a matrix in one row order, each [rows]."""

    entries: Tensor  # int64: entries of the row at each position
    delta: Tensor  # int64: columns of that row that no other row of the window beginning there has
    pairs: Tensor  # int64: distinct columns of the window that begins there
    height: int  # rows of a window


def count_columns(csr: CSR, order: Tensor | None = None, height: int = 8) -> Counts:
    """Count entries, new columns and columns of windows of ``height`` rows at every position."""
    if not counted_in_parts(csr, height):
        return _count(csr, order, height)
    # A window, and the search for the next row of a column, end within ``height`` rows.
    found = [
        (own, _count(part, None, height))
        for own, part in row_parts(csr, order, height, overlap=height)
    ]
    entries, delta, pairs = (
        torch.cat([getattr(counts, name)[:own] for own, counts in found])
        for name in ("entries", "delta", "pairs")
    )
    return Counts(entries, delta, pairs, height)


def _count(csr: CSR, order: Tensor | None, height: int) -> Counts:
    rows, device = csr.shape[0], csr.device
    # Half the memory if the places by distance, counted below, fit 32 bits.
    kind = torch.int32 if rows * height < 2**31 else torch.int64
    place = csr.row_ids(kind)
    if order is not None:
        place = positions(order).to(kind)[place]
    # Entries of one column follow each other by position: find the distance to the next.
    if order is None:  # entries are by position already
        column, entry = torch.sort(csr.indices, stable=True)
        far = place[entry].diff()
    else:
        keys, entry = torch.sort(csr.indices.to(torch.int64) * max(rows, 1) + place)
        column = torch.div(keys, max(rows, 1), rounding_mode="floor")
        far = keys.diff()
        del keys
    distance = torch.full((csr.nnz,), height, dtype=kind, device=device)
    gap = torch.where(column[1:] == column[:-1], far, height)
    distance[entry[:-1]] = torch.clamp(gap, max=height).to(kind)
    del column, entry, far, gap
    # by_distance[p, d - 1]: entries at p whose column comes again d rows later; d = height: later,
    # or never. (bincount would make the host wait for the largest number.)
    by_distance = torch.zeros(rows * height, dtype=torch.int64, device=device)
    each = distance.add_(place * height).sub_(1)
    by_distance.index_add_(0, each, by_distance.new_ones(()).expand(csr.nnz))
    by_distance = by_distance.reshape(rows, height)
    later = by_distance.flip(1).cumsum(1).flip(1)  # later[p, d - 1]: not within d - 1 rows
    padded = torch.cat([later, later.new_zeros((height, height))])
    # The window at p counts a column at the last of its rows that has it: the sum over i of
    # padded[p + i, height - 1 - i].
    pairs = padded.as_strided((rows, height), (height, height - 1), height - 1).sum(1)
    return Counts(by_distance.sum(1), by_distance[:, height - 1], pairs, height)


def _partition(starts: Tensor, counts: Counts) -> Partition:
    rows, height, device = counts.entries.numel(), counts.height, starts.device
    outside = torch.ones(rows + height, dtype=torch.bool, device=device)
    inside = starts.unsqueeze(1) + torch.arange(height, device=device)
    outside[inside.reshape(-1)] = False
    return Partition(starts, torch.nonzero(outside[:rows]).squeeze(1), rows, height)


def split_by_threshold(counts: Counts, max_entries: int, max_new: int) -> Partition:
    """Algorithm 1: rows with at most ``max_entries`` (tau_nnz) entries of which fewer than
    ``max_new`` (tau_inc) are in new columns are residual; else a window opens. 0 leaves only empty
    rows.
    """
    if max_entries < 0 or max_new < 0:
        raise value_error(
            "split_by_threshold", "thresholds", "at least 0", (max_entries, max_new), "Raise them"
        )
    rows, device = counts.entries.numel(), counts.entries.device
    low = (counts.delta < max_new) & (counts.entries <= max_entries)
    residual = low | (counts.entries == 0)
    # The walk advances by one row or by a window. Doubling finds the rows that it visits.
    here = torch.arange(rows + 1, device=device)
    step = torch.where(torch.cat([residual, residual.new_ones(1)]), 1, counts.height)
    jump = torch.clamp(here + step, max=rows)
    met = torch.zeros(rows + 1, dtype=torch.bool, device=device)
    met[0] = True
    reach = 1
    while reach <= rows:
        met[jump[met]] = True
        jump = jump[jump]
        reach *= 2
    return _partition(torch.nonzero(met[:rows] & ~residual).squeeze(1), counts)


@dataclass(frozen=True)
class RowCosts:
    """Costs of work, in any one unit of time."""

    # tile, window: eight distinct columns of a window, and the window itself, on Tensor Cores.
    tile: float
    window: float
    # entry, new, row: an entry, a column that the next rows do not have, and the row itself, on
    # CUDA cores.
    entry: float
    new: float
    row: float
    # longest, piece: tiles above which a window is cut, 0 for never, and each of its pieces.
    longest: int = 0
    piece: float = 0.0

    def of_rows(self, counts: Counts) -> Tensor:
        """Cost of each row on CUDA cores, float64."""
        return self.row + self.of_entries(counts.entries, counts.delta)

    def of_entries(self, entries: Tensor, delta: Tensor) -> Tensor:
        """Cost on CUDA cores of ``entries`` entries, ``delta`` of them in new columns, float64."""
        return self.entry * entries.double() + self.new * delta.double()

    def of_windows(self, counts: Counts) -> Tensor:
        """Cost of the window that begins at each row, float64."""
        tiles = (counts.pairs + TILE_COLUMNS - 1) // TILE_COLUMNS
        cost = self.window + self.tile * tiles.double()
        if self.longest:
            pieces = (tiles + self.longest - 1) // self.longest
            cost += self.piece * torch.where(pieces > 1, pieces, 0).double()
        return cost


def split_by_cost(counts: Counts, costs: RowCosts) -> Partition:
    """The split with the least total cost."""
    split = cheapest_partition(counts, costs.of_rows(counts), costs.of_windows(counts))
    assert split is not None
    return split


def cheapest_partition(
    counts: Counts, rows: Tensor, windows: Tensor, most: float = math.inf
) -> Partition | None:
    """The same from the costs of rows and of the windows that begin at them.

    None if a bound shows that every split costs more than ``most``, as it does for most matrices
    (docs/explanation/notes/planning.md).
    """
    from sparsetile.reorder.cheapest_windows import cheapest_windows, least_cost

    alone, together = torch.stack([rows, windows]).cpu().numpy()
    if least_cost(alone, together, counts.height) > most:
        return None
    starts = torch.from_numpy(np.flatnonzero(cheapest_windows(alone, together, counts.height)))
    return _partition(starts.to(counts.entries.device), counts)
