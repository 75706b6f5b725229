"""``spmm_bcsr.cu`` in NumPy: the same index arithmetic, the same waits, thread by thread.

Functions and names are those of the device code. Of each block of threads the copying warp and the
consumers run in random turns, copies land at random times: what is read too early, or overwritten
too early, is NaN. Numbers that the code spells out in calls are read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sparsetile.jit.source import DEVICE_TREE
from sparsetile.jit.tensor_map import MAP_WORDS
from tests.kernels.replay import Machine
from tests.kernels.replay_mma import TRAITS, U32
from tests.kernels.replay_wgmma import Barrier, Descriptor, Maps, Shared, descriptor

BLOCK, GROUP, WARP = 64, 128, 32
BLOCK_BYTES = BLOCK * BLOCK * 2
BOX_BYTES = BLOCK * 128
THREAD = np.arange(GROUP)
Q = THREAD % 4
TEXT = (DEVICE_TREE / "spmm_bcsr.cu").read_text()


def steps_of(operand: str) -> tuple[int, int, int]:
    """(bytes a k step, leading, stride) of ``wg::descriptor(operand + k * ..)`` in the code."""
    found = re.search(rf"descriptor\({operand} \+ k \* (\d+), (\w+), (\d+)\)", TEXT)
    assert found is not None, f"no descriptor of {operand}"
    names = {"kBoxBytes": BOX_BYTES}
    step, leading, stride = (names.get(word) or int(word) for word in found.groups())
    return step, leading, stride


A_STEPS, B_STEPS = steps_of("stage"), steps_of("b")


class Turn:
    def __init__(self, stages: int) -> None:
        self.stages, self.stage, self.parity = stages, 0, 0

    def next(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.parity = 0, self.parity ^ 1


def transpose(word: np.ndarray) -> np.ndarray:
    """``word`` [128 threads, 4]: rows to columns among four neighbouring lanes."""
    word = word.copy()
    for step in (1, 2):
        upper = (Q & step) != 0
        for i in range(4):
            if i & step:
                continue
            sent = np.where(upper, word[:, i], word[:, i | step])
            got = sent[THREAD ^ step]  # __shfl_xor_sync: neighbours of one warp
            word[upper, i] = got[upper]
            word[~upper, i | step] = got[~upper]
    return word


class Product:
    """One launch: its configuration, parameters and memory."""

    def __init__(
        self, machine: Machine, maps: Maps, config: Mapping[str, Any], params: dict[str, Any]
    ) -> None:
        self.machine, self.maps, self.p = machine, maps, params
        self.cols, self.stages = config["kCols"], config["kStages"]
        self.consumers = self.cols // 128
        self.boxes = self.cols // 64
        self.stage_bytes = BLOCK_BYTES + self.boxes * BOX_BYTES
        self.element, self.output = TRAITS[config["ELEMENT"]], TRAITS[config["OUTPUT"]]
        array = machine.array
        self.block_row_ptr = array(params["block_row_ptr"], np.int32)
        self.block_col_idx = array(params["block_col_idx"], np.int32)
        self.longest_first = array(params["longest_first"], np.int32)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.c = array(params["c"], self.output.storage)
        self.random = np.random.default_rng(11)
        self.maps_of = {
            name: [params[f"{name}[{i}]"] for i in range(MAP_WORDS)] for name in ("a", "b")
        }

    def run(self, grid: tuple[int, int, int]) -> None:
        for self.y in range(grid[1]):
            for x in range(grid[0]):
                self.thread_block(int(self.longest_first.load(np.array(x))[0]))
        self.check_writes()

    def check_writes(self) -> None:
        """Each element of C once; of a row past its end only what fills an access."""
        step = 8 if self.output.size == 2 else 2
        row, column = np.arange(self.p["rows"]), np.arange(-(-self.p["n"] // step) * step)
        expected = np.zeros_like(self.c.writes)
        expected[row[:, None] * self.p["c_row_stride"] + column] = 1
        assert (self.c.writes == expected).all()

    # -- one block of threads

    def thread_block(self, block_row: int) -> None:
        begin, end = self.block_row_ptr.load(np.array([block_row, block_row + 1]))[:, 0].tolist()
        base = 16 * int(self.random.integers(1, 65))  # wherever dynamic shared memory begins
        self.shared = Shared(self.machine, self.maps, base, self.machine.shared_bytes)
        self.ring = base + (1024 - base % 1024) % 1024
        barriers_end = self.ring + self.stages * (self.stage_bytes + 16)
        assert barriers_end <= base + self.machine.shared_bytes, "outside of shared memory"
        self.full = [Barrier(1) for _ in range(self.stages)]
        self.empty = [Barrier(self.consumers * 4) for _ in range(self.stages)]
        running = [self.produce(begin, end)]
        running += [self.consume(c, block_row, end - begin) for c in range(self.consumers)]
        for _ in range(2000 * (end - begin + 1)):
            if not running and not self.shared.coming:
                break
            self.take_turn(running)
        assert not running and not self.shared.coming, "threads wait for ever"

    def take_turn(self, running: list[Iterator[None]]) -> None:
        coming = self.shared.coming
        which = int(self.random.integers(len(running) + len(coming)))
        if which < len(coming):
            coming.pop(which)()
            return
        one = running[which - len(coming)]
        if next(one, "done") == "done":
            running.remove(one)

    def produce(self, begin: int, end: int) -> Iterator[None]:
        first_column = self.y * self.cols
        turn = Turn(self.stages)
        for chunk in range(begin, end, WARP):
            count = min(WARP, end - chunk)
            mine = self.block_col_idx.load(chunk + np.arange(count))[:, 0]
            for i in range(count):
                row = int(mine[i]) * BLOCK
                yield from self.empty[turn.stage].wait(turn.parity ^ 1)
                full = self.full[turn.stage]
                stage = self.ring + turn.stage * self.stage_bytes
                full.expect(self.stage_bytes)
                copy = self.shared.copy_box
                copy(stage, self.maps_of["a"], 0, (chunk + i) * BLOCK, full)
                for j in range(self.boxes):
                    to = stage + BLOCK_BYTES + j * BOX_BYTES
                    copy(to, self.maps_of["b"], first_column + j * 64, row, full)
                    yield
                turn.next()

    def consume(self, consumer: int, block_row: int, blocks: int) -> Iterator[None]:
        tile = np.zeros((BLOCK, 128), dtype=np.float32)
        turn = Turn(self.stages)
        for i in range(blocks):
            yield from self.full[turn.stage].wait(turn.parity)
            stage = self.ring + turn.stage * self.stage_bytes
            b = stage + BLOCK_BYTES + consumer * 2 * BOX_BYTES
            under_way = []
            for k in range(BLOCK // 16):
                left = descriptor(stage + k * A_STEPS[0], *A_STEPS[1:])
                right = descriptor(b + k * B_STEPS[0], *B_STEPS[1:])
                under_way.append((left, right, i > 0 or k > 0))
            yield from self.wait_products(under_way, tile)
            for _ in range(4):  # lane 0 of each warp
                self.empty[turn.stage].arrive()
                yield
            turn.next()
        self.finish(block_row, self.y * self.cols + consumer * 128, fragments(tile))

    def wait_products(self, under_way: list, tile: np.ndarray) -> Iterator[None]:
        """Operands are read until the products have been waited for."""
        yield
        for left, right, add in under_way:
            product = self.multiply(left, right)
            with np.errstate(invalid="ignore"):
                tile[:] = tile + product if add else product

    def multiply(self, left: int, right: int) -> np.ndarray:
        """64 x 16 times 16 x 128, operands found by their descriptors."""
        k = np.arange(16)
        a = self.shared.read(Descriptor.of(left).k_major(np.arange(BLOCK)[:, None], k))
        b = self.shared.read(Descriptor.of(right).mn_major(k[:, None], np.arange(128)))
        with np.errstate(invalid="ignore"):
            return self.element.widen(a) @ self.element.widen(b)

    # -- what follows

    def row_of(self, position: np.ndarray) -> np.ndarray:
        here = position < self.p["rows"]
        rows = np.where(here, position, -1)
        if self.order is not None:
            rows[here] = self.order.load(position[here])[:, 0]
        return rows

    def scale_of(self, row: np.ndarray) -> np.ndarray:
        scale = np.full(GROUP, self.p["alpha"], dtype=np.float32)
        if self.indptr is not None:
            here = row >= 0
            ends = self.indptr.load(row[here] + 1)[:, 0], self.indptr.load(row[here])[:, 0]
            entries = np.maximum(ends[0] - ends[1], 1).astype(np.float32)
            scale[here] = scale[here] / entries
        return scale

    def finish(self, block_row: int, first_column: int, sums: np.ndarray) -> None:
        """``sums`` [128 threads, 64]."""
        position = block_row * BLOCK + THREAD // 32 * 16 + THREAD % 32 // 4
        for half in range(2):
            row = self.row_of(position + 8 * half)
            scale = self.scale_of(row) if self.p["epilogue"] else np.ones(GROUP, np.float32)
            c = row * self.p["c_row_stride"]
            for group in range(4):
                x = np.empty((GROUP, 4, 2), dtype=np.float32)
                for i in range(4):
                    for e in range(2):
                        x[:, i, e] = sums[:, (group * 4 + i) * 4 + half * 2 + e]
                if self.p["epilogue"]:
                    self.epilogue(x, row, c, scale, first_column, group)
                self.store(x, row, c, first_column, group)

    def epilogue(self, x, row, c, scale, first_column: int, group: int) -> None:
        for i in range(4):
            column = first_column + (group * 4 + i) * 8 + Q * 2
            for e in range(2):
                x[:, i, e] *= scale
                here = (column + e < self.p["n"]) & (row >= 0)
                if self.p["beta"] != 0.0:
                    old = self.output.widen(self.c.load((c + column + e)[here])[:, 0])
                    x[here, i, e] += np.float32(self.p["beta"]) * old
                if self.bias is not None:
                    x[here, i, e] += self.bias.load((column + e)[here])[:, 0]
                if self.p["relu"]:
                    x[:, i, e] = np.where(x[:, i, e] < 0, np.float32(0), x[:, i, e])

    def store(self, x, row, c, first_column: int, group: int) -> None:
        if self.output.size == 2:
            halves = self.output.narrow(x).astype(U32)
            word = transpose(halves[..., 0] | halves[..., 1] << U32(16))
            column = first_column + (group * 4 + Q) * 8
            here = (row >= 0) & (column < self.p["n"])
            self.c.store((c + column)[here], word[here].view(np.uint16))
            return
        for i in range(4):
            column = first_column + (group * 4 + i) * 8 + Q * 2
            here = (row >= 0) & (column < self.p["n"])
            self.c.store((c + column)[here], self.output.narrow(x[here, i]))


def fragment_places() -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the 64 x 128 sums in each register of each thread: the PTX ISA's D."""
    register = np.arange(64)
    row = (THREAD // 32 * 16 + THREAD % 32 // 4)[:, None] + register // 2 % 2 * 8
    column = (THREAD % 4 * 2)[:, None] + register // 4 * 8 + register % 2
    return row, column


def fragments(tile: np.ndarray) -> np.ndarray:
    """The sums as the threads of a warpgroup hold them: [128, 64]."""
    return tile[fragment_places()]


def replays(maps: Maps) -> dict[str, Any]:
    def replay_spmm(machine, config, params, grid) -> None:
        Product(machine, maps, config, params).run(grid)

    return {"spmm_bcsr": replay_spmm}
