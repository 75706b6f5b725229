"""What ``spmm_wcsr.cu`` does with sums, in NumPy: C, its epilogue, and the exact way.

Names are those of the device code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.replay import Array
from tests.kernels.replay_mma import LANE, Element, G, T, popc, round_tf32
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


class Stores:
    """The part of a launch that follows its sums."""

    p: dict[str, Any]
    element: Element
    output: Element
    size: int
    cols: int
    n: int
    b_row: int
    weighted: bool
    recomputed: int
    b: Array
    c: Array
    order: Array | None
    indptr: Array
    bias: Array | None
    bitmaps: Array
    strips: Array
    values: Array
    columns: Array
    window_row_ptr: Array

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
                    x = x + np.float32(self.p["beta"]) * old
                if self.bias is not None:
                    x = x + self.bias.load(column[:, None] + count)[..., 0]
                if self.p["relu"]:
                    x = np.where(x < 0, np.float32(0), x)
        self.c.store(at, self.output.narrow(x))

    def store_window(self, block: Any, warp: int, window: int, sums: np.ndarray) -> bool:
        """``sums`` [32 lanes, kSums]; False, and C as it was, if not all are finite."""
        with np.errstate(invalid="ignore"):
            if (sums * np.float32(0) != 0).any():
                return False
        plain = not self.p["epilogue"] and block.whole
        for half in range(2):
            row = self.row_of(window, warp * 16 + half * 8 + G)
            for group in range(self.cols // 32):
                mine = sums[:, group * 16 + half * 2 :]
                first_column = block.y * self.cols + group * 32
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

    def exact(self, block: Any, warp: int, window: int) -> None:
        self.recomputed += 1
        begin, end = self.window_row_ptr.load(np.array([window, window + 1]))[:, 0].tolist()
        column = np.arange(block.y * self.cols, min(self.n, (block.y + 1) * self.cols))
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
