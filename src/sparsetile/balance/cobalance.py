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
from sparsetile.formats.units import Units

__all__ = ["CoBalanced"]

ESTIMATE = CostModel()
# Fewest tiles of a piece of a cut window, and tiles that take as long as its partial sum of sixteen
# rows: 63 products at N = 128 and 512 on an H200 (docs/explanation/notes/voltrix.md).
MIN_TILES, PARTIAL = 16, 18.0
# Parts of a large window per worker's share; 0: none is cut. More of them balance better, but parts
# along N copy narrow rows of B and those along the tiles add partial sums: the cheapest is taken.
PARTS_A_SHARE = (0, 1, 2, 4)
# Share of a row's cost that a copy of few of its columns has too.
COPY_SHARE = 0.1
# Windows above this multiple of the mean cost come first.
LARGE = 2.0
# Windows per worker at the end that are sorted by size.
SORTED_ROUNDS = 2


def _within_steps(pieces: np.ndarray, tiles: np.ndarray, step: int) -> np.ndarray:
    """Return as many pieces along the tiles, or fewer if they were too short."""
    most = np.maximum(tiles // max(MIN_TILES, step), 1)
    return np.maximum(np.minimum(pieces.astype(np.int64), most), 1)


def _cut(cost: np.ndarray, width: int, least: int, workers: int) -> np.ndarray:
    """Return the number of pieces along the tiles of each window for Algorithm 1; 1: whole."""
    share = max(float(cost.sum()) / workers, 1e-300)
    part = min(least, width) / width if width >= 2 * least else 1.0
    # Twice as many pieces as shares, so that there are places for split points between them.
    return np.where(cost * part > share, np.ceil(2 * cost * part / share), 1.0)


def _cut_in_turn(
    cost: np.ndarray, width: int, workers: int, parts_a_share: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces along the tiles of each window and the parts along N of each of them.

    Along N first, which needs no partial sums.
    """
    share = max(float(cost.sum()) / workers, 1e-300)
    is_large = (cost > min(1.0, 2 / max(parts_a_share, 1)) * share) & (parts_a_share > 0)
    parts = np.where(is_large, np.ceil(parts_a_share * cost / share), 1.0)
    along_n = np.minimum(parts, width)
    return np.ceil(parts / along_n), along_n.astype(np.int64)


@dataclass(frozen=True)
class _Pieces:
    """Windows, some cut along their tiles."""

    count: np.ndarray  # of each window
    # Of each piece: its window, its tiles within the window, its slot or -1.
    window: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    slot: np.ndarray

    def cost(self, model: CostModel, partial: float = 0.0) -> np.ndarray:
        tiles = self.end - self.begin + np.where(self.slot >= 0, partial, 0.0)
        return tiles * model.tile + model.window


def _pieces(tiles: np.ndarray, count: np.ndarray, step: int) -> _Pieces:
    """Pieces of a window are as even as whole steps allow."""
    window, number = host_ranges(count)
    steps, of_window = ((tiles + step - 1) // step)[window], count[window]
    begin = steps * number // of_window * step
    end = np.minimum(steps * (number + 1) // of_window * step, tiles[window])
    is_cut = of_window > 1
    return _Pieces(count, window, begin, end, np.where(is_cut, np.cumsum(is_cut) - 1, -1))


@dataclass(frozen=True)
class _Shares:
    """Tasks by worker: rows (windows or pieces) with a range of units, sorted by worker."""

    row: np.ndarray
    first: np.ndarray
    end: np.ndarray
    first_of_worker: np.ndarray
    largest: float  # share of the cost over the mean
    most: float = 0.0  # cost of that share


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


def _in_turn(
    cost: np.ndarray, workers: int, width: int, along_n: np.ndarray, copies: np.ndarray
) -> _Shares:
    """Assign windows to the worker with the least so far, the last ones by remaining need.

    A row of ``cost`` has ``along_n`` parts of its units, each with ``copies`` on top.
    """
    row = np.repeat(np.arange(cost.size), along_n)
    part = np.arange(row.size) - (np.cumsum(along_n) - along_n)[row]
    first, end = (width * at // along_n[row] for at in (part, part + 1))
    is_part = along_n[row] > 1
    cost = cost[row] * (end - first) / width + np.where(is_part, copies[row], 0.0)
    # Parts and large ones first; the smallest come last and are split.
    is_first = is_part | (cost > LARGE * (cost.mean() if cost.size else 0.0))
    first_tasks, tasks = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    whole = cost.size - min(workers, tasks.size)
    begin = max(len(tasks) - (SORTED_ROUNDS + 1) * workers, 0)
    last_tasks = tasks[begin:]
    tasks = np.concatenate(
        [
            first_tasks[np.argsort(-cost[first_tasks], kind="stable")],
            tasks[:begin],
            last_tasks[np.argsort(-cost[last_tasks], kind="stable")],
        ]
    )
    row, first, end, cost = row[tasks], first[tasks], end[tasks], cost[tasks]
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
    split_row, split_first, split_end, split_owner = _by_points(points, len(cost) - whole, width)
    loads += share_costs(points, prefix, width)
    row = np.concatenate([row[:whole], row[whole:][split_row]])
    first = np.concatenate([first[:whole], split_first])
    end = np.concatenate([end[:whole], split_end])
    owner = np.concatenate([owner, split_owner])
    order = np.argsort(owner, kind="stable")  # by worker, each in the order of tasks
    largest = float(loads.max() / loads.mean()) if loads.sum() > 0 else 1.0
    bounds = np.searchsorted(owner[order], np.arange(workers + 1))
    return _Shares(row[order], first[order], end[order], bounds, largest, float(loads.max()))


def _cheapest_in_turn(
    tiles: np.ndarray, model: CostModel, width: int, workers: int, step: int, partial: float
) -> tuple[_Pieces, _Shares]:
    """Cut large windows in several ways and return the one whose largest share costs least."""
    cost = tiles * model.tile + model.window
    found: list[tuple[_Pieces, _Shares]] = []
    tried: set[bytes] = set()
    for parts_a_share in PARTS_A_SHARE:
        wanted, along_n = _cut_in_turn(cost, width, workers, parts_a_share)
        count = _within_steps(wanted, tiles, step)
        key = count.tobytes() + along_n.tobytes()
        if key in tried:
            continue
        tried.add(key)
        pieces = _pieces(tiles, count, step)
        copies = (pieces.end - pieces.begin) * (model.tile * COPY_SHARE)
        found.append((
            pieces,
            _in_turn(pieces.cost(model, partial), workers, width, along_n[pieces.window], copies),
        ))  # fmt: skip
    return min(found, key=lambda pair: pair[1].most)


@dataclass(frozen=True, eq=False)
class CoBalanced(TreeSchedule):
    """Persistent workers' shares of (window, columns) tasks; all int32.

    Items [items, 8] are ``window, first tile, end, slot of a piece or -1, first unit of columns,
    end, 0, 0``, worker by worker; a worker's first is in ``first_of_worker``. A window has
    ``width`` units of columns. ``largest`` is the largest share of the cost over the mean: 1 is
    perfect balance.
    """

    consecutive = True
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
        partial: float = PARTIAL,
    ) -> Self:
        """Share out the tasks of consecutive windows of tiles evenly.

        ``workers`` thread blocks run at the same time; None: not persistent, one worker per window.
        A window has ``width`` units of columns, the D of ``model``. Windows whose shares along N
        would have fewer than ``least`` units are cut along their tiles, at multiples of ``step``.
        With ``in_turn`` workers take windows in turn, and a partial sum costs as much as
        ``partial`` tiles; otherwise each has neighbouring windows by Algorithm 1, and with
        ``refine`` one generation of a genetic search follows.
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
            pieces = _pieces(tiles, np.ones_like(tiles), step)
            each = np.arange(tiles.size + 1)
            whole = np.full(tiles.size, width)
            shares = _Shares(each[:-1], whole * 0, whole, each, _largest(tiles, model))
        elif in_turn:
            pieces, shares = _cheapest_in_turn(tiles, model, width, workers, step, partial)
        else:
            cost = tiles * model.tile + model.window
            wanted = _cut(cost, width, least, workers)
            pieces = _pieces(tiles, _within_steps(wanted, tiles, step), step)
            shares = _contiguous(pieces.cost(model), workers, width, refine)
        tree = build_tree(torch.from_numpy(pieces.count[pieces.count > 1]))
        row, zero = shares.row, np.zeros_like(shares.row)
        first = offsets[pieces.window[row]]
        items = np.stack(
            [
                pieces.window[row],
                first + pieces.begin[row],
                first + pieces.end[row],
                pieces.slot[row],
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


def _largest(tiles: np.ndarray, model: CostModel) -> float:
    """Largest window's cost over the mean."""
    cost = tiles * model.tile + model.window
    return float(cost.max() / cost.mean()) if cost.size else 1.0
