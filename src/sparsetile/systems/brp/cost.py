"""The choice of f and g for a matrix, the windows that keep their groups, and the predicted time.

BRP-SpMM leaves this choice open. Each (f, g) gives every window its tiles and the entries outside
them, from counts of its (window, column) pairs, without packing. A window keeps its groups if its
tiles and the entries outside are predicted to take less than its rows take of ``csr``'s product.
The (f, g) with the least sum is taken.

On the host those counts need a sort of all entries. So a bound is tried first: the least time of
every f, from the entries and the distinct columns of each window, which ``rsh`` has counted. If
that cannot win, as for most matrices, nothing is sorted. On a GPU all counts come at once
(windows.py).

Constants were fitted to H200 times of 14 matrices with every window in groups of f = 1 and g = 4
(docs/explanation/notes/brp.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.engines.request import Request
from sparsetile.engines.rows.cost import least_seconds, predict_rows
from sparsetile.engines.tiles.hybrid_cost import row_costs, start_seconds
from sparsetile.formats.brp import TILE_COLUMNS, WINDOW_ROWS
from sparsetile.kernels.brp import FIXED
from sparsetile.systems.brp.windows import windows_of

__all__ = [
    "CHOICES", "DIRECT_CUT", "DIRECT_RUN", "DIRECT_SHARED", "GROUPS", "GroupSplit",
    "best_groups", "bound", "every_group", "groups_of", "predict_brp",
]  # fmt: skip

# Tiles of a group: even, so that a step of 16-bit types is whole.
GROUPS = (2, 4, 8)
# The paper's choice is first, so it wins ties.
CHOICES = ((1, 4), *(pair for pair in itertools.product(FIXED, GROUPS) if pair != (1, 4)))
# Groups that go straight into registers: tiles above which the warps of a block share a window (a
# group each), tiles above which it is cut (eight groups each), groups at which a run of short
# windows ends. By counting: none of the three was measured.
DIRECT_SHARED, DIRECT_CUT, DIRECT_RUN = 16, 128, 1
# Most entries outside groups of a window: fixed, and per tile. Windows are cut by tiles, and a part
# takes its share of these entries: more of them would be too much for one warp.
MOST_OUTSIDE, MOST_OUTSIDE_TILE = 256, 8
# Predicted time of a mixture, relative to CUDA cores alone, below which it is used.
MARGIN = 0.95


@dataclass(frozen=True)
class GroupTimes:
    """Microseconds."""

    start: float  # of a product with windows over one of rows: its longest chain of steps
    tile: float  # a thousand tiles: fixed, and a byte of a row of B
    tile_byte: float
    outside_byte: float  # a thousand entries outside groups, a byte of a row of B


# By bytes of an element.
TIMES = {
    4: GroupTimes(12.6, 0.08, 1.0e-3, 2.5e-4),
    2: GroupTimes(9.0, 0.095, 7.6e-4, 6.0e-4),
}


@dataclass(frozen=True, eq=False)
class GroupSplit:
    """f and g, the windows that keep their groups, and the seconds of one product."""

    fixed: int
    group: int
    kept: Tensor
    seconds: float


@dataclass(frozen=True, eq=False)
class WindowCosts:
    """Seconds: of ``csr``'s product in all and by windows, of a tile, of an entry outside groups
    and of the start of windows."""

    alone: float
    rows: Tensor
    tile: float
    outside: float
    start: float


def _costs(request: Request) -> WindowCosts:
    """Return the costs of windows; a window has its share of ``csr``'s product."""

    def found() -> WindowCosts:
        times, row = TIMES[4 if request.dtype.itemsize >= 4 else 2], request.row_bytes
        windows, of_rows = windows_of(request), row_costs(request)
        alone, start = predict_rows(request), start_seconds(request)
        rows = of_rows.of_entries(windows.entries, windows.fresh)
        if of_rows.row and rows.numel():
            rows += WINDOW_ROWS * of_rows.row
            rows[-1] -= of_rows.row * (-request.csr.shape[0] % WINDOW_ROWS)  # missing rows
        return WindowCosts(
            alone,
            rows * (alone / (start + float(rows.sum()))),
            (times.tile + times.tile_byte * row) * 1e-9,
            times.outside_byte * row * 1e-9,
            times.start * 1e-6,
        )

    return request.once(("costs of windows", request.n, request.dtype), found)


def bound(request: Request) -> float:
    """Return a lower bound of the predicted seconds of any choice of f, g and windows.

    Take a window of E entries in P columns, k of which have slices of f entries: the other P - k
    columns leave at least one entry outside each, and f k <= E - (P - k).
    """
    return request.once(("bound", request.n, request.dtype), lambda: _bound(request))


def _bound(request: Request) -> float:
    costs, windows = _costs(request), windows_of(request)
    entries, pairs = windows.entries.double(), windows.pairs.double()
    inside = [min(costs.tile / (TILE_COLUMNS * fixed), costs.outside) for fixed in FIXED]
    fewer = [float(max(fixed - 1, 1)) for fixed in FIXED]
    numbers = torch.tensor([fewer, inside], dtype=torch.float64).to(entries.device)
    outside = torch.clamp(pairs - (entries - pairs) / numbers[0].unsqueeze(1), min=0)
    outside[0] = 0.0  # f = 1: every entry fits a slice
    inside_cost = numbers[1].unsqueeze(1)
    least = (outside * costs.outside + (entries - outside) * inside_cost).amin(0)
    least = torch.minimum(costs.rows, least)
    return costs.alone + costs.start - float((costs.rows - least).sum())


def _may_keep(tiles: Tensor, outside: Tensor) -> Tensor:
    """Windows that have a group, and not too many entries outside."""
    return (tiles > 0) & (outside <= MOST_OUTSIDE + MOST_OUTSIDE_TILE * tiles)


def _counted_groups(request: Request, choices: Sequence[tuple[int, int]]) -> list[GroupSplit]:
    """Return the split of each (f, g); the host waits once."""
    windows, costs = windows_of(request), _costs(request)
    slices = torch.stack([windows.slices(fixed) for fixed, _ in choices])
    numbers = torch.tensor(choices).to(slices.device)
    fixed, group = numbers[:, :1], numbers[:, 1:]
    tiles = slices // (TILE_COLUMNS * group) * group
    outside = windows.entries - tiles * (TILE_COLUMNS * fixed)
    gain = costs.rows - tiles.double() * costs.tile - outside.double() * costs.outside
    kept = _may_keep(tiles, outside) & (gain > 0)
    gains = torch.where(kept, gain, 0.0).sum(1).tolist()
    return [
        GroupSplit(f, g, keeps, costs.alone + costs.start - saved)
        for (f, g), keeps, saved in zip(choices, kept, gains, strict=True)
    ]


def groups_of(request: Request, fixed: int, group: int) -> GroupSplit:
    """Return the split of one (f, g): windows that keep their groups, and the predicted seconds."""
    return _counted_groups(request, [(fixed, group)])[0]


def every_group(request: Request, fixed: int, group: int) -> Tensor:
    """Return the windows (bool, one each) that have a group and not too many entries outside."""
    return _may_keep(*windows_of(request).grouped(fixed, group))


def best_groups(request: Request) -> GroupSplit:
    """Return the (f, g) of least predicted time."""

    def best() -> GroupSplit:
        return min(_counted_groups(request, CHOICES), key=lambda split: split.seconds)

    return request.once(("groups", request.n, request.dtype), best)


def predict_brp(request: Request) -> tuple[GroupSplit | None, float]:
    """Return the split, None if CUDA cores alone are as fast, and the seconds of one product."""
    least = bound(request)  # may count csr's pairs as well
    alone = predict_rows(request)
    if least > MARGIN * alone:
        return None, alone
    split = best_groups(request)
    if split.seconds > MARGIN * alone:  # true if no window keeps its groups
        return None, alone
    return split, max(split.seconds, least_seconds(request))
