"""``join_wcsr.cu`` in NumPy: windows in pieces added up, a strip and 32 columns a warp.

Functions and names are those of the device code. What the product before it left in slots must be
read once each, and C be whole after both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparsetile.jit.source import DEVICE_TREE
from tests.kernels.replay import Machine
from tests.kernels.replay_mma import LANE
from tests.kernels.replay_wcsr_rings import WARP, WARPS
from tests.kernels.replay_wcsr_stores import Launch

TEXT = (DEVICE_TREE / "join_wcsr.cu").read_text()
AT_ONCE = int(re.search(r"kAtOnce = (\d+);", TEXT).group(1))


def batches_of(slot: int, end: int) -> Iterator[tuple[int, int]]:
    """First slot and number of those whose loads are under way together."""
    while slot + AT_ONCE <= end:
        yield slot, AT_ONCE
        slot += AT_ONCE
    for each in range(slot, end):
        yield each, 1


class Join(Launch):
    """One launch of the second kernel."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        super().__init__(machine, config, params)
        assert config["kThreads"] == WARPS * WARP, "a warp a strip"
        self.cuts = machine.array(params["cuts"], np.int32)
        self.groups = self.cols // 32
        self.reads = np.zeros(self.partials.data.size, dtype=np.int32)

    def run(self, grid: tuple[int, int, int]) -> None:
        assert grid[0] == self.p["cut_count"] * self.groups
        for x, y, z in self.in_random_order(grid):
            for warp in self.random.permutation(WARPS).tolist():
                self.join(SimpleNamespace(x=x, y=y, z=z), warp)

    def join(self, block: Any, warp: int) -> None:
        cut, group = divmod(block.x, self.groups)
        window, first, slots, _ = self.cuts.load(np.array(4 * cut), 4).tolist()
        sums = np.zeros((WARP, 16), dtype=np.float32)
        for slot, count in batches_of(first, first + slots):
            sums = self.add_slots(block, warp, slot, count, group, sums)
        column = block.y * self.cols + group * 32
        if not self.store_groups(block, warp, window, column, sums):
            self.exact(block, warp, window, column, column + 32)

    def add_slots(
        self, block: Any, warp: int, slot: int, count: int, group: int, sums: np.ndarray
    ) -> np.ndarray:
        """``sums`` [32 lanes, 16] and those of ``count`` slots, one after the other."""
        for a in range(count):
            first = self.partial_sums(block, slot + a, warp) + (group * 4 * WARP + LANE) * 4
            words = []
            for j in range(4):
                words.append(self.partials.load(first + j * WARP * 4, 4))
                self.reads[(first + j * WARP * 4)[:, None] + np.arange(4)] += 1
            with np.errstate(invalid="ignore"):
                sums = sums + np.concatenate(words, axis=1)
        return sums


def replay_join(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    product, machine.to_join = machine.to_join, None
    assert product is not None and product.p == params, "of the launch before it"
    join = Join(machine, config, params)
    join.run(grid)
    machine.recomputed += join.recomputed
    assert np.array_equal(join.reads, product.partials.writes), "each slot is added once"
    assert not join.partials.writes.any()
    join.check_writes(grid[2], product.c.writes + join.c.writes)
