"""Windows shared out evenly between persistent workers, for thread blocks of ``wcsr``.

Each worker has its own list. A second kernel (kernels/cuda/windows/join_wcsr.cu) adds partial sums
of cut windows in the order of their pieces; a window has few, so there is no tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.base import Schedule
from sparsetile.formats.units import Units

__all__ = ["MIN_TILES", "WINDOW_COST", "WindowShares"]

# Cost of a window beside its tiles, in tiles, and the shortest piece of one.
WINDOW_COST, MIN_TILES = 8, 8
# Windows per worker that are split at the end to balance the load; and the part of a share above
# which a window is not dealt whole.
EVEN_ROUNDS, LONG_SHARE = 2, 0.25


def _pieces(
    tiles: np.ndarray, ends: np.ndarray, window_cost: int, min_tiles: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut windows at the ends of shares, given as cost ``ends`` from the first window's beginning.

    Returns the pieces as keys ``window * span + first tile in it``, span = longest window + 1, and
    the keys at which the shares end.
    """
    cost = tiles + window_cost
    start = np.cumsum(cost) - cost
    window = np.maximum(np.searchsorted(start, ends, side="right") - 1, 0)
    at = np.minimum(ends - start[window], tiles[window]) // step * step
    at = np.where(at < min_tiles, 0, at)
    past = tiles[window] - at < min_tiles
    window, at = np.where(past, window + 1, window), np.where(past, 0, at)
    span = int(tiles.max()) + 1
    keys = window * span + at
    return np.sort(np.concatenate([np.arange(tiles.size) * span, np.unique(keys[at > 0])])), keys


def _dealt_windows(cost: np.ndarray, workers: int) -> np.ndarray:
    """Return the windows that are dealt whole: all but long ones and the last rounds."""
    share = float(cost.sum()) / workers
    short = np.flatnonzero(cost <= LONG_SHARE * share)
    rounds = max(short.size // workers - EVEN_ROUNDS, 0)
    return short[: rounds * workers]


@dataclass(frozen=True, eq=False)
class WindowShares(Schedule):
    """Windows shared out between workers; all int32."""

    consecutive = True
    arrays: ClassVar[tuple[str, ...]] = ("items", "first_of_worker", "cuts")

    # [items, 4]: ``window, first tile, end, slot of a piece or -1``, worker by worker.
    items: Tensor
    first_of_worker: Tensor  # [workers + 1]: index of each worker's first item
    # [cuts, 4]: ``window, first slot, slots, 0`` of each cut window; partial sums are added in the
    # order of their slots.
    cuts: Tensor

    @classmethod
    def make(
        cls,
        units: Units,
        *,
        workers: int,
        dealt: bool = False,
        window_cost: int = WINDOW_COST,
        min_tiles: int = MIN_TILES,
        step: int = 1,
    ) -> Self:
        """Share out consecutive windows of tiles evenly between workers.

        Each worker, a thread block, takes the windows that follow the previous worker's. A window
        at the border of two shares is cut at a multiple of ``step`` tiles, unless that leaves a
        piece of fewer than ``min_tiles`` tiles at its end. A window costs ``window_cost`` tiles
        beside its own, for the store of C. With ``dealt``, most windows are first dealt one by one,
        so that neighbours, which share rows of B, run at the same time; long windows and the last
        ones then balance the shares.
        """
        cls._require(units)
        assert units.offsets is not None  # checked by _require
        device = units.length.device
        # On the host: a hundred steps on short lists of windows.
        offsets = units.offsets.cpu().numpy()
        tiles = np.diff(offsets)
        whole = offsets[:0]
        if dealt and tiles.size:
            whole = _dealt_windows(tiles + window_cost, workers)
        load = (tiles[whole] + window_cost).reshape(-1, workers).sum(0)
        is_rest = np.ones(tiles.size, dtype=np.bool_)
        is_rest[whole] = False
        others = np.flatnonzero(is_rest)
        rest = tiles[others]
        items = keys = np.empty(0, dtype=np.int64)
        span = 1
        if rest.size:
            total = int(rest.sum()) + window_cost * rest.size
            mean = (total + int(load.sum())) / workers
            reach = np.cumsum(np.maximum(mean - load.astype(np.float64), 0.0))
            ends = (reach[:-1] * (total / max(float(reach[-1]), 1.0))).astype(np.int64)
            span = int(rest.max()) + 1
            items, keys = _pieces(rest, ends, window_cost, min_tiles, step)
        owner, begin = items // span, items % span
        same = np.zeros(owner.size, dtype=np.bool_)
        same[:-1] = owner[:-1] == owner[1:]
        end = np.where(same, np.concatenate([begin[1:], begin[:1]]), rest[owner])
        pieces = np.bincount(owner, minlength=rest.size)
        cut = pieces[owner] > 1
        slot = np.where(cut, np.cumsum(cut) - 1, -1)
        in_pieces = np.flatnonzero(pieces > 1)
        slots = pieces[in_pieces]
        first_slot = np.cumsum(slots) - slots
        cuts = np.stack([others[in_pieces], first_slot, slots, np.zeros_like(slots)], 1)
        # Items by worker: first those dealt to it, then its part of the others.
        window = np.concatenate([whole, others[owner]])
        dealt_to = np.arange(whole.size) % workers
        worker = np.concatenate([dealt_to, np.searchsorted(keys, items, side="right")])
        listed = np.stack(
            [
                window,
                offsets[window] + np.concatenate([np.zeros_like(whole), begin]),
                offsets[window] + np.concatenate([tiles[whole], end]),
                np.concatenate([np.full_like(whole, -1), slot]),
            ],
            1,
        )[np.argsort(worker, kind="stable")]
        first = np.zeros(workers + 1, dtype=np.int64)
        np.cumsum(np.bincount(worker, minlength=workers), out=first[1:])
        made = (torch.from_numpy(part.astype(np.int32)) for part in (listed, first, cuts))
        return cls(*(part.to(device) for part in made))

    @property
    def worker_count(self) -> int:
        return self.first_of_worker.numel() - 1

    @property
    def slot_count(self) -> int:
        return int(self.cuts[:, 2].sum())

    @property
    def cut_count(self) -> int:
        return self.cuts.shape[0]
