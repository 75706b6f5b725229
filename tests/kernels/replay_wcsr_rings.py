"""Shared memory and both rings of ``spmm_wcsr.cu`` in NumPy; ``replay_wcsr.py`` has the rest.

Names are those of the device code; numbers that it spells out are read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsetile.jit.source import DEVICE_TREE
from tests.kernels.replay import Array
from tests.kernels.replay_bcsr import Turn
from tests.kernels.replay_ring import assert_no_conflicts
from tests.kernels.replay_wgmma import RUBBISH, Barrier

TEXT = "".join((DEVICE_TREE / name).read_text() for name in ("wcsr.cuh", "spmm_wcsr.cu"))
WARP = 32


def constant(name: str) -> int:
    """A number that the code spells out."""
    return int(re.search(rf"constexpr int {name} = (\d+);", TEXT).group(1))


HEIGHT, PRODUCERS, GROUPS = (constant(name) for name in ("kHeight", "kProducers", "kGroups"))
WARPS = HEIGHT // 16
CONSUMERS = WARPS * 32
COPIERS = GROUPS * PRODUCERS // 32
assert "kCopiers = kGroups * kProducers / 32;" in TEXT


class Shared:
    """Shared memory of a block by units of two bytes, and copies on their way to it."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self.data = np.full((base + size) // 2, RUBBISH, dtype=np.uint16)
        self.unseen = np.zeros(self.data.size, dtype=bool)  # by the Tensor Cores
        self.coming: list[Any] = []

    def _units(self, at: np.ndarray, width: int) -> np.ndarray:
        at = np.asarray(at)
        inside = (at >= self.base) & (at + width <= self.base + self.size)
        assert inside.all(), "outside of shared memory"
        assert not (at % width).any(), "misaligned"
        return at[..., None] // 2 + np.arange(width // 2)

    def read(self, at: np.ndarray, kind: type, count: int = 1) -> np.ndarray:
        """``count`` elements from each of ``at`` on, by one access: [..., count]."""
        found = self.data[self._units(at, np.dtype(kind).itemsize * count)]
        return np.ascontiguousarray(found).view(kind)

    def operand(self, at: np.ndarray, kind: type) -> np.ndarray:
        """What the Tensor Cores read: not before threads have fenced what they wrote."""
        size = np.dtype(kind).itemsize
        assert not self.unseen[self._units(at, size)].any(), "written, but not for Tensor Cores"
        return self.read(at, kind)[..., 0]

    def store(self, at: np.ndarray, words: np.ndarray) -> None:
        """16 bytes a lane: ``words`` [lanes, 4] of four bytes."""
        assert_no_conflicts(at.reshape(-1, WARP), 16)
        units = self._units(at, 16)
        self.data[units] = np.ascontiguousarray(words).view(np.uint16)
        self.unseen[units] = True

    def fence(self, at: np.ndarray) -> None:
        """``fence.proxy.async`` of the lanes that stored 16 bytes at each of ``at``."""
        self.unseen[self._units(at, 16)] = False

    def copy_bytes(self, to: int, source: Array, first: int, size: int, barrier: Barrier) -> None:
        """A bulk copy: rubbish until it lands, at some time."""
        assert size > 0 and size % 16 == 0 and to % 16 == 0, "whole pieces of 16 bytes"
        piece = 16 * np.arange(size // 16)
        units = self._units(to + piece, 16)
        found = np.ascontiguousarray(source.load(first + piece, 16)).view(np.uint16)
        self.data[units] = RUBBISH

        def land() -> None:
            self.data[units] = found
            barrier.complete(size)

        self.coming.append(land)


class Steps:
    """Where a walk over the steps of a block's items stands."""

    def __init__(self, block: Any) -> None:
        self.p = block.p
        self.place, self.end = block.share
        self.first = self.stop = 0
        self.number = 0  # of steps passed
        self.turn, self.tiles = Turn(self.p.stages), Turn(self.p.tile_stages)
        if self.place < self.end:
            self.open()
        self.settle()

    def open(self) -> None:
        _, self.first, self.stop, _ = self.p.item(self.place)

    def settle(self) -> None:
        while self.first >= self.stop and self.place < self.end:
            self.place += 1
            if self.place < self.end:
                self.open()

    def more(self) -> bool:
        return self.place < self.end

    def skip(self, steps: int) -> None:
        for _ in range(steps):
            self.first += self.p.step_tiles
            self.number += 1
            self.turn.next()
            self.tiles.next()
            self.settle()


class TileCopies:
    """Copies every kCopiers-th step's part of A, by one warp."""

    def __init__(self, block: Any, first: int) -> None:
        self.block, self.at = block, Steps(block)
        self.value = self.last = 0
        self.at.skip(first)
        self.look_up()

    def look_up(self) -> None:
        at, p = self.at, self.block.p
        if p.weighted and at.more():
            ends = np.array([at.first, min(at.first + p.step_tiles, at.stop)])
            self.value, self.last = p.strips.load(ends * WARPS)[:, 0].tolist()

    def next(self) -> Iterator[None]:
        block, p, at = self.block, self.block.p, self.at
        if not at.more():
            return
        yield from block.tiles_empty[at.tiles.stage].wait(at.tiles.parity ^ 1)
        to = block.tiles + at.tiles.stage * p.tile_bytes
        full, copy = block.tiles_full[at.tiles.stage], block.shared.copy_bytes
        each = 16 // p.size
        aligned = self.value // each * each
        size = (self.last - aligned + each - 1) // each * 16
        expected = p.id_bytes + p.bit_bytes
        if p.weighted:
            expected += p.offset_bytes + size
        full.expect(expected)
        copy(to, p.columns_raw, at.first * 32, p.id_bytes, full)
        copy(to + p.bits_at, p.bitmaps_raw, at.first * HEIGHT, p.bit_bytes, full)
        if p.weighted:
            copy(to + p.offsets_at, p.strips_raw, at.first * WARPS * 4, p.offset_bytes, full)
            if size:
                assert p.values_at + size <= p.tile_bytes, "more values than a step holds"
                copy(to + p.values_at, p.values_raw, aligned * p.size, size, full)
        yield
        at.skip(COPIERS)
        self.look_up()
