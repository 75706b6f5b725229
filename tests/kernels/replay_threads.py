"""Work items of ``segment.cuh`` in NumPy: which threads of a launch have which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

WARP = 32


@dataclass
class Threads:
    """GroupWork of every thread: some threads of a launch, whole warps."""

    lane: np.ndarray
    index: np.ndarray
    end: np.ndarray
    first: np.ndarray
    stride: np.ndarray
    wide: np.ndarray

    def take(self, chosen: np.ndarray) -> Threads:
        return Threads(*(getattr(self, field.name)[chosen] for field in fields(self)))


def group_work(
    blocks: int, lanes: int, threads: int, params: Mapping[str, Any]
) -> tuple[Threads, np.ndarray]:
    """Return the work of every thread, and whether its items are bundles."""
    item_end = np.array([params[f"item_end[{s}]"] for s in range(4)])
    block_end = np.array([params[f"block_end[{s}]"] for s in range(4)])
    block = np.repeat(np.arange(blocks), threads)
    thread = np.tile(np.arange(threads), blocks)
    section = sum((block >= block_end[s]).astype(int) for s in range(3))
    first_item = np.where(section == 0, 0, item_end[section - 1])
    first_block = np.where(section == 0, 0, block_end[section - 1])
    wide = section < 2
    together = np.where(wide, WARP, lanes)
    index = first_item + (block - first_block) * (threads // together) + thread // together
    first = np.where(wide, thread % WARP // lanes * lanes, 0)
    stride = np.where(wide, WARP, lanes)
    work = Threads(thread % lanes, index, item_end[section], first, stride, wide)
    return work, section % 2 == 0
