"""Windows and columns of C shared out between persistent workers: Voltrix-SpMM, section 3.2.

A task is a window and a unit of columns of C. Tasks are flattened, window after window, and split
at points that even out the cost of Equation 1 (balance/cost_model.py, balance/partition_points.py).
If a split falls inside a window, two workers share the window along N: both read its tiles, each
writes its own columns, and no partial sums are needed. The paper's unit has 16 columns; here the
caller chooses it, because short pieces of rows of B are slow to copy.

Windows so long that their shares along N would have fewer than ``least`` units are first cut along
their tiles. The tree of balance/tree.py adds the pieces' partial sums in a fixed order.

``in_turn`` assigns each window to the worker with the least work so far. All workers are then at
about the same place of A at any time and find each other's rows of B in the cache; shares of
Algorithm 1 are far apart. The smallest windows, one per worker, come last and are split along N so
that all workers end together.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.cost_model import CostModel
from sparsetile.balance.partition_points import (
    greedy_points,
    points_at,
    refined_points,
    share_costs,
)
from sparsetile.balance.tree import TreeSchedule, build_tree, host_ranges
from sparsetile.core.errors import value_error
from sparsetile.formats.base import Variants
from sparsetile.formats.units import Units

__all__ = ["CoBalanced"]

ESTIMATE = CostModel()
# Fewest tiles of a piece of a cut window: partial sums cost time.
MIN_TILES = 16
# Pieces of cut windows per worker's share. More balance better, but each adds partial sums: with
# six, ex11 took 94 instead of 80 us at N = 512, and rajat16 227 instead of 202.
PIECES_A_SHARE = 4
# Windows above this multiple of the mean cost come first.
LARGE = 2.0
# Windows per worker at the end that are sorted by size.
SORTED_ROUNDS = 2


def _cut(
    tiles: np.ndarray,
    model: CostModel,
    width: int,
    least: int,
    workers: int,
    step: int,
    in_turn: bool,
) -> np.ndarray:
    """Return the number of pieces along the tiles of each window; 1: whole."""
    cost = tiles * model.tile + model.window
    share = max(float(cost.sum()) / workers, 1e-300)
    if in_turn:  # windows too large for a worker to have another one
        pieces = np.where(2 * cost > share, np.ceil(PIECES_A_SHARE * cost / share), 1.0)
    else:
        part = min(least, width) / width if width >= 2 * least else 1.0
        # Twice as many pieces as shares, so that there are places for split points between them.
        pieces = np.where(cost * part > share, np.ceil(2 * cost * part / share), 1.0)
    most = np.maximum(tiles // max(MIN_TILES, step), 1)
    return np.maximum(np.minimum(pieces.astype(np.int64), most), 1)


@dataclass(frozen=True)
class _Shares:
    """Tasks by worker: rows (windows or pieces) with a range of units, sorted by worker."""

    row: np.ndarray
    first: np.ndarray
    end: np.ndarray
    first_of_worker: np.ndarray
    largest: float


def _by_points(points: np.ndarray, rows: int, width: int) -> tuple[np.ndarray, ...]:
    """Return row, first unit, end and worker of the tasks between split points."""
    starts = np.unique(np.concatenate([np.arange(rows) * width, points[:-1]]))
    starts = starts[starts < rows * width]
    ends = np.append(starts[1:], rows * width) if starts.size else starts
    first = starts % width
    worker = np.searchsorted(points, starts, side="right") - 1
    return starts // width, first, first + ends - starts, np.minimum(worker, len(points) - 2)


def _contiguous(cost: np.ndarray, workers: int, width: int, refine: bool) -> _Shares:
    """Algorithm 1: neighbouring windows for each worker."""
    prefix = np.concatenate([[0.0], np.cumsum(cost)])
    points = greedy_points(prefix, width, workers)
    if refine:
        points = refined_points(points, prefix, width)
    shares = share_costs(points, prefix, width)
    row, first, end, worker = _by_points(points, len(cost), width)
    largest = float(shares.max() * workers / prefix[-1]) if prefix[-1] > 0 else 1.0
    return _Shares(row, first, end, np.searchsorted(worker, np.arange(workers + 1)), largest)


def _in_turn(cost: np.ndarray, workers: int, width: int) -> _Shares:
    """Assign whole windows to the worker with the least so far, the last ones by remaining need."""
    whole = max(len(cost) - workers, 0)
    # Large ones first; the smallest come last and are split.
    large = cost > LARGE * (cost.mean() if cost.size else 0.0)
    first_rows, rows = np.flatnonzero(large), np.flatnonzero(~large)
    begin = max(len(rows) - (SORTED_ROUNDS + 1) * workers, 0)
    last_rows = rows[begin:]
    rows = np.concatenate(
        [
            first_rows[np.argsort(-cost[first_rows], kind="stable")],
            rows[:begin],
            last_rows[np.argsort(-cost[last_rows], kind="stable")],
        ]
    )
    cost = cost[rows]
    owner = np.zeros(whole, dtype=np.int64)
    heap = [(0.0, worker) for worker in range(workers)]
    for place, each in enumerate(cost[:whole].tolist()):
        load, worker = heap[0]
        owner[place] = worker
        heapq.heapreplace(heap, (load + each, worker))
    loads = np.array([load for load, _ in sorted(heap, key=lambda pair: pair[1])])
    prefix = np.concatenate([[0.0], np.cumsum(cost[whole:])])
    need = np.maximum(cost.sum() / workers - loads, 0.0)
    need *= prefix[-1] / need.sum() if need.sum() > 0 else 0.0
    points = points_at(np.cumsum(need)[:-1], prefix, width)
    row, first, end, worker_of = _by_points(points, len(cost) - whole, width)
    loads += share_costs(points, prefix, width)
    place_of = np.concatenate([np.arange(whole), whole + row])
    worker_of = np.concatenate([owner, worker_of])
    first = np.concatenate([np.zeros(whole, dtype=np.int64), first])
    end = np.concatenate([np.full(whole, width), end])
    order = np.argsort(worker_of, kind="stable")  # by worker, each in the order of places
    largest = float(loads.max() / loads.mean()) if loads.sum() > 0 else 1.0
    bounds = np.searchsorted(worker_of[order], np.arange(workers + 1))
    return _Shares(rows[place_of[order]], first[order], end[order], bounds, largest)


@dataclass(frozen=True, eq=False)
class CoBalanced(TreeSchedule):
    """Persistent workers' shares of (window, columns) tasks; all int32.

    Items [items, 8] are ``window, first tile, end, slot of a piece or -1, first unit of columns,
    end, 0, 0``, worker by worker; a worker's first is in ``first_of_worker``. A window has
    ``width`` units of columns. ``largest`` is the largest share of the cost over the mean: 1 is
    perfect balance.
    """

    name = "cobalanced"
    consecutive = True
    variants: ClassVar[Variants] = {
        "7 workers": {"workers": 7, "width": 16},
        "3 workers in turn": {"workers": 3, "width": 8, "in_turn": True},
        "50 workers in turn": {"workers": 50, "width": 4, "in_turn": True, "step": 2},
        "40 workers, steps of 2": {"workers": 40, "width": 4, "step": 2, "least": 4},
        "greedy alone": {"workers": 9, "width": 16, "refine": False},
        "whole windows": {"workers": None, "width": 16},
    }
    arrays: ClassVar[tuple[str, ...]] = ("items", "first_of_worker", "parent_of_slot", "nodes")

    first_of_worker: Tensor
    width: int
    largest: float

    @classmethod
    def make(
        cls,
        units: Units,
        *,
        workers: int | None,
        width: int,
        model: CostModel = ESTIMATE,
        least: int = 1,
        step: int = 1,
        in_turn: bool = False,
        refine: bool = True,
    ) -> Self:
        """Share out the tasks of consecutive windows of tiles evenly.

        ``workers`` thread blocks run at the same time; None: not persistent, one worker per window.
        A window has ``width`` units of columns, the D of ``model``. Windows whose shares along N
        would have fewer than ``least`` units are cut along their tiles, at multiples of ``step``.
        With ``in_turn`` workers take windows in turn; otherwise each has neighbouring windows by
        Algorithm 1, and with ``refine`` one generation of a genetic search follows.
        """
        cls._require(units)
        for name, value in (("workers", 1 if workers is None else workers), ("width", width)):
            if value < 1:
                raise value_error(
                    "CoBalanced.make", name, "at least 1", value, "Choose a larger one"
                )
        assert units.offsets is not None  # checked by _require
        # On the host: dozens of steps on short lists of windows.
        offsets = units.offsets.cpu().numpy()
        tiles = np.diff(offsets)
        if workers is None:
            pieces = np.ones_like(tiles)
        else:
            pieces = _cut(tiles, model, width, least, workers, step, in_turn)
        window, number = host_ranges(pieces)
        # Pieces of a window are as even as whole steps allow.
        steps, count = ((tiles + step - 1) // step)[window], pieces[window]
        begin = steps * number // count * step
        end = np.minimum(steps * (number + 1) // count * step, tiles[window])
        is_cut = count > 1
        slot = np.where(is_cut, np.cumsum(is_cut) - 1, -1)
        tree = build_tree(torch.from_numpy(pieces[pieces > 1]))
        if workers is None:
            each = np.arange(tiles.size + 1)
            whole = np.full(tiles.size, width)
            shares = _Shares(each[:-1], whole * 0, whole, each, _largest(tiles, model))
        else:
            cost = (end - begin) * model.tile + model.window
            if in_turn:
                shares = _in_turn(cost, workers, width)
            else:
                shares = _contiguous(cost, workers, width, refine)
        row, zero = shares.row, np.zeros_like(shares.row)
        first = offsets[window[row]]
        items = np.stack(
            [
                window[row],
                first + begin[row],
                first + end[row],
                slot[row],
                shares.first,
                shares.end,
                zero,
                zero,
            ],
            1,
        )
        lists = (
            torch.from_numpy(part.astype(np.int32)) for part in (items, shares.first_of_worker)
        )
        listed, first_of_worker = (part.to(units.length.device) for part in lists)
        parent_of_slot, nodes = (part.to(units.length.device) for part in tree)
        return cls(listed, parent_of_slot, nodes, first_of_worker, width, shares.largest)

    @property
    def worker_count(self) -> int:
        return self.first_of_worker.numel() - 1

    @property
    def shared_windows(self) -> int:
        """Items beyond one for each window or piece: how often N was split."""
        return int((self.items[:, 4] > 0).sum())

    def _leading(self) -> Tensor:
        """Items with the first column of a window or piece: one for each."""
        return self.items[self.items[:, 4] == 0].to(torch.int64)

    def pieces(self) -> Tensor:
        """Return one piece for each window or piece of one, however its columns are split."""
        window, begin, end = self._leading()[:, :3].unbind(1)
        return torch.stack([torch.zeros_like(window), window, begin, end], 1)

    def slots(self) -> Tensor:
        return self._leading()[:, 3]


def _largest(tiles: np.ndarray, model: CostModel) -> float:
    """Largest window's cost over the mean."""
    cost = tiles * model.tile + model.window
    return float(cost.max() / cost.mean()) if cost.size else 1.0
