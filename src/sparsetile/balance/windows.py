"""Work items of the tile kernels: runs of windows, long windows cut and joined again.

Acc-SpMM, section 3.5. A worker (a warp with its slab of B) should neither wait for one that has
more nor spend its time on starting: three loads, each of which needs the one before, come before
its first product. So short windows are concatenated to runs, whose tiles follow each other in
memory and go through the worker's pipeline without a break, and windows longer than a run are cut.
How long a run is, at most 32 tiles, is what the time model of Equation 4 says for the number of
workers, with the start of an item as one more term.

IBD, the mean distance of a window's tiles from the average, is what the paper looks at before it
redistributes anything; it is reported. Here the model decides alone: runs cost balanced matrices
nothing.

The tree that adds cut windows up is that of ``balance/tree.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.base import not_consecutive
from sparsetile.balance.segments import HOST_PIECES, SegmentSchedule, cut_units
from sparsetile.balance.tree import TreeSchedule, no_tree, ranges
from sparsetile.core.errors import value_error
from sparsetile.formats.base import Variants
from sparsetile.formats.units import Units

__all__ = ["MAX_TILES", "TileTimes", "WindowSchedule", "imbalance"]

# The paper's limit of tiles an item, and the windows that a run may have: the kernel has one bit of
# 32 for each, whether it must be computed again (windows.cuh). A window counts as a step at least.
MAX_TILES = 32
# Item lengths that the time model chooses from.
LENGTHS = (4, 6, 8, 12, 16, 24, MAX_TILES)
# Tiles at which a run ends: long enough to pay for its start, and short enough that neighbouring
# windows, which share rows of B, are at work at the same time.
RUN_TILES = 8
# Runs longer than the cutting length divided by this come first, longest first.
LONG_SHARE = 2


@dataclass(frozen=True)
class TileTimes:
    """Equation 4's terms, in units of the time to load one tile's rows of B.

    Attributes
    ----------
    load_b, mma : float
        A tile's rows of B; its products.
    write_back : float
        Eight rows of C, or of partial sums, written or read once.
    start : float
        What an item waits for before its first product.
    tail : float
        Share of the longest item that the last worker runs alone.
    """

    load_b: float = 1.0
    mma: float = 0.14
    write_back: float = 1.0
    start: float = 1.0
    tail: float = 0.3


EQUATION_4 = TileTimes()


def imbalance(tiles: Tensor) -> float:
    """Return IBD (Equation 3): the mean distance of the windows' tiles from their average."""
    if not tiles.numel():
        return 0.0
    counts = tiles.double()
    return float((counts - counts.mean()).abs().mean())


def _most(length: int) -> int:
    """Tiles over which a window is cut, where runs end at ``length``: cutting has its price."""
    return min(2 * length, MAX_TILES)


def _histogram(tiles: Tensor) -> np.ndarray:
    """Windows by their number of tiles, on the host, which asks for many sums of them."""
    return torch.bincount(tiles).cpu().numpy().astype(np.float64)


def _imbalance(windows: np.ndarray) -> float:
    """What :func:`imbalance` returns, of a histogram."""
    counts = np.arange(windows.size, dtype=np.float64)
    mean = float(windows @ counts) / float(windows.sum())
    return float(windows @ np.abs(counts - mean)) / float(windows.sum())


def _choose_length(windows: np.ndarray, workers: float, times: TileTimes) -> int:
    """Return the item length with the least time bound, from a histogram of the windows' tiles.

    A list of items ends on ``workers`` of them before its mean share plus its longest item. That is
    a bound, which is hardly ever met: on an H200, with ten matrices at N = 128 and 512 timed at
    each length, the constants here choose lengths within 0.8 % of the best (4 % at worst); with the
    whole of the longest item, and a start of 3, within 3.9 % (24 % at worst).
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


def _runs(offsets: Tensor, tiles: Tensor, cut: Tensor | None, length: int) -> Tensor:
    """Concatenate neighbouring windows that are not cut to runs of about ``length`` tiles.

    ``cut`` is None where none is.
    """
    window = None
    if cut is not None:
        window = torch.nonzero(~cut).squeeze(1)
    count = tiles.numel() if window is None else window.numel()
    if not count:
        return torch.empty((0, 4), dtype=torch.int64, device=tiles.device)
    # An empty window counts as one tile: its rows of C are written, too.
    weight = torch.clamp(tiles if window is None else tiles[window], min=1)
    key = (torch.cumsum(weight, 0) - weight) // length
    if cut is not None and window is not None:  # no run reaches across one
        key = key * (tiles.numel() + 1) + torch.cumsum(cut, 0)[window]
    is_end = torch.ones(count + 1, dtype=torch.bool, device=tiles.device)
    torch.ne(key[1:], key[:-1], out=is_end[1:-1])
    bound = torch.nonzero(is_end).squeeze(1)  # first of each run, and the end of the last
    begin, end = bound[:-1], bound[1:]
    first = begin if window is None else window[begin]
    behind = end if window is None else window[end - 1] + 1
    return torch.stack([first, offsets[first], offsets[behind], begin - end], 1)


def _pieces(
    long: Tensor, offsets: Tensor, tiles: Tensor, windows: np.ndarray, longest: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Cut long windows into pieces of at most ``longest`` tiles: their items, and the tree."""
    begin, length = offsets[long], tiles[long]
    counts = np.arange(longest + 1, windows.size)
    if windows[longest + 1 :] @ np.ceil(counts / longest) <= HOST_PIECES:
        return cut_units(long, begin, length, longest)
    bundled = torch.zeros_like(long, dtype=torch.bool)
    made = SegmentSchedule.make(Units(long, begin, length, bundled), max_length=longest)
    return made.items, (made.parent_of_slot, made.nodes)


def _whole(offsets: Tensor, window: Tensor) -> Tensor:
    """Return an item for each of these windows."""
    one = torch.full_like(window, -1)
    return torch.stack([window, offsets[window], offsets[window + 1], one], 1)


def _long_first(items: Tensor, most: int) -> Tensor:
    """Put items of more than ``most`` steps first, longest first; the others keep their order."""
    if items.shape[0] < 2:
        return items
    length = items[:, 2] - items[:, 1]
    rank = torch.where(length > most, -length, 0)
    return items[torch.sort(rank, stable=True).indices]


@dataclass(frozen=True)
class _Sizes:
    """In steps: what windows are cut to, over which they are cut, over which they are items of
    their own, and where runs of the others end."""

    longest: int
    most: int
    alone: int
    run: int


@dataclass(frozen=True, eq=False)
class _NearWindows:
    """Few windows on the host: what :meth:`WindowSchedule.make` lists by tensor operations, by
    NumPy, which takes a fraction of their time for lists of this length."""

    step: int
    offsets: np.ndarray  # in steps
    tiles: np.ndarray

    @classmethod
    def of(cls, units: Units, step: int) -> Self:
        assert units.offsets is not None
        return cls(step, units.offsets.numpy() // step, units.length.numpy() // step)

    @cached_property
    def histogram(self) -> np.ndarray:
        """Windows by their number of steps."""
        return np.bincount(self.tiles).astype(np.float64)

    def items(self, sizes: _Sizes, long_first: bool) -> tuple[Tensor, int, tuple[Tensor, Tensor]]:
        """Return the items, how many of them are no runs, and the tree."""
        offsets, tiles = self.offsets, self.tiles
        cut, alone = tiles > sizes.most, tiles > sizes.alone
        tree = no_tree(torch.device("cpu"))
        listed: list[np.ndarray] = []
        if cut.any():
            long = torch.from_numpy(np.flatnonzero(cut))
            pieces, tree = _pieces(
                long,
                torch.from_numpy(offsets),
                torch.from_numpy(tiles),
                self.histogram,
                sizes.longest,
            )
            listed.append(pieces.numpy())
        own = np.flatnonzero(alone & ~cut)
        whole = np.stack([own, offsets[own], offsets[own + 1], np.full_like(own, -1)], 1)
        window = np.flatnonzero(~alone)
        weight = np.maximum(tiles[window], 1)  # as in _runs
        key = (np.cumsum(weight) - weight) // sizes.run * (tiles.size + 1)
        key += np.cumsum(alone)[window]
        begin = np.flatnonzero(np.diff(key, prepend=-1))
        end = np.append(begin[1:], window.size)[: begin.size]
        first, behind = window[begin], window[end - 1] + 1
        runs = np.stack([first, offsets[first], offsets[behind], begin - end], 1)
        for part, most in ((whole, 0), (runs, sizes.longest // LONG_SHARE)):
            length = part[:, 2] - part[:, 1]
            ordered = part
            if long_first:
                ordered = part[np.argsort(np.where(length > most, -length, 0), kind="stable")]
            listed.append(ordered.astype(np.int32))
        items = np.concatenate(listed)
        items[:, 1:3] *= self.step
        return torch.from_numpy(items), items.shape[0] - runs.shape[0], tree


@dataclass(frozen=True, eq=False)
class WindowSchedule(TreeSchedule):
    """Items ``first window, first tile, end, -windows`` of a run of windows, or ``window, first
    tile, end, slot`` of a piece of a cut one.

    Pieces come first, then long windows where ``limit`` was given, then runs in the order of their
    windows, because neighbours share rows of B.

    A shared item is one that the warps of a thread block work on together, each on a part of its
    tiles. Where ``shared`` was given, pieces and the windows over it are such items.

    Attributes
    ----------
    imbalance : float
        IBD of the windows.
    longest : int
        Tiles at which a run ends, and to which longer windows are cut.
    offsets : Tensor of int64 [windows + 1]
        First tile of each window, which the kernel reads beside the items.
    shared_count : int
        Items at the front of the list that are shared.
    """

    name = "windows"
    variants: ClassVar[Variants] = {
        "7 workers": {"workers": 7.0},
        "1000 workers": {"workers": 1000.0},
        "whole windows": {"workers": 7.0, "balance": False},
        "shared windows": {"limit": 24, "shared": 6},
        "short runs": {"limit": 24, "shared": 6, "run": 2},
    }

    imbalance: float
    longest: int
    offsets: Tensor
    shared_count: int = 0

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
        """Concatenate short windows to runs, and cut long ones.

        Parameters
        ----------
        units : Units
            Consecutive windows; their lists are tiles.
        workers : float
            Warps that the GPU runs at a time, for each slab of B; for the time model.
        balance : bool
            Concatenate and cut windows; one whole window an item, however long, when False.
        times : TileTimes
            Constants of the time model.
        step : int
            Tiles that a worker takes at a time. Windows are multiples of it, and so are pieces.
        limit : int, optional
            Cut no window but those of more tiles than this, into pieces of at most as many
            (RSH-SpMM's rule); the time model decides when None.
        shared : int, optional
            Share windows of more tiles than this, at most ``limit``; none when None.
        run : int
            Steps at which a run of short windows ends, at most ``MAX_TILES``.
        """
        cls._require(units)
        if not 1 <= run <= MAX_TILES:
            raise value_error(
                "WindowSchedule.make", "run", f"from 1 to {MAX_TILES} steps", run,
                "The kernel remembers as many windows of a run",
            )  # fmt: skip
        assert units.offsets is not None  # as _require has seen
        count, device = units.count, units.label.device
        near = _NearWindows.of(units, step) if balance and count and units.few_here else None
        if near is None:
            offsets, tiles = units.offsets // step, units.length // step
            whole = runs = torch.empty((0, 4), dtype=torch.int64, device=device)
            long = None
        ibd = 0.0
        if balance and count:
            windows = _histogram(tiles) if near is None else near.histogram
            ibd = step * _imbalance(windows)
            if limit is None:
                longest = _choose_length(windows, max(workers, 1.0), times)
                most = _most(longest)
            else:
                longest = most = max(limit // step, 1)
            short = most if shared is None else min(shared // step, longest)
            if near is not None:
                sizes = _Sizes(longest, most, short, min(longest, run))
                items, shared_items, tree = near.items(sizes, limit is not None)
                return cls(
                    items, *tree, ibd, longest * step, units.offsets,
                    0 if shared is None else shared_items,
                )  # fmt: skip
            # The histogram knows which of the three kinds there are.
            any_cut, any_alone = (bool(windows[size + 1 :].any()) for size in (most, short))
            cut = tiles > most if any_cut else None
            alone = cut if short == most else tiles > short if any_alone else None
            runs = _runs(offsets, tiles, alone, min(longest, run))
            if cut is not None:
                long = torch.nonzero(cut).squeeze(1)
            if alone is not None and windows[short + 1 : most + 1].any():
                only = alone if cut is None else alone & ~cut
                whole = _whole(offsets, torch.nonzero(only).squeeze(1))
        else:
            longest = max(int(tiles.max()), 1) if count else 1
            runs = _whole(offsets, torch.arange(count, device=device))
            ibd = imbalance(units.length)
        parent_of_slot, nodes = no_tree(device)
        listed = []
        if long is not None:
            pieces, (parent_of_slot, nodes) = _pieces(long, offsets, tiles, windows, longest)
            listed.append(pieces)
        if limit is not None:
            # Long windows first: whoever starts one last ends last.
            whole, runs = _long_first(whole, 0), _long_first(runs, longest // LONG_SHARE)
        listed += [part.to(torch.int32) for part in (whole, runs) if part.shape[0]]
        items = torch.cat(listed) if listed else runs.to(torch.int32)
        if step > 1:
            items[:, 1:3] *= step
        return cls(
            items.contiguous(),
            parent_of_slot,
            nodes,
            ibd,
            longest * step,
            units.offsets,
            0 if shared is None else items.shape[0] - runs.shape[0],
        )

    @classmethod
    def reason(cls, units: Units) -> str | None:
        return not_consecutive(units)

    def _windows_of_items(self) -> Tensor:
        """Windows that each item holds: those of a run, one of a piece."""
        return torch.clamp(-self.items[:, 3].to(torch.int64), min=1)

    def pieces(self) -> Tensor:
        """Return one piece for each window of a run, and one for each piece of a cut window."""
        count = self._windows_of_items()
        item, number = ranges(count)
        first, begin, end, _ = self.items.to(torch.int64)[item].unbind(1)
        window = first + number
        # A run begins and ends where its item says; between, windows end where the offsets say.
        begin = torch.where(number == 0, begin, self.offsets[window])
        end = torch.where(number == count[item] - 1, end, self.offsets[window + 1])
        return torch.stack([torch.zeros_like(window), window, begin, end], 1)

    def slots(self) -> Tensor:
        return torch.repeat_interleave(
            torch.clamp(self.items[:, 3].to(torch.int64), min=-1), self._windows_of_items()
        )

    def _check_items(self, units: Units) -> None:
        first, windows = self.items[:, 0].to(torch.int64), self.offsets.numel() - 1
        count = self._windows_of_items()
        if bool(((first < 0) | (first + count > windows)).any()):
            raise self._fault("items", f"of windows 0 to {windows - 1}", "others")
        if bool((count > MAX_TILES).any()):
            raise self._fault("items", f"of up to {MAX_TILES} windows", int(count.max()))
