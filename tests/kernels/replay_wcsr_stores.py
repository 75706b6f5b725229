"""``wcsr.cuh`` in NumPy, what the window kernels do with sums: C, its epilogue, the exact way.

Names are those of the device code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.kernels.replay import Machine
from tests.kernels.replay_mma import LANE, TRAITS, G, T, popc, round_tf32
from tests.kernels.replay_wcsr_rings import HEIGHT, WARP, WARPS


def staged(column: np.ndarray) -> np.ndarray:
    """Place of a tile's column among its staged column ids."""
    return column % 2 * 4 + column // 2


def exchange(word: np.ndarray) -> np.ndarray:
    """``word`` [32, 4]: rows to columns among four neighbouring lanes."""
    word = word.copy()
    for step in (1, 2):
        upper = (T & step) != 0
        for i in range(4):
            if i & step:
                continue
            got = np.where(upper, word[:, i], word[:, i | step])[LANE ^ step]
            word[upper, i] = got[upper]
            word[~upper, i | step] = got[~upper]
    return word


class Launch:
    """One launch of either kernel: what both have of its parameters and memory, and stores."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.p = params
        self.element, self.output = TRAITS[config["ELEMENT"]], TRAITS[config["OUTPUT"]]
        self.cols, self.weighted = config["kCols"], config["kWeighted"]
        self.size = self.element.size
        self.n = params["n"]
        self.b_row = params["b_row_bytes"] // self.size
        array = machine.array
        self.columns = array(params["columns"], np.int32)
        self.bitmaps = array(params["bitmaps"], np.uint64)
        self.strips = array(params["strip_value_ptr"], np.int32)
        self.values = array(params["values"], self.element.storage)
        self.window_row_ptr = array(params["window_row_ptr"], np.int32)
        self.b = array(params["b"], self.element.storage)
        self.c = array(params["c"], self.output.storage)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.partials = array(params["partials"], np.float32)
        self.random = np.random.default_rng(machine.seed)
        self.recomputed = 0
        self.slabs = 0

    def in_random_order(self, grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
        """The blocks of threads of ``grid``."""
        self.slabs = grid[1]
        blocks = list(np.ndindex(*grid))
        for block in self.random.permutation(len(blocks)).tolist():
            yield blocks[block]

    def partial_sums(self, block: Any, slot: int, warp: int) -> int:
        """Where a strip's partial sums in a slot begin, in floats."""
        assert 0 <= slot < self.p["slot_count"]
        layer = block.z * self.slabs + block.y
        strip = (layer * self.p["slot_count"] + slot) * WARPS + warp
        return strip * (self.cols // 2 // 4) * WARP * 4

    def check_writes(self, batches: int, writes: np.ndarray) -> None:
        """Each element of C once; of a row past its end only what fills a lane's access."""
        step = 16 // self.output.size
        row = np.arange(self.p["rows"])[:, None] * self.p["c_row_stride"]
        batch = np.arange(batches)[:, None, None] * self.p["c_batch_stride"]
        most = np.zeros_like(writes)
        most[batch + row + np.arange(-(-self.n // step) * step)] = 1
        assert (writes <= most).all(), "written beside C, or twice"
        assert (writes[batch + row + np.arange(self.n)] == 1).all(), "not all is written"

    def row_of(self, window: int, r: np.ndarray) -> np.ndarray:
        position = window * HEIGHT + r
        here = position < self.p["rows"]
        rows = np.where(here, position, -1)
        if self.order is not None:
            rows[here] = self.order.load(position[here])[:, 0]
        return rows

    def scale_of(self, row: np.ndarray) -> np.ndarray:
        scale = np.full(row.shape, self.p["alpha"], dtype=np.float32)
        here = row >= 0
        if self.p["mean"]:
            ends = self.indptr.load(row[here] + 1)[:, 0], self.indptr.load(row[here])[:, 0]
            scale[here] /= np.maximum(ends[0] - ends[1], 1).astype(np.float32)
        return np.where(here, scale, np.float32(1))

    def finish(
        self, block: Any, row: np.ndarray, column: np.ndarray, x: np.ndarray, plain: bool
    ) -> None:
        """Neighbouring columns ``x`` [lanes, kCount] of each lane's row."""
        here = (row >= 0) & (plain | (column < self.n))
        row, column, x = row[here], column[here], x[here]
        at = block.z * self.p["c_batch_stride"] + row * self.p["c_row_stride"] + column
        if not plain:
            x = x * self.scale_of(row)[:, None]
            if self.p["epilogue"]:
                count = np.arange(x.shape[1])
                if self.p["beta"] != 0.0:
                    old = self.output.widen(self.c.load(at[:, None] + count)[..., 0])
                    with np.errstate(over="ignore", invalid="ignore"):  # beside C lies anything
                        x = x + np.float32(self.p["beta"]) * old
                if self.bias is not None:
                    x = x + self.bias.load(column[:, None] + count)[..., 0]
                if self.p["relu"]:
                    x = np.where(x < 0, np.float32(0), x)
        self.c.store(at, self.output.narrow(x))

    def store_groups(
        self, block: Any, warp: int, window: int, begin: int, sums: np.ndarray
    ) -> bool:
        """Sixteen ``sums`` a lane for each 32 columns, ``begin`` on.

        False, and C as it was, if not all of them are finite.
        """
        with np.errstate(invalid="ignore"):
            if (sums * np.float32(0) != 0).any():
                return False
        groups = sums.shape[1] // 16
        plain = not self.p["epilogue"] and begin + groups * 32 <= self.n
        for half in range(2):
            row = self.row_of(window, warp * 16 + half * 8 + G)
            for group in range(groups):
                mine = sums[:, group * 16 + half * 2 :]
                first_column = begin + group * 32
                if self.size == 4:
                    for e in range(2):
                        x = np.stack([mine[:, 4 * j + e] for j in range(4)], 1)
                        self.finish(block, row, first_column + e * 16 + T * 4, x, plain)
                    continue
                first, second = (
                    exchange(np.stack([mine[:, 4 * i + e] for i in range(4)], 1)) for e in range(2)
                )
                eight = np.stack([first, second], 2).reshape(WARP, 8)
                store = 16 // self.output.size
                for part in range(0, 8, store):
                    x = eight[:, part : part + store]
                    self.finish(block, row, first_column + T * 8 + part, x, plain)
        return True

    def exact(self, block: Any, warp: int, window: int, first_column: int, past: int) -> None:
        """Columns ``first_column`` to ``past`` of the warp's rows, from A's entries."""
        self.recomputed += 1
        begin, end = self.window_row_ptr.load(np.array([window, window + 1]))[:, 0].tolist()
        column = np.arange(first_column, min(self.n, past))
        for r in range(16):
            row = int(self.row_of(window, np.array([warp * 16 + r]))[0])
            if row < 0:
                continue
            sum_ = np.zeros(column.size, dtype=np.float32)
            for tile in range(begin, end):
                strip = tile * WARPS + warp
                low, high = self.bitmaps.load(np.array([strip * 2, strip * 2 + 1]))[:, 0].tolist()
                bits = low if r < 8 else high
                first = 0
                if self.weighted:
                    first = int(self.strips.load(np.array(strip))[0])
                    first += 0 if r < 8 else int(popc(np.uint64(low)))
                for k in range(8):
                    bit = r % 8 * 8 + k
                    if not bits >> bit & 1:
                        continue
                    id = int(self.columns.load(np.array(tile * 8 + int(staged(k))))[0])
                    weight = np.float32(1)
                    if self.weighted:
                        below = bin(bits & ((1 << bit) - 1)).count("1")
                        weight = self.element.widen(self.values.load(np.array([first + below])))
                    at = block.z * self.p["b_batch_stride"] + id * self.b_row + column
                    raw = self.b.load(at)[:, 0]
                    value = self.element.widen(round_tf32(raw) if self.size == 4 else raw)
                    with np.errstate(invalid="ignore"):
                        sum_ = sum_ + np.float32(np.ravel(weight)[0]) * value
            rows = np.full(column.size, row)
            self.finish(block, rows, column, sum_[:, None], plain=False)
