"""``tree.cuh`` in NumPy: the sum of units of work that were cut, piece by piece."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.replay import Array

Join = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Tree:
    """The tree of one slab and batch. Partial results are raw bytes [lanes, bytes]."""

    def __init__(
        self,
        parent_of_slot: Array,
        nodes: Array,
        arrivals: Array,
        partials: Array,
        *,
        first_counter: int,
        first_slot: int,
        lanes: int,
        slot_bytes: int,
    ) -> None:
        self.parent_of_slot, self.nodes = parent_of_slot, nodes
        self.arrivals, self.partials = arrivals, partials
        self.first_counter, self.first_slot = first_counter, first_slot
        self.lanes, self.slot_bytes = lanes, slot_bytes

    def places(self, slot: int, size: int, word: int) -> np.ndarray:
        """Where a slot keeps each word of each lane's ``size`` bytes: [lanes, words]."""
        base = (self.first_slot + slot) * self.lanes * self.slot_bytes
        lane = np.arange(self.lanes)[:, None]
        return base + (np.arange(size // word) * self.lanes + lane) * word

    def arrive_last(self, node: int, children: int) -> bool:
        at = self.first_counter + node
        arrived = int(self.arrivals.load(np.array(at))[0])
        last = arrived == children - 1
        self.arrivals.data[at] = 0 if last else arrived + 1
        return last

    def climb(self, slot: int, mine: np.ndarray, join: Join) -> np.ndarray | None:
        """Climb from ``slot``; the whole unit's result for whoever arrives last, else None.

        ``join(mine, other)`` returns the earlier children with a later one.
        """
        size = mine.shape[1]
        word = next(width for width in (16, 8, 4) if size % width == 0)
        assert self.slot_bytes >= size and self.slot_bytes % word == 0, "slots fit"
        ahead = 4 if size <= 32 else 2 if size <= 64 else 1
        while True:
            self.partials.store(
                self.places(slot, size, word), mine.reshape(self.lanes, size // word, word)
            )
            node = int(self.parent_of_slot.load(np.array(slot))[0])
            first_child, children, own, _ = self.nodes.data[node].tolist()
            if not self.arrive_last(node, children):
                return None
            for first in range(0, children, ahead):
                batch = [
                    self.load(first_child + min(first + a, children - 1), size, word)
                    for a in range(ahead)
                ]
                if first == 0:
                    mine = batch[0]
                for a in range(ahead):
                    if 0 < first + a < children:
                        mine = join(mine, batch[a])
            if own < 0:
                return mine
            slot = own

    def load(self, slot: int, size: int, word: int) -> np.ndarray:
        return self.partials.load(self.places(slot, size, word), word).reshape(self.lanes, size)
