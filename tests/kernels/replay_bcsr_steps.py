"""``spmm_bcsr.cu`` at the steps of its ladder below 3: one stage, filled and multiplied in turns.

All threads of a block go from barrier to barrier together here; what is copied by the engine lands
when the barrier in shared memory is waited for, and is rubbish before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.kernels.replay_bcsr import (
    BLOCK,
    BLOCK_BYTES,
    BOX_BYTES,
    PENDING,
    Item,
    Multiplication,
    Product,
    fragment_places,
    fragments,
)
from tests.kernels.replay_wgmma import CHUNK, ITEM, Barrier, Leaving

TENSOR_CORES, ENGINE = 1, 2


class StepProduct(Product):
    """One launch: a block of threads an item."""

    def thread_block(self, index: int) -> None:
        self.begin()
        running = [self.take_turns(self.item_at(index))]
        while running:
            self.take_turn(running)
        assert not self.shared.coming and not self.shared.leaving

    def take_turns(self, item: Item) -> Iterator[None]:
        stage, full = self.ring, Barrier(1)
        tiles = [np.zeros((BLOCK, 128), dtype=np.float32) for _ in range(self.consumers)]
        leaving = [[Leaving() for _ in range(4)] for _ in tiles]
        for i in range(item.blocks):
            block = item.first_block + i
            row = int(self.block_col_idx.load(np.array(block))[0]) * BLOCK
            if self.step >= ENGINE:
                self.copy_stage(stage, full, block, 0, row, item.first_column)
                yield from full.wait(i % 2)
            else:
                self.copy_by_threads(stage, "a", 0, block * BLOCK)
                for j in range(self.boxes):
                    to = stage + BLOCK_BYTES + j * BOX_BYTES
                    self.copy_by_threads(to, "b", item.first_column + j * 64, row)
                self.shared.fence(stage, self.stage_bytes)
            for consumer, tile in enumerate(tiles):
                yield from self.multiply(stage, consumer, tile)
        for consumer, tile in enumerate(tiles):
            yield from self.finish(consumer, item, fragments(tile), leaving[consumer])
        for one in (one for warps in leaving for one in warps):
            yield from one.wait_read()

    def multiply(self, stage: int, consumer: int, tile: np.ndarray) -> Iterator[None]:
        b = stage + BLOCK_BYTES + consumer * 2 * BOX_BYTES
        if self.step < TENSOR_CORES:
            self.multiply_by_cores(stage, b, tile)
            return
        assert not self.shared.unseen.any(), "written, but not for WGMMA"
        under_way: list[list[Multiplication]] = [self.start_products(stage, b, True)]
        yield from self.wait_products(PENDING[3], under_way, tile)
        assert not under_way

    def copy_by_threads(self, to: int, name: str, column: int, row: int) -> None:
        """The map is an address, rows, columns, and bytes a row."""
        pointer, rows, columns, row_bytes = self.maps_of[name][:4]
        source = self.machine.array(pointer, np.uint16)
        for at in range(BLOCK * 8):
            r, chunk = divmod(at, 8)
            here = columns - column - chunk * 8
            place = (row + r) * (row_bytes // ITEM) + column + chunk * 8
            word = np.zeros(8, dtype=np.uint16)
            if row + r < rows and here >= 8:
                word = source.load(np.array(place), 8)
            elif row + r < rows and here > 0:
                word[:here] = source.load(place + np.arange(here))[:, 0]
            begin = to + r * 128 + (chunk ^ r % 8) * CHUNK
            self.shared.data[begin // ITEM : begin // ITEM + 8] = word
            self.shared.unseen[begin // ITEM : begin // ITEM + 8] = True

    def multiply_by_cores(self, stage: int, b: int, tile: np.ndarray) -> None:
        """Each thread's 64 sums, by the addresses that it reads."""
        thread = np.arange(128)
        lane = thread % 32
        rows = stage + (thread // 32 * 16 + lane // 4) * 128
        sums = np.zeros((128, 64), dtype=np.float32)
        for k in range(BLOCK):
            at = ((k // 8) ^ (lane // 4)) * 16 + k % 8 * 2
            a = [
                self.element.widen(self.shared.read(rows + half * 8 * 128 + at)) for half in (0, 1)
            ]
            for j in range(16):
                place = b + j // 8 * 8192 + k * 128 + ((j % 8) ^ (k % 8)) * 16 + lane % 4 * 4
                for e in range(2):
                    x = self.element.widen(self.shared.read(place + 2 * e))
                    for half in range(2):
                        sums[:, j * 4 + half * 2 + e] += a[half] * x
        tile[fragment_places()] += sums
