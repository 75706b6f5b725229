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

The tree that adds cut windows up is that of ``balance/segments.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.balance.segments import Units, WorkLists, schedule_segments

__all__ = [
    "MAX_TILES",
    "TileTimes",
    "WindowSchedule",
    "WindowShares",
    "imbalance",
    "schedule_windows",
    "share_windows",
]

# The paper's limit of tiles an item; the kernel counts a run's windows in 32 bits, too.
MAX_TILES = 32
# Item lengths that the time model chooses from.
LENGTHS = (4, 6, 8, 12, 16, 24, MAX_TILES)
# Tiles at which a run ends: long enough to pay for its start, and short enough that neighbouring
# windows, which share rows of B, are at work at the same time.
RUN_TILES = 8
# What a window of a block of threads costs beside its tiles, in tiles, and the least piece of one.
A_WINDOW, LEAST_TILES = 8, 8
# Windows a worker, at the end of a deal, that are cut to make the shares even; and the part of a
# share over which a window is no longer dealt out whole.
EVEN_ROUNDS, LONG_SHARE = 2, 0.25


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
    """

    load_b: float = 1.0
    mma: float = 0.14
    write_back: float = 1.0
    start: float = 3.0


EQUATION_4 = TileTimes()


@dataclass(frozen=True, eq=False)
class WindowSchedule(WorkLists):
    """Items ``first window, first tile, end, -windows`` of a run of windows, or ``window, first
    tile, end, slot`` of a piece of a cut one.

    Pieces come first, runs in the order of their windows, because neighbours share rows of B.

    Attributes
    ----------
    imbalance : float
        IBD of the windows.
    longest : int
        Tiles at which a run ends, and to which longer windows are cut.
    """

    imbalance: float
    longest: int


def imbalance(tiles: Tensor) -> float:
    """Return IBD (Equation 3): the mean distance of the windows' tiles from their average."""
    if not tiles.numel():
        return 0.0
    counts = tiles.double()
    return float((counts - counts.mean()).abs().mean())


def _most(length: int) -> int:
    """Tiles over which a window is cut, where runs end at ``length``: cutting has its price."""
    return min(2 * length, MAX_TILES)


def _choose_length(tiles: Tensor, workers: float, times: TileTimes) -> int:
    """Return the item length with the least time bound.

    A list of items ends on ``workers`` of them before its mean share plus its longest item.
    """
    counts = tiles.double()
    a_tile = times.load_b + times.mma
    bounds = []
    for length in LENGTHS:
        cut = counts > _most(length)
        pieces = float(torch.ceil(counts[cut] / length).sum())
        runs = float(torch.clamp(counts[~cut], min=1.0).sum()) / min(length, RUN_TILES)
        # Partial sums of cut windows are written and read, then C is written.
        stores = float((~cut).sum()) + 2.0 * pieces + float(cut.sum())
        spent = float(counts.sum()) * a_tile + stores * times.write_back
        spent += (pieces + runs) * times.start
        bounds.append(spent / workers + length * a_tile + times.start)
    return LENGTHS[bounds.index(min(bounds))]


def _runs(offsets: Tensor, tiles: Tensor, cut: Tensor, length: int) -> Tensor:
    """Concatenate neighbouring windows that are not cut to runs of about ``length`` tiles."""
    window = torch.nonzero(~cut).squeeze(1)
    if not window.numel():
        return torch.empty((0, 4), dtype=torch.int64, device=tiles.device)
    # An empty window counts as one tile: its rows of C are written, too.
    weight = torch.clamp(tiles[window], min=1)
    place = torch.cumsum(weight, 0) - weight
    cut_before = torch.cumsum(cut.to(torch.int64), 0)[window]  # no run reaches across one
    key = place // length * (tiles.numel() + 1) + cut_before
    _, count = torch.unique_consecutive(key, return_counts=True)
    first = window[torch.cumsum(count, 0) - count]
    last = window[torch.cumsum(count, 0) - 1]
    return torch.stack([first, offsets[first], offsets[last + 1], -count], 1)


def schedule_windows(
    row_window_offset: Tensor,
    *,
    workers: float,
    balance: bool = True,
    times: TileTimes = EQUATION_4,
) -> WindowSchedule:
    """List the items of windows whose tiles are ``row_window_offset[w]`` to ``[w + 1]``.

    Parameters
    ----------
    row_window_offset : Tensor of int32 [windows + 1]
    workers : float
        Warps that the GPU runs at a time, for each slab of B.
    balance : bool
        Concatenate and cut windows; one whole window an item, however long, when False.
    times : TileTimes
        Constants of the time model.
    """
    offsets = row_window_offset.to(torch.int64)
    tiles = offsets[1:] - offsets[:-1]
    count, device = tiles.numel(), tiles.device
    if balance and count:
        longest = _choose_length(tiles, max(workers, 1.0), times)
        cut = tiles > _most(longest)
        runs = _runs(offsets, tiles, cut, min(longest, RUN_TILES))
        long = torch.nonzero(cut).squeeze(1)
    else:
        longest = max(int(tiles.max()), 1) if count else 1
        window = torch.arange(count, device=device)
        runs = torch.stack([window, offsets[:-1], offsets[1:], torch.full_like(window, -1)], 1)
        long = window[:0]
    pieces = schedule_segments(
        Units(
            long, offsets[long], tiles[long],
            torch.zeros(long.numel(), dtype=torch.bool, device=device),
        ),
        longest,
    )  # fmt: skip
    items = torch.cat([pieces.items, runs.to(torch.int32)]).contiguous()
    return WindowSchedule(items, pieces.parent_of_slot, pieces.nodes, imbalance(tiles), longest)


@dataclass(frozen=True, eq=False)
class WindowShares:
    """Windows shared out between workers; all int32.

    Attributes
    ----------
    items : Tensor [items, 4]
        ``window, first tile, end, slot of a piece or -1``, worker by worker.
    first_of_worker : Tensor [workers + 1]
        Where each worker's items begin.
    cuts : Tensor [cuts, 4]
        ``window, first slot, slots, 0`` of each window in pieces, whose partial sums are added in
        the order of their slots.
    """

    items: Tensor
    first_of_worker: Tensor
    cuts: Tensor

    @property
    def item_count(self) -> int:
        return self.items.shape[0]

    @property
    def worker_count(self) -> int:
        return self.first_of_worker.numel() - 1

    @property
    def slot_count(self) -> int:
        return int(self.cuts[:, 2].sum())

    @property
    def cut_count(self) -> int:
        return self.cuts.shape[0]


def _pieces(
    tiles: Tensor, ends: Tensor, a_window: int, least: int, step: int
) -> tuple[Tensor, Tensor]:
    """Cut windows where shares end, at cost ``ends`` from the first window's beginning.

    Returns the pieces as keys ``window * span + first tile in it``, span = longest window + 1, and
    the keys at which the shares end.
    """
    cost = tiles + a_window
    start = torch.cumsum(cost, 0) - cost
    window = torch.clamp(torch.searchsorted(start, ends, right=True) - 1, min=0)
    at = torch.minimum(ends - start[window], tiles[window]) // step * step
    at = torch.where(at < least, 0, at)
    past = tiles[window] - at < least
    window, at = torch.where(past, window + 1, window), torch.where(past, 0, at)
    span = int(tiles.max()) + 1
    keys = window * span + at
    whole = torch.arange(tiles.numel(), device=tiles.device) * span
    return torch.cat([whole, torch.unique(keys[at > 0])]).sort().values, keys


def _dealt_windows(cost: Tensor, workers: int) -> Tensor:
    """Return the windows that are dealt out whole: all but long ones and the last rounds."""
    share = float(cost.sum()) / workers
    short = torch.nonzero(cost <= LONG_SHARE * share).squeeze(1)
    rounds = max(short.numel() // workers - EVEN_ROUNDS, 0)
    return short[: rounds * workers]


def share_windows(
    window_row_ptr: Tensor,
    *,
    workers: int,
    dealt: bool = False,
    a_window: int = A_WINDOW,
    least: int = LEAST_TILES,
    step: int = 1,
) -> WindowShares:
    """Share out windows evenly between workers.

    A worker takes neighbouring windows, and the next goes on from there: windows in which one share
    ends and another begins are cut, unless that leaves a piece of fewer than ``least`` tiles at the
    window's end. Where ``dealt``, most windows are dealt out one by one first, so that neighbours,
    which share rows of B, are at work at the same time; long windows and the last ones then make
    the shares even.

    Parameters
    ----------
    window_row_ptr : Tensor of int32 [windows + 1]
    workers : int
        Blocks of threads that work at the same time.
    dealt : bool
        Whether neighbouring windows should go to different workers.
    a_window : int
        What a window costs beside its tiles, in tiles: C is stored.
    least : int
        Tiles that a piece at a window's end has at least.
    step : int
        Tiles that are multiplied at once: pieces begin at multiples of it.
    """
    offsets = window_row_ptr.to(torch.int64)
    tiles = offsets[1:] - offsets[:-1]
    device, count = tiles.device, tiles.numel()
    whole = _dealt_windows(tiles + a_window, workers) if dealt and count else offsets[:0]
    head = whole.numel()
    load = (tiles[whole] + a_window).reshape(-1, workers).sum(0)
    is_rest = torch.ones(count, dtype=torch.bool, device=device)
    is_rest[whole] = False
    others = torch.nonzero(is_rest).squeeze(1)
    rest = tiles[others]
    empty = torch.empty(0, dtype=torch.int64, device=device)
    items = keys = empty
    span = 1
    if rest.numel():
        total = int(rest.sum()) + a_window * rest.numel()
        mean = (total + int(load.sum())) / workers
        budget = torch.clamp(mean - load.double(), min=0.0)
        reach = torch.cumsum(budget, 0)
        ends = (reach[:-1] * (total / max(float(reach[-1]), 1.0))).to(torch.int64)
        span = int(rest.max()) + 1
        items, keys = _pieces(rest, ends, a_window, least, step)
    owner, begin = items // span, items % span
    same = torch.zeros_like(owner, dtype=torch.bool)
    same[:-1] = owner[:-1] == owner[1:]
    end = torch.where(same, torch.cat([begin[1:], begin[:1]]), rest[owner])
    pieces = torch.bincount(owner, minlength=rest.numel())
    cut = pieces[owner] > 1
    slot = torch.where(cut, torch.cumsum(cut.to(torch.int64), 0) - 1, -1)
    in_pieces = torch.nonzero(pieces > 1).squeeze(1)
    slots = pieces[in_pieces]
    first_slot = torch.cumsum(slots, 0) - slots
    cuts = torch.stack([others[in_pieces], first_slot, slots, torch.zeros_like(slots)], 1)
    # Items by worker: first those dealt to it, then its part of the others.
    window = torch.cat([whole, others[owner]])
    worker = torch.cat(
        [
            torch.arange(head, device=device) % workers,
            torch.searchsorted(keys, items, right=True),
        ]
    )
    listed = torch.stack(
        [
            window,
            offsets[window] + torch.cat([torch.zeros_like(whole), begin]),
            offsets[window] + torch.cat([tiles[whole], end]),
            torch.cat([torch.full_like(whole, -1), slot]),
        ],
        1,
    )
    order = torch.argsort(worker, stable=True)
    first = torch.zeros(workers + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(worker, minlength=workers), 0, out=first[1:])
    return WindowShares(
        listed[order].to(torch.int32).contiguous(),
        first.to(torch.int32),
        cuts.to(torch.int32).contiguous(),
    )
