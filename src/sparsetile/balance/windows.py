"""Work items of the tile kernels: runs of windows; long windows are cut and rejoined.

Acc-SpMM, section 3.5. A worker (a warp with its slab of B) should neither wait for a busier one nor
spend its time on start-up: three dependent loads come before its first product. So short windows
are concatenated to runs, whose tiles are contiguous in memory and go through the worker's pipeline
without a break, and windows longer than a run are cut. The time model of Equation 4, with the start
of an item as an added term, chooses the length of a run, at most 32 tiles, from the number of
workers.

The paper redistributes work only if IBD, the mean distance of a window's tiles from the average,
is large. Here the model decides alone, because runs cost balanced matrices nothing; IBD is
reported.

The tree that adds cut windows up is that of ``balance/tree.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.segments import cut_on_host
from sparsetile.balance.tree import TreeSchedule, no_tree
from sparsetile.core.errors import value_error
from sparsetile.formats.units import Units

__all__ = ["MAX_TILES", "TileTimes", "WindowSchedule", "imbalance"]

# The paper's limit of tiles per item, and of windows per run: the kernel keeps 32 bits, one per
# window, that mark windows to recompute (windows.cuh). A window counts as at least one step.
MAX_TILES = 32
# Item lengths that the time model chooses from.
LENGTHS = (4, 6, 8, 12, 16, 24, MAX_TILES)
# Tiles at which a run ends: long enough to pay for its start, and short enough that neighbouring
# windows, which share rows of B, run at the same time.
RUN_TILES = 8
# Runs longer than the cutting length divided by this come first, longest first.
LONG_SHARE = 2


@dataclass(frozen=True)
class TileTimes:
    """Equation 4's terms, in units of the time to load one tile's rows of B."""

    # load_b, mma: a tile's rows of B; its products.
    load_b: float = 1.0
    mma: float = 0.14
    write_back: float = 1.0  # eight rows of C, or of partial sums, written or read once
    start: float = 1.0  # latency of an item before its first product
    tail: float = 0.3  # share of the longest item that the last worker runs alone


EQUATION_4 = TileTimes()


def _most(length: int) -> int:
    """Tiles above which a window is cut if runs end at ``length``: cutting costs time."""
    return min(2 * length, MAX_TILES)


def imbalance(tiles: Tensor) -> float:
    """Return IBD (Equation 3): the mean distance of the windows' tiles from their average."""
    return _imbalance(torch.bincount(tiles).cpu().numpy().astype(np.float64))


def _imbalance(windows: np.ndarray) -> float:
    """IBD of a histogram of the windows' tiles."""
    count = max(float(windows.sum()), 1.0)
    tiles = np.arange(windows.size, dtype=np.float64)
    return float(windows @ np.abs(tiles - float(windows @ tiles) / count)) / count


def _choose_length(windows: np.ndarray, workers: float, times: TileTimes) -> int:
    """Return the item length with the least time bound, from a histogram of the windows' tiles.

    On ``workers`` workers a list of items ends before its mean share plus its longest item. This
    bound is rarely met. On an H200, with ten matrices at N = 128 and 512 timed at each length,
    these constants choose lengths within 0.8 % of the best (4 % at worst); with the whole of the
    longest item and a start of 3, within 3.9 % (24 % at worst).
    """
    counts = np.arange(windows.size, dtype=np.float64)
    a_tile, total = times.load_b + times.mma, float(windows @ counts)
    bounds = []
    for length in LENGTHS:
        cut = counts > _most(length)
        pieces = float(windows[cut] @ np.ceil(counts[cut] / length))
        runs = float(windows[~cut] @ np.maximum(counts[~cut], 1.0)) / min(length, RUN_TILES)
        # Partial sums of cut windows are written and read, then C is written.
        stores = float(windows[~cut].sum()) + 2.0 * pieces + float(windows[cut].sum())
        spent = total * a_tile + stores * times.write_back
        spent += (pieces + runs) * times.start
        bounds.append(spent / workers + times.tail * (length * a_tile + times.start))
    return LENGTHS[bounds.index(min(bounds))]


def _runs(offsets: np.ndarray, tiles: np.ndarray, alone: np.ndarray, length: int) -> np.ndarray:
    """Concatenate neighbouring windows to runs of about ``length`` tiles.

    Windows ``alone`` are omitted, and no run reaches across one.
    """
    window = np.flatnonzero(~alone)
    # An empty window counts as one tile, because its rows of C are written.
    weight = np.maximum(tiles[window], 1)
    key = (np.cumsum(weight) - weight) // length * (tiles.size + 1) + np.cumsum(alone)[window]
    begin = np.flatnonzero(np.diff(key, prepend=-1))
    end = np.append(begin[1:], window.size)[: begin.size]
    first, behind = window[begin], window[end - 1] + 1
    return np.stack([first, offsets[first], offsets[behind], begin - end], 1)


def _pieces(
    long: np.ndarray, offsets: np.ndarray, tiles: np.ndarray, longest: int
) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
    """Cut long windows into pieces of at most ``longest`` tiles: their items, and the tree."""
    if not long.size:
        return np.empty((0, 4), np.int32), no_tree(torch.device("cpu"))
    units = np.stack([long, offsets[long], tiles[long], np.zeros_like(long)], 1)
    (_, _, items), tree = cut_on_host(units, longest)
    return items, tree


def _whole(offsets: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Return an item for each of these windows."""
    return np.stack([window, offsets[window], offsets[window + 1], np.full_like(window, -1)], 1)


def _long_first(items: np.ndarray, most: int) -> np.ndarray:
    """Put items of more than ``most`` steps first, longest first; the others keep their order."""
    length = items[:, 2] - items[:, 1]
    return items[np.argsort(np.where(length > most, -length, 0), kind="stable")]


@dataclass(frozen=True, eq=False)
class WindowSchedule(TreeSchedule):
    """Items ``first window, first tile, end, -windows`` of a run of windows, or ``window, first
    tile, end, slot`` of a piece of a cut one.

    Pieces come first, then long windows if ``limit`` was given, then runs in the order of their
    windows, because neighbours share rows of B.

    The warps of a thread block work on a shared item together, each on a part of its tiles. If
    ``shared`` was given, pieces and windows above it are shared items.
    """

    consecutive = True

    imbalance: float  # IBD of the windows
    longest: int  # tiles at which a run ends, and the most tiles of a piece
    # int64 [windows + 1]: first tile of each window, which the kernel reads beside the items.
    offsets: Tensor
    shared_count: int = 0  # shared items, at the front of the list

    @classmethod
    def make(
        cls,
        units: Units,
        *,
        workers: float = 1.0,
        balance: bool = True,
        times: TileTimes = EQUATION_4,
        step: int = 1,
        limit: int | None = None,
        shared: int | None = None,
        run: int = RUN_TILES,
    ) -> Self:
        """Concatenate short windows of tiles to runs, and cut long ones.

        ``workers``: warps that the GPU runs at a time, for each slab of B; for the time model,
        whose constants are ``times``. Without ``balance`` each item is one whole window. A worker
        takes ``step`` tiles at a time; windows and pieces are multiples of it. With ``limit`` only
        windows of more tiles are cut, into pieces of at most as many (RSH-SpMM's rule); otherwise
        the model decides. Windows of more than ``shared`` tiles are shared. A run of short windows
        ends at ``run`` steps.
        """
        cls._require(units)
        if not 1 <= run <= MAX_TILES:
            raise value_error(
                "WindowSchedule.make", "run", f"from 1 to {MAX_TILES} steps", run,
                "The kernel remembers as many windows of a run",
            )  # fmt: skip
        assert units.offsets is not None  # checked by _require
        # On the host: dozens of steps on short lists of windows.
        offsets = units.offsets.cpu().numpy() // step
        tiles = np.diff(offsets)
        windows = np.bincount(tiles).astype(np.float64)
        if not balance or not tiles.size:
            longest = most = short = max(int(tiles.max(initial=1)), 1)
        elif limit is None:
            longest = _choose_length(windows, max(workers, 1.0), times)
            most = short = _most(longest)
        else:
            longest = most = short = max(limit // step, 1)
        if balance and shared is not None:
            short = min(shared // step, longest)
        alone = tiles > short if balance else np.ones(tiles.size, np.bool_)
        pieces, tree = _pieces(np.flatnonzero(tiles > most), offsets, tiles, longest)
        whole = _whole(offsets, np.flatnonzero(alone & (tiles <= most)))
        runs = _runs(offsets, tiles, alone, min(longest, run))
        if not balance:
            whole, runs = runs, whole
        if limit is not None:
            # Long windows first, so that none starts last.
            whole, runs = _long_first(whole, 0), _long_first(runs, longest // LONG_SHARE)
        items = np.concatenate([part.astype(np.int32) for part in (pieces, whole, runs)])
        items[:, 1:3] *= step
        made = cls(
            torch.from_numpy(items),
            *tree,
            step * _imbalance(windows),
            longest * step,
            units.offsets,
            0 if shared is None else items.shape[0] - runs.shape[0],
        )
        return made.to(units.device)
