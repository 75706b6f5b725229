"""``spmm_bcsr.cu`` in NumPy: the same index arithmetic, the same waits, thread by thread.

Functions and names are those of the device code. Of each block of threads the copying warp and the
consumers run in random turns, copies land at random times: what is read too early, or overwritten
too early, is NaN. Products read their operands from their start until they are waited for. Numbers
that the code spells out in calls are read from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsetile.jit.source import DEVICE_TREE
from sparsetile.jit.tensor_map import MAP_WORDS
from tests.kernels.replay import Machine
from tests.kernels.replay_mma import TRAITS, U32
from tests.kernels.replay_tf32 import replay_operand
from tests.kernels.replay_wgmma import Barrier, Descriptor, Leaving, Maps, Shared, descriptor

BLOCK, GROUP, WARP = 64, 128, 32
BLOCK_BYTES = BLOCK * BLOCK * 2
BOX_BYTES = BLOCK * 128
STORE_BOX_BYTES = 16 * 128
WARP_STORE_BYTES = 2 * STORE_BOX_BYTES
BY_THREADS, BY_ENGINE, TRANSPOSED, TRANSPOSED_BY_THREADS = range(4)
SPECIALISED = 3
THREAD = np.arange(GROUP)
Q = THREAD % 4
# How often in a turn a box of C is read: seldom, so that the next item may come before.
SLOW_STORES = 0.05
TEXT = (DEVICE_TREE / "spmm_bcsr.cu").read_text()


def steps_of(operand: str, row_bytes: int = 128) -> list[tuple[int, ...]]:
    """(bytes a k step, leading, stride) of each ``wg::descriptor(operand + k * ..)``."""
    pattern = rf"descriptor(?:<kRowBytes>)?\({operand} \+ k \* (\d+), (\w+), ([\w* ]+)\)"
    names = {"kBoxBytes": BLOCK * row_bytes, "kRowBytes": row_bytes}
    return [tuple(eval(word, {}, names) for word in words) for words in re.findall(pattern, TEXT)]


(A_STEPS,), (FP8_A_STEPS,) = steps_of("stage"), steps_of("stage", 64)
K_MAJOR_STEPS, B_STEPS = steps_of("b")
FP8_B_STEPS = steps_of("b", 64)[0]
# What dynamic shared memory is declared to begin at a multiple of.
ALIGNMENT = int(re.search(r"extern __shared__ __align__\((\d+)\)", TEXT).group(1))
# Groups of products under way when a stage is given back, and when sums are read.
PENDING = [int(count) for count in re.findall(r"wg::wait<(\d)>", TEXT)]


@dataclass(frozen=True)
class FP8:
    """``E4M3``: bytes."""

    size: int = 1

    @staticmethod
    def widen(octets: np.ndarray) -> np.ndarray:
        exact = torch.from_numpy(np.ascontiguousarray(octets)).view(torch.float8_e4m3fn)
        return exact.float().numpy()


@dataclass(frozen=True)
class TF32:
    """``F32`` as Tensor Cores take it: without its lower 13 bits."""

    size: int = 4

    @staticmethod
    def widen(bits: np.ndarray) -> np.ndarray:
        return (bits & U32(0xFFFFE000)).view(np.float32)


OPERANDS = {"E4M3": FP8(), "F32": TF32()}


class Turn:
    def __init__(self, stages: int) -> None:
        self.stages, self.stage, self.parity = stages, 0, 0

    def next(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.parity = 0, self.parity ^ 1


@dataclass(frozen=True)
class Item:
    block_row: int
    first_block: int
    blocks: int
    first_column: int


@dataclass(frozen=True)
class Multiplication:
    """A WGMMA that has been issued: its operands by their descriptors, and as they were then."""

    left: int
    right: int
    add: bool
    operands: tuple[np.ndarray, np.ndarray]


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
        self.k_major, self.step = config["kKMajor"], config["kStep"]
        self.consumers = self.cols // 128
        self.boxes = self.cols // 64
        name = config["ELEMENT"]
        self.element = OPERANDS[name] if name in OPERANDS else TRAITS[name]
        self.output = TRAITS[config["OUTPUT"]]
        self.pieces = 2 if self.element.size == 4 else 1
        self.depth = BLOCK // self.pieces
        self.row_bytes = self.depth * self.element.size
        self.store_bytes = self.consumers * 4 * WARP_STORE_BYTES if self.pieces == 1 else 0
        self.block_bytes = self.box_bytes = BLOCK * self.row_bytes
        self.stage_bytes = self.block_bytes + self.boxes * self.box_bytes
        array = machine.array
        self.work = array(params["work"], np.int32)
        self.block_col_idx = array(params["block_col_idx"], np.int32)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.row_bias = array(params["row_bias"], np.float32)
        self.spoilt = array(params["spoilt"], np.int64)
        self.c = array(params["c"], self.output.storage)
        self.random = np.random.default_rng(11)
        self.maps_of = {
            name: [params[f"{name}[{i}]"] for i in range(MAP_WORDS)]
            for name in ("a", "b", "stored")
        }
        if params["store"] in (BY_ENGINE, TRANSPOSED):
            assert self.order is None and self.output.size == 2 and self.store_bytes
        assert params["store"] != TRANSPOSED_BY_THREADS or self.output.size == 4

    def run(self, grid: tuple[int, int, int]) -> None:
        assert grid[1:] == (1, 1)
        self.grid, self.items = grid[0], self.p["block_rows"] * self.p["slabs"]
        for index in range(self.grid):
            self.thread_block(index)
        self.check_writes()

    def check_writes(self) -> None:
        """Each element of C once; of a row past its end only what fills a thread's access."""
        step = 1 if self.p["store"] >= TRANSPOSED else 8 if self.output.size == 2 else 2
        row, column = np.arange(self.p["rows"]), np.arange(-(-self.p["n"] // step) * step)
        expected = np.zeros_like(self.c.writes)
        expected[self.element_at(row[:, None], column)] = 1
        assert (self.c.writes == expected).all()

    # -- one block of threads

    def item_at(self, index: int) -> Item:
        p = self.p
        if index >= self.items:
            return Item(0, 0, 0, 0)
        first_slab = index // (p["block_rows"] * p["together"]) * p["together"]
        rest = index - first_slab * p["block_rows"]
        width = min(p["together"], p["slabs"] - first_slab)
        row = self.work.load(np.array(4 * (rest // width)), 4).tolist()
        return Item(*row[:3], (first_slab + rest % width) * self.cols)

    def column_at(self, item: Item, start: int) -> np.ndarray:
        block = start + np.arange(WARP)
        column = np.zeros(WARP, dtype=np.int32)
        here = block < item.blocks
        if here.any():
            column[here] = self.block_col_idx.load(item.first_block + block[here])[:, 0]
        return column

    def begin(self) -> None:
        """Shared memory of a block of threads."""
        self.ring = ALIGNMENT * int(self.random.integers(1, 5))  # where shared memory begins
        self.shared = Shared(self.machine, self.maps, self.ring, self.machine.shared_bytes)
        self.stored = self.ring + self.stages * self.stage_bytes
        barriers = self.stored + self.store_bytes
        assert barriers + self.stages * 16 == self.ring + self.machine.shared_bytes

    def thread_block(self, index: int) -> None:
        self.begin()
        self.full = [Barrier(1) for _ in range(self.stages)]
        self.empty = [Barrier(self.consumers * 4) for _ in range(self.stages)]
        running = [self.produce(index)]
        running += [self.consume(c, index) for c in range(self.consumers)]
        mine = [self.item_at(i) for i in range(index, self.items, self.grid)]
        for _ in range(2000 * sum(item.blocks + 1 for item in mine)):
            if not running:
                break
            self.take_turn(running)
        assert not running and not self.shared.coming, "threads wait for ever"
        assert not self.shared.leaving, "shared memory is gone before it was read"

    def take_turn(self, running: list[Iterator[None]]) -> None:
        coming, leaving = self.shared.coming, self.shared.leaving
        if leaving and self.random.random() < SLOW_STORES:
            leaving.pop(int(self.random.integers(len(leaving))))()
            return
        which = int(self.random.integers(len(running) + len(coming)))
        if which < len(coming):
            coming.pop(which)()
            return
        one = running[which - len(coming)]
        if next(one, "done") == "done":
            running.remove(one)

    def produce(self, index: int) -> Iterator[None]:
        item, following = self.item_at(index), self.item_at(index + self.grid)
        first_columns = self.column_at(item, 0)
        turn = Turn(self.stages)
        for i in range(index, self.items, self.grid):
            after = self.item_at(i + 2 * self.grid)
            mine = first_columns
            first_columns = self.column_at(following, 0)
            for start in range(0, item.blocks, WARP):
                if start > 0:
                    mine = self.column_at(item, start)
                for lane in range(min(WARP, item.blocks - start)):
                    for piece in range(self.pieces):
                        row = int(mine[lane]) * BLOCK
                        yield from self.copy(item, start + lane, piece, row, turn)
                        turn.next()
            item, following = following, after

    def copy(self, item: Item, block: int, piece: int, row: int, turn: Turn) -> Iterator[None]:
        yield from self.empty[turn.stage].wait(turn.parity ^ 1)
        stage = self.ring + turn.stage * self.stage_bytes
        full = self.full[turn.stage]
        self.copy_stage(stage, full, item.first_block + block, piece, row, item.first_column)
        yield

    def copy_stage(
        self, stage: int, full: Barrier, block: int, piece: int, row: int, column: int
    ) -> None:
        full.expect(self.stage_bytes)
        copy_box = self.shared.copy_box
        first = piece * self.depth
        copy_box(stage, self.maps_of["a"], first, block * BLOCK, full)
        if self.k_major:
            copy_box(stage + self.block_bytes, self.maps_of["b"], row + first, column, full)
            return
        for j in range(self.boxes):
            to = stage + BLOCK_BYTES + j * BOX_BYTES
            copy_box(to, self.maps_of["b"], column + j * 64, row, full)

    def consume(self, consumer: int, index: int) -> Iterator[None]:
        item, turn = self.item_at(index), Turn(self.stages)
        leaving = [Leaving() for _ in range(4)]  # of each warp; transposed of the first for all
        for i in range(index, self.items, self.grid):
            following = self.item_at(i + self.grid)
            tile = np.full((BLOCK, 128), np.nan, dtype=np.float32)
            accumulate = self.accumulate_pairs if self.element.size == 1 else self.accumulate
            yield from accumulate(consumer, item.blocks * self.pieces, turn, tile)
            yield from self.finish(consumer, item, fragments(tile), leaving)
            item = following
        if self.p["store"] != BY_THREADS:
            for one in leaving:
                yield from one.wait_read()

    def accumulate(
        self, consumer: int, stages: int, turn: Turn, tile: np.ndarray
    ) -> Iterator[None]:
        elided = self.step >= 5
        if stages == 0 or not elided:
            tile[:] = 0.0
        if stages == 0:
            return
        under_way: list[list[Multiplication]] = []
        previous = None
        for i in range(stages):
            yield from self.full[turn.stage].wait(turn.parity)
            stage = self.ring + turn.stage * self.stage_bytes
            b = stage + BLOCK_BYTES + consumer * 2 * BOX_BYTES
            under_way.append(self.start_products(stage, b, i > 0 or not elided))
            yield from self.wait_products(PENDING[0], under_way, tile)
            if previous is not None:
                yield from self.release(previous)
            previous = self.empty[turn.stage]
            turn.next()
        yield from self.wait_products(PENDING[1], under_way, tile)
        yield from self.release(previous)

    def accumulate_pairs(
        self, consumer: int, blocks: int, turn: Turn, tile: np.ndarray
    ) -> Iterator[None]:
        tile[:] = 0.0
        for i in range(0, blocks, 2):
            part = np.full((BLOCK, 128), np.nan, dtype=np.float32)
            under_way, used = [], []
            for half in range(min(2, blocks - i)):
                yield from self.full[turn.stage].wait(turn.parity)
                stage = self.ring + turn.stage * self.stage_bytes
                b = stage + self.block_bytes + consumer * 2 * self.box_bytes
                under_way.append(self.start_products(stage, b, half > 0))
                used.append(self.empty[turn.stage])
                turn.next()
            yield from self.wait_products(PENDING[2], under_way, part)
            for one in used:
                yield from self.release(one)
            tile += part

    def start_products(self, stage: int, b: int, add: bool) -> list[Multiplication]:
        first, steps, issued = A_STEPS, K_MAJOR_STEPS if self.k_major else B_STEPS, []
        if self.element.size == 1:
            first, steps = FP8_A_STEPS, FP8_B_STEPS
        for k in range(self.row_bytes // 32):
            left = descriptor(stage + k * first[0], *first[1:], self.row_bytes)
            right = descriptor(b + k * steps[0], *steps[1:], self.row_bytes)
            issued.append(Multiplication(left, right, add or k > 0, self.operands(left, right)))
        return issued

    def release(self, empty: Barrier) -> Iterator[None]:
        for _ in range(4):  # lane 0 of each warp
            empty.arrive()
            yield

    def wait_products(
        self, pending: int, under_way: list[list[Multiplication]], tile: np.ndarray
    ) -> Iterator[None]:
        """Until at most ``pending`` groups are under way; sums are changed only then."""
        yield
        while len(under_way) > pending:
            for one in under_way.pop(0):
                a, b = map(self.element.widen, self.operands(one.left, one.right))
                steady = all(map(np.array_equal, one.operands, self.operands(one.left, one.right)))
                with np.errstate(invalid="ignore"):
                    product = a @ b if steady else np.float32(np.nan)
                    tile[:] = tile + product if one.add else product

    def operands(self, left: int, right: int) -> tuple[np.ndarray, np.ndarray]:
        """64 x 16 and 16 x 128 (FP8: 32, TF32: 8), found by their descriptors: raw bits."""
        item = self.element.size
        k = np.arange(32 // item)
        a = self.shared.read(Descriptor.of(left).k_major(np.arange(BLOCK)[:, None], k, item), item)
        if self.k_major:
            places = Descriptor.of(right).k_major(np.arange(128), k[:, None], item)
        else:
            places = Descriptor.of(right).mn_major(k[:, None], np.arange(128))
        return a, self.shared.read(places, item)

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

    def element_at(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        stride = self.p["c_stride"]
        return column * stride + row if self.p["store"] >= TRANSPOSED else row * stride + column

    def finish(
        self, consumer: int, item: Item, sums: np.ndarray, leaving: list[Leaving]
    ) -> Iterator[None]:
        """``sums`` [128 threads, 64]."""
        first_column = item.first_column + consumer * 128
        position = item.block_row * BLOCK + THREAD // 32 * 16 + THREAD % 32 // 4
        if self.spoilt is not None:
            with np.errstate(invalid="ignore"):
                if (sums * np.float32(0) != 0).any():
                    self.spoilt.store(np.array(0), np.array([1]))
        if self.p["epilogue"]:
            self.apply_epilogue(position, first_column, sums)
        if self.p["store"] == BY_THREADS:
            self.store_rows(position, first_column, sums)
            return
        if self.p["store"] == TRANSPOSED_BY_THREADS:
            self.store_columns(position, first_column, sums)
            return
        if self.p["store"] == TRANSPOSED:
            yield from leaving[0].wait_read()
            stored = self.stored + consumer * 4 * WARP_STORE_BYTES
            self.store_transposed(stored, item.block_row, first_column, sums, leaving[0])
            return
        for warp in range(4):
            mine = sums[warp * WARP : (warp + 1) * WARP]
            stored = self.stored + (consumer * 4 + warp) * WARP_STORE_BYTES
            first_position = item.block_row * BLOCK + warp * 16
            yield from leaving[warp].wait_read()
            self.store_bulk(stored, first_position, first_column, mine, leaving[warp])
            yield

    def apply_epilogue(self, position: np.ndarray, first_column: int, sums: np.ndarray) -> None:
        for half in range(2):
            row = self.row_of(position + 8 * half)
            scale = self.scale_of(row)
            for j in range(16):
                for e in range(2):
                    column = first_column + j * 8 + Q * 2 + e
                    x = sums[:, j * 4 + half * 2 + e] * scale
                    here = (column < self.p["n"]) & (row >= 0)
                    if self.p["beta"] != 0.0:
                        old = self.output.widen(
                            self.c.load(self.element_at(row, column)[here])[:, 0]
                        )
                        x[here] += np.float32(self.p["beta"]) * old
                    if self.bias is not None:
                        x[here] += self.bias.load(column[here])[:, 0]
                    if self.row_bias is not None:
                        x[here] += self.row_bias.load(row[here])[:, 0]
                    if self.p["relu"]:
                        x = np.where(x < 0, np.float32(0), x)
                    sums[:, j * 4 + half * 2 + e] = x

    def narrow_pair(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return self.output.narrow(low).astype(U32) | self.output.narrow(high).astype(U32) << U32(16)

    def store_bulk(
        self, stored: int, first_position: int, first_column: int, sums: np.ndarray, who: Leaving
    ) -> None:
        """``sums`` [32 lanes, 64]."""
        lane = np.arange(WARP)
        address = stored + lane % 16 * 128 + ((lane // 16) ^ (lane % 8)) * 16
        for pair in range(8):
            word = np.empty((WARP, 4), dtype=U32)
            for i in range(4):
                at = pair * 8 + i * 2
                word[:, i] = self.narrow_pair(sums[:, at], sums[:, at + 1])
            to = (address ^ (pair % 4 * 32)) + pair // 4 * STORE_BOX_BYTES
            self.shared.store_matrices(to, word)
        self.shared.fence(stored, WARP_STORE_BYTES)
        if first_position < self.p["rows"]:
            for j in range(2):
                column, box = first_column + j * 64, stored + j * STORE_BOX_BYTES
                if column < self.p["n"]:
                    self.shared.store_box(
                        self.maps_of["stored"], column, first_position, box, self.c, who
                    )

    def store_transposed(
        self, stored: int, block_row: int, first_column: int, sums: np.ndarray, who: Leaving
    ) -> None:
        """``sums`` [128 threads, 64]."""
        lane = np.arange(WARP)
        column = lane % 8 + lane // 16 * 8
        for warp in range(4):
            mine = sums[warp * WARP : (warp + 1) * WARP]
            chunk = warp * 2 + lane // 8 % 2
            address = stored + column * 128 + (chunk ^ (lane % 8)) * 16
            for sixteen in range(8):
                word = np.empty((WARP, 4), dtype=U32)
                for i in range(4):
                    at = sixteen * 8 + i * 2
                    word[:, i] = self.narrow_pair(mine[:, at], mine[:, at + 1])
                self.shared.store_matrices(address + sixteen * 16 * 128, transposed(word))
        self.shared.fence(stored, 4 * WARP_STORE_BYTES)
        if first_column < self.p["n"]:
            self.shared.store_box(
                self.maps_of["stored"], block_row * BLOCK, first_column, stored, self.c, who
            )

    def store_rows(self, position: np.ndarray, first_column: int, sums: np.ndarray) -> None:
        for half in range(2):
            row = self.row_of(position + 8 * half)
            c = row * self.p["c_stride"]
            for group in range(4):
                at = [(group * 4 + i) * 4 + half * 2 for i in range(4)]
                if self.output.size == 2:
                    pairs = [self.narrow_pair(sums[:, i], sums[:, i + 1]) for i in at]
                    word = transpose(np.stack(pairs, axis=1))
                    column = first_column + (group * 4 + Q) * 8
                    here = (row >= 0) & (column < self.p["n"])
                    self.c.store((c + column)[here], word[here].view(np.uint16))
                    continue
                for i in range(4):
                    column = first_column + (group * 4 + i) * 8 + Q * 2
                    here = (row >= 0) & (column < self.p["n"])
                    pair = self.output.narrow(sums[here, at[i] : at[i] + 2])
                    self.c.store((c + column)[here], pair)

    def store_columns(self, position: np.ndarray, first_column: int, sums: np.ndarray) -> None:
        for half in range(2):
            row = self.row_of(position + 8 * half)
            for i in range(32):
                column = first_column + i // 2 * 8 + Q * 2 + i % 2
                here = (row >= 0) & (column < self.p["n"])
                found = self.output.narrow(sums[here, i // 2 * 4 + half * 2 + i % 2])
                self.c.store((column * self.p["c_stride"] + row)[here], found[:, None])


def transposed(word: np.ndarray) -> np.ndarray:
    """``.trans`` of stmatrix: each of the four 8 x 8 matrices of ``word`` [32 lanes, 4] turned."""
    halves = word[..., None].view(np.uint16)  # lane, matrix, element of the pair
    matrices = halves.reshape(8, 4, 4, 2).transpose(2, 0, 1, 3).reshape(4, 8, 8)
    turned = matrices.transpose(0, 2, 1).reshape(4, 8, 4, 2).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(turned).reshape(WARP, 4, 2).view(U32)[..., 0]


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
    from tests.kernels.replay_bcsr_cluster import ClusterProduct
    from tests.kernels.replay_bcsr_steps import StepProduct

    def replay_spmm(machine, config, params, grid) -> None:
        kind: Any = Product if config["kStep"] >= SPECIALISED else StepProduct
        if "CLUSTERED" in config:
            kind = ClusterProduct
        kind(machine, maps, config, params).run(grid)

    return {"spmm_bcsr": replay_spmm, "tf32_operand": replay_operand}
