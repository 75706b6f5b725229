"""``bittcf.cuh`` in NumPy: tiles of A copied to the ring, and decoded lane by lane.

Names are those of the device code. Arrays are [items, 32 lanes], bitmaps [items, 32, stack, 2].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.replay import Array
from tests.kernels.replay_mma import LANE, LANES, U32, Element, G, T, popc
from tests.kernels.replay_ring import UNIT, WORD, Ring

VALUES = 16  # where values begin behind the bitmaps

# Value n of each item's tile, where asked for: (n, here), both [items, 32] -> bits of those here.
Read = Callable[[np.ndarray, np.ndarray], np.ndarray]


def decode(
    element: Element, weighted: bool, bits: np.ndarray, read: Read
) -> tuple[np.ndarray, np.ndarray]:
    """``TileWeights::decode``: weights [stack, words, items, 32], and how many values there are."""
    shift = ((G & 3) * 8 + T * 2).astype(U32)
    before = np.zeros(bits.shape[:2], dtype=np.int64)
    weights = []
    for s in range(bits.shape[2]):
        x, y = bits[..., s, 0], bits[..., s, 1]
        half = np.where(G < 4, x, y)
        pair = half >> shift
        has_first, has_second = (pair & U32(1)).astype(bool), (pair & U32(2)).astype(bool)
        first, second = np.zeros(half.shape, dtype=U32), np.zeros(half.shape, dtype=U32)
        if weighted:
            upper = popc(x)
            below = before + np.where(G < 4, 0, upper) + popc(half & ~(U32(0xFFFFFFFF) << shift))
            first[has_first] = read(below, has_first)
            second[has_second] = read(below + has_first, has_second)
            before = before + upper + popc(y)
        else:
            first[has_first] = second[has_second] = element.one
        weights.append([first, second] if element.size == 4 else [first | second << U32(16)])
    return np.array(weights), before


class TileStore:
    """A tile of A in the ring: bitmaps, then values in words of four bytes."""

    def __init__(self, element: Element, weighted: bool, stack: int) -> None:
        self.element, self.weighted, self.stack = element, weighted, stack
        self.words = 64 * stack * element.size // 4 + (element.size < 4)

    @property
    def bytes(self) -> int:
        return VALUES + ((self.words * 4 + 15) // 16 * 16 if self.weighted else 0)

    def copy(
        self,
        bitmaps: Array,
        values: Array | None,
        tile: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
        ring: Ring,
        warp: np.ndarray,
        to: np.ndarray,
    ) -> None:
        """``values`` as words of four bytes; the others [items]."""
        held = np.ascontiguousarray(bitmaps.load(tile * self.stack, self.stack))
        ring.copy(warp, to, held.view(np.uint8), reads=LANES)  # each lane reads them whole
        if not self.weighted:
            return
        each = 4 // self.element.size
        words = (end + each - 1) // each - begin // each
        assert (words <= self.words).all(), "more values than a tile holds"
        place = np.arange(WORD // UNIT) * UNIT // self.element.size  # in its word, of two bytes
        for w in range(0, self.words, LANES):
            item, lane = np.nonzero(w + LANE < words[:, None])
            word = w + lane
            data = np.ascontiguousarray(values.load(begin[item] // each + word))
            number = (begin[item] // each + word)[:, None] * each + place
            mine = (number >= begin[item, None]) & (number < end[item, None])
            ring.copy(warp[item], to[item] + VALUES + word * 4, data.view(np.uint8), reads=mine)

    def read(
        self, ring: Ring, warp: np.ndarray, at: np.ndarray, begin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights of all lanes, and how many values each item's tile has."""
        place = np.repeat(at[:, None], LANES, axis=1)
        held = ring.read(warp[:, None], place, 8 * self.stack)
        bits = held.view(U32).reshape(*place.shape, self.stack, 2)
        skipped = begin & 1 if self.element.size < 4 else np.zeros_like(begin)

        def value(n: np.ndarray, here: np.ndarray) -> np.ndarray:
            from_ = at[:, None] + VALUES + (skipped[:, None] + n) * self.element.size
            owner = np.broadcast_to(warp[:, None], here.shape)[here]
            found = ring.read(owner, from_[here], self.element.size)
            return found.view(self.element.storage)[..., 0]

        weights, count = decode(self.element, self.weighted, bits, value)
        assert (count == count[:, :1]).all(), "lanes of a warp agree on where values begin"
        return weights, count[:, 0]
