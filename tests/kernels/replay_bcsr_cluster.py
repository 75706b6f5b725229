"""``spmm_bcsr.cu`` at the last step of its ladder: two blocks of threads share blocks of A.

Both run in random turns, with copies that land at random times in either. A barrier of a block that
has not begun yet, or that has ended, must not be touched; threads that wait for ever are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.kernels.replay_bcsr import BLOCK, BOX_BYTES, Item, Product
from tests.kernels.replay_wgmma import Barrier

CLUSTER = 2


class Gathering:
    """``cluster_sync``: a barrier of all threads of a cluster."""

    def __init__(self, threads: int) -> None:
        self.missing = threads

    def sync(self) -> Iterator[None]:
        self.missing -= 1
        while self.missing:
            yield


class ClusterBlock(Product):
    """One block of threads of a cluster; ``cluster`` has both."""

    rank: int
    cluster: list[ClusterBlock]
    beginning: Gathering
    ending: Gathering

    def item_at(self, index: int) -> Item:
        item = super().item_at(index)
        if index >= self.items:
            return item
        slab = item.first_column // self.cols * CLUSTER + self.rank
        return Item(item.block_row, item.first_block, item.blocks, slab * self.cols)

    def there(self) -> None:
        assert self.begun, "a block of threads is touched before it has begun"
        assert self.running, "a block of threads is touched after its end"

    def threads(self, index: int) -> list[Iterator[None]]:
        """Thread 0 makes the barriers; then all begin, and end, together."""
        self.begin()
        self.begun, self.running = False, 1 + self.consumers
        roles = [self.produce(index)]
        roles += [self.consume(consumer, index) for consumer in range(self.consumers)]
        return [self.life(role, first=i == 0) for i, role in enumerate(roles)]

    def life(self, role: Iterator[None], first: bool) -> Iterator[None]:
        if first:
            yield
            self.full = [Barrier(1) for _ in range(self.stages)]
            arrivals = CLUSTER * self.consumers * 4
            self.empty = [Barrier(arrivals) for _ in range(self.stages)]
            self.begun = True
        yield from self.beginning.sync()
        yield from role
        yield from self.ending.sync()
        self.running -= 1

    def copy_stage(
        self, stage: int, full: Barrier, block: int, piece: int, row: int, column: int
    ) -> None:
        assert piece == 0 and not self.k_major
        full.expect(self.stage_bytes)
        first = self.rank * (BLOCK // CLUSTER)
        for other in self.cluster:
            other.there()
            to = other.ring + (stage - self.ring) + first * self.row_bytes
            its = other.full[self.full.index(full)]
            other.shared.copy_box(to, self.maps_of["a"], 0, block * BLOCK + first, its)
        for j in range(self.boxes):
            to = stage + self.block_bytes + j * BOX_BYTES
            self.shared.copy_box(to, self.maps_of["b"], column + j * 64, row, full)

    def release(self, empty: Barrier) -> Iterator[None]:
        which = self.empty.index(empty)
        for _ in range(4):  # a warp each
            for other in self.cluster:
                other.there()
                other.empty[which].arrive()
                yield


class ClusterProduct:
    """One launch."""

    def __init__(self, *given: Any) -> None:
        self.blocks = [ClusterBlock(*given) for _ in range(CLUSTER)]
        for rank, block in enumerate(self.blocks):
            block.rank, block.cluster, block.c = rank, self.blocks, self.blocks[0].c
            block.random = np.random.default_rng((block.machine.seed, rank))
        self.random = np.random.default_rng(self.blocks[0].machine.seed)

    def run(self, grid: tuple[int, int, int]) -> None:
        assert grid[0] % CLUSTER == 0 and grid[1:] == (1, 1)
        for block in self.blocks:
            block.grid = grid[0] // CLUSTER
            block.items = block.p["block_rows"] * block.p["slabs"]
        for index in range(grid[0] // CLUSTER):
            self.together(index)
        self.blocks[0].check_writes()

    def together(self, index: int) -> None:
        first = self.blocks[0]
        count = CLUSTER * (1 + first.consumers)
        beginning, ending = Gathering(count), Gathering(count)
        running = []
        for block in self.blocks:
            block.beginning, block.ending = beginning, ending
            running.append(block.threads(index))
        mine = [first.item_at(i) for i in range(index, first.items, first.grid)]
        for _ in range(8000 * sum(item.blocks + 1 for item in mine)):
            if not any(running):
                break
            which = int(self.random.integers(CLUSTER))
            block = self.blocks[which]
            if running[which] or block.shared.coming or block.shared.leaving:
                block.take_turn(running[which])
        assert not any(running), "threads wait for ever"
        for block in self.blocks:
            assert not block.shared.coming and not block.shared.leaving
