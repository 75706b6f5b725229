"""``tf32_operand.cu`` in NumPy: the same index arithmetic, all threads of a block at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.kernels.replay import Machine
from tests.kernels.replay_mma import U32, round_tf32

TILE, PITCH, THREADS = 64, 65, 256
THREAD = np.arange(THREADS)
ROW, FOUR = THREAD // 8, THREAD % 8 * 4
BANKS = 32


class Copy:
    """One launch."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.k_major, self.vector, self.p = config["kKMajor"], config["kVector"], params
        self.b, self.to = machine.array(params["b"], U32), machine.array(params["to"], U32)
        assert config["kThreads"] == THREADS

    def run(self, grid: tuple[int, int, int]) -> None:
        k_tiles = -(-self.p["k"] // TILE)
        for block in range(grid[0]):
            self.thread_block(block % k_tiles * TILE, block // k_tiles * TILE)
        n, k = np.arange(self.p["n"])[:, None], np.arange(self.p["k"])
        writes = self.to.writes
        assert (writes[n * self.p["to_stride"] + k] == 1).all() and writes.max(initial=0) <= 1

    def load_four(self, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        p = self.p
        if self.k_major:
            inside, stride = np.where(n < p["n"], p["k"] - k, 0), p["k_stride"]
        else:
            inside, stride = np.where(k < p["k"], p["n"] - n, 0), p["n_stride"]
        at = k * p["k_stride"] + n * p["n_stride"]
        word = np.zeros((THREADS, 4), dtype=U32)
        whole = (self.vector == 4) & (inside >= 4)
        word[whole] = self.b.load(at[whole], 4)
        for i in range(4):
            here = ~whole & (i < inside)
            word[here, i] = self.b.load(at[here] + i * stride)[:, 0]
        return round_tf32(word)

    def store_four(self, k: np.ndarray, n: np.ndarray, four: np.ndarray) -> None:
        here = (k < self.p["k"]) & (n < self.p["n"])
        self.to.store((n * self.p["to_stride"] + k)[here], four[here])

    def thread_block(self, first_k: int, first_n: int) -> None:
        tile = np.full(TILE * PITCH, 0xFFFFFFFF, dtype=U32)
        for quarter in range(4):
            row, four = ROW + quarter // 2 * 32, FOUR + quarter % 2 * 32
            if self.k_major:
                k, n = first_k + four, first_n + row
                self.store_four(k, n, self.load_four(k, n))
                continue
            for i in range(4):
                _meets_all_banks(row * PITCH + four + i)
            places = (row * PITCH + four)[:, None] + np.arange(4)
            tile[places] = self.load_four(first_k + row, first_n + four)
        if self.k_major:
            return
        for quarter in range(4):
            n, k = ROW + quarter // 2 * 32, FOUR + quarter % 2 * 32
            places = (k * PITCH + n)[:, None] + np.arange(4) * PITCH
            _meets_all_banks(places[:, 0])
            self.store_four(first_k + k, first_n + n, tile[places])


def _meets_all_banks(words: np.ndarray) -> None:
    for warp in words.reshape(-1, 32):
        assert len({*(warp % BANKS)}) == BANKS, "lanes of a warp meet in a bank"


def replay_operand(
    machine: Machine,
    config: Mapping[str, Any],
    params: dict[str, Any],
    grid: tuple[int, int, int],
) -> None:
    assert grid[1:] == (1, 1)
    Copy(machine, config, params).run(grid)
