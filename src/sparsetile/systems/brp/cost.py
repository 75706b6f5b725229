"""Which f and g fit a matrix, which windows keep their groups, and what a product takes.

The problem that BRP-SpMM leaves open. Each (f, g) gives every window its tiles and the entries
outside them, from counts of its (window, column) pairs; nothing is packed to find out. A window
keeps its groups where its tiles and the entries outside are predicted to take less than its rows
would on CUDA cores; then (f, g) with the least sum is taken. Times of tiles and of rows are those
of ``rsh``, whose kernel it is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.formats.brp import TILE_COLUMNS, WINDOW_ROWS, ColumnMajor, sort_windows
from sparsetile.kernels.brp import FIXED
from sparsetile.systems.base import Request
from sparsetile.systems.csr.cost import least_seconds, predict_csr
from sparsetile.systems.rsh.cost import counted, row_costs, start_seconds

__all__ = ["CHOICES", "GROUPS", "GroupSplit", "best_groups", "groups_of", "predict_brp"]

# Tiles of a group: even, so that a step of 16-bit types is whole.
GROUPS = (2, 4, 8)
# The paper's first: it wins ties.
CHOICES = ((1, 4), *(pair for pair in itertools.product(FIXED, GROUPS) if pair != (1, 4)))
# An entry outside groups, over one of a row on CUDA cores: a window has its warp alone.
OUTSIDE = 2.0
# How much faster than CUDA cores alone a mixture must be predicted before it is taken.
MARGIN = 0.95


@dataclass(frozen=True, eq=False)
class GroupSplit:
    """f and g, the windows that keep their groups, and the seconds of one product."""

    fixed: int
    group: int
    kept: Tensor
    seconds: float


def sorted_windows(request: Request) -> ColumnMajor:
    """Sort the request's entries by windows, once."""
    return request.once(
        "sorted windows", lambda: sort_windows(request.csr, request.permutation.perm)
    )


def _by_window(of_rows: Tensor, windows: int) -> Tensor:
    """Sums over the rows of each window."""
    padded = of_rows.new_zeros(windows * WINDOW_ROWS)
    padded[: of_rows.numel()] = of_rows
    return padded.reshape(windows, WINDOW_ROWS).sum(1)


def groups_of(request: Request, fixed: int, group: int, *, every: bool = False) -> GroupSplit:
    """Return what one (f, g) gives: windows that keep their groups, and the predicted seconds.

    With ``every`` all windows keep them that have one.
    """
    found, costs = sorted_windows(request), row_costs(request)
    windows = found.window_entry.numel() - 1
    slices = found.window_entry if fixed == 1 else found.slices(fixed)[1]
    tiles = (slices[1:] - slices[:-1]) // (TILE_COLUMNS * group) * group
    outside = found.window_entry[1:] - found.window_entry[:-1] - tiles * (TILE_COLUMNS * fixed)
    rows = request.once(
        ("rows of windows", request.n, request.dtype),
        lambda: _by_window(costs.of_rows(counted(request)), windows),
    )
    in_groups = tiles.double() * costs.tile + outside.double() * (OUTSIDE * costs.entry)
    kept = tiles > 0 if every else (tiles > 0) & (in_groups < rows)
    seconds = float(torch.where(kept, in_groups, rows.double()).sum()) + start_seconds(request)
    return GroupSplit(fixed, group, kept, seconds)


def best_groups(request: Request) -> GroupSplit:
    """Return the (f, g) of least predicted time."""

    def best() -> GroupSplit:
        found = [groups_of(request, fixed, group) for fixed, group in CHOICES]
        return min(found, key=lambda split: split.seconds)

    return request.once(("groups", request.n, request.dtype), best)


def predict_brp(request: Request) -> tuple[GroupSplit | None, float]:
    """Return the split, None where CUDA cores alone are as fast, and the seconds of one product."""
    alone, split = predict_csr(request), best_groups(request)
    if not bool(split.kept.any()) or split.seconds > MARGIN * alone:
        return None, alone
    return split, max(split.seconds, least_seconds(request))
