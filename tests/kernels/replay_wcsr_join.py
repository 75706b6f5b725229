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
        self.parts = config["kParts"]
        self.each = WARPS if self.parts == 1 else 1
        assert config["kThreads"] == self.each * self.parts * WARP, "a warp a strip or run"
        self.cuts = machine.array(params["cuts"], np.int32)
        self.groups = self.cols // 32
        self.blocks = WARPS // self.each
        self.reads = np.zeros(self.partials.data.size, dtype=np.int32)

    def run(self, grid: tuple[int, int, int]) -> None:
        assert grid[0] == self.p["cut_count"] * self.groups * self.blocks
        for x, y, z in self.in_random_order(grid):
            block = SimpleNamespace(x=x, y=y, z=z)
            runs: dict[int, dict[int, np.ndarray]] = {}
            for warp in self.random.permutation(self.each * self.parts).tolist():
                part, strip = divmod(warp, self.each)
                strip += x % self.blocks * self.each
                runs.setdefault(strip, {})[part] = self.add_run(block, strip, part)
            for strip, found in runs.items():
                self.finish_strip(block, strip, [found[part] for part in range(self.parts)])

    def cut_of(self, block: Any) -> tuple[list[int], int]:
        """Window, first slot, slots; group of columns."""
        cut, group = divmod(block.x // self.blocks, self.groups)
        return self.cuts.load(np.array(4 * cut), 4).tolist(), group

    def add_run(self, block: Any, warp: int, part: int) -> np.ndarray:
        (_, first, slots, _), group = self.cut_of(block)
        sums = np.zeros((WARP, 16), dtype=np.float32)
        begin, end = (slots * side // self.parts for side in (part, part + 1))
        for slot, count in batches_of(first + begin, first + end):
            sums = self.add_slots(block, warp, slot, count, group, sums)
        return sums

    def finish_strip(self, block: Any, warp: int, runs: list[np.ndarray]) -> None:
        """The runs of a strip in order, then C."""
        (window, *_), group = self.cut_of(block)
        sums = runs[0]
        for other in runs[1:]:
            with np.errstate(invalid="ignore"):
                sums = sums + other
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
