"""Schedules of rows as kernels read them, and launches over them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsetile.formats.bundles import BUNDLE_ROWS
from sparsetile.jit import LoadedKernel
from sparsetile.kernels.csr import THREADS, RowShape, RowTile
from sparsetile.launch.geometry import MAX_BLOCKS, MAX_SLABS
from sparsetile.launch.interface import Tensors

__all__ = ["Launch", "Work"]

# Approximate thread blocks per SM, and waves of them from which the next kernel may start early.
BLOCKS_PER_SM, MANY_WAVES = 8, 2


@dataclass(frozen=True)
class Work:
    """One schedule: the prefix of its tensors' names, and its sizes."""

    prefix: str
    sections: tuple[int, int, int, int, int]
    slots: int
    nodes: int
    bundled: bool

    @classmethod
    def of(cls, sizes: Mapping[str, Any], bundled: bool) -> Work:
        """Read the result of ``schedule_sizes``."""
        found = sizes["sections"]
        sections = (0,) * (5 - len(found)) + tuple(found)  # older files lack shared rows
        prefix = "mixed_" if bundled else ""
        return cls(prefix, sections, sizes["slots"], sizes["nodes"], bundled)  # type: ignore[arg-type]

    @property
    def items(self) -> int:
        return sum(self.sections)

    def block_ends(self, lanes: int, shared: bool = False) -> tuple[int, ...]:
        """End of each section in thread blocks: an item has a block, a warp or a group.

        ``shared``: the kernel supports shared items; otherwise a warp takes each.
        """
        warps, groups = THREADS // 32, THREADS // lanes
        per_block = (1 if shared else warps, warps, warps, groups, groups)
        blocks = [-(-c // b) for c, b in zip(self.sections, per_block, strict=True)]
        return tuple(itertools.accumulate(blocks))

    def pointers(self, tensors: Tensors) -> dict[str, int]:
        """Addresses of the schedule's tensors."""
        names = ("items", "parent_of_slot", "nodes")
        return {name: tensors[self.prefix + name].data_ptr() for name in names}

    def section_params(self, lanes: int, shared: bool = False) -> dict[str, tuple[int, ...]]:
        """End of each section, in items and in thread blocks."""
        return {
            "item_end": tuple(itertools.accumulate(self.sections)),
            "block_end": self.block_ends(lanes, shared),
        }


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with the parameters that depend only on the width."""

    kernel: LoadedKernel
    work: Work
    tile: RowTile
    slabs: int
    block_ends: tuple[int, ...]
    small: bool
    slab_fast: bool
    early: bool

    @classmethod
    def of(
        cls,
        kernel: LoadedKernel,
        work: Work,
        tile: RowTile,
        n: int,
        shape: RowShape,
        processors: int,
        small: bool = False,
    ) -> Launch:
        """Return the launch of a kernel over ``work`` for ``n`` columns."""
        slabs, block_ends = tile.slabs(n), work.block_ends(tile.lanes, small)
        # Blocks of the next kernel go to the SMs that end first: uneven unless there are many.
        waves = block_ends[-1] * slabs / (processors * BLOCKS_PER_SM)
        return cls(
            kernel, work, tile, slabs, block_ends, small,
            slab_fast=slabs > MAX_SLABS or (slabs > 1 and shape.slabs_first(work.bundled)),
            early=work.slots == 0 and waves >= MANY_WAVES,
        )  # fmt: skip

    @property
    def overlap(self) -> bool:
        """Whether the kernel may start before its predecessor ends: not if rows are cut.

        With cut rows it measured slower (docs/explanation/notes/csr.md).
        """
        return self.work.slots == 0

    def grid(self, batches: int) -> tuple[int, int, int]:
        """Blocks of items and slabs; one of them is the fast dimension."""
        blocks = self.block_ends[-1]
        x, y = (blocks * self.slabs, 1) if self.slab_fast else (blocks, self.slabs)
        return x, y, batches

    @property
    def too_wide(self) -> bool:
        """Whether one matrix needs more thread blocks than a grid has."""
        x, y, _ = self.grid(1)
        return x > MAX_BLOCKS or y > MAX_SLABS

    def partial_bytes(self, dtype: torch.dtype, args: bool) -> int:
        """Bytes of a slot: the device's Accumulator for each lane of a group."""
        wide = dtype is torch.float64
        rows = BUNDLE_ROWS if self.work.bundled else 1
        vectors = self.tile.vector * self.tile.times
        lane = vectors * (rows * (8 if wide else 4) + (4 if args else 0))
        return self.tile.lanes * (-(-lane // 8) * 8 if wide else lane)
