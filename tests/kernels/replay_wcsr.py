"""``spmm_wcsr.cu`` in NumPy: the same index arithmetic, the same waits, warp by warp.

Functions and names are those of the device code. The warps of a block run in random turns, copies
of A's tiles land at random times, blocks of threads come in random order: what is read too early,
or overwritten too early, is NaN or a complaint. Products read B from their start until they are
waited for, and must find it where its descriptor says. Shared memory and the rings are in
``replay_wcsr_rings.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sparsetile.systems.wcsr import runner as wcsr_runner
from tests.kernels.replay import Machine
from tests.kernels.replay_bcsr import Turn
from tests.kernels.replay_mma import LANE, U32, G, T, round_tf32
from tests.kernels.replay_tile import decode
from tests.kernels.replay_wcsr_join import replay_join
from tests.kernels.replay_wcsr_rings import (
    CONSUMERS,
    COPIERS,
    GROUPS,
    HEIGHT,
    PRODUCERS,
    TEXT,
    WARP,
    WARPS,
    Shared,
    Steps,
    TileCopies,
)
from tests.kernels.replay_wcsr_stores import Launch, staged
from tests.kernels.replay_wgmma import Barrier, Descriptor, descriptor

# Share of the warps that are far slower than others, and how often one of them takes its turn.
SLOW_WARPS, SLOW_TURNS = 0.15, 0.03
TF32_BITS = U32(0xFFFFE000)  # that the Tensor Cores look at
OCTETS = PRODUCERS // 8


def fields_of(call: str) -> list[str]:
    """Start behind the stage, leading, stride of a descriptor, as the code has them."""
    found = re.search(rf"wg::{call}\(stage \+ (.+?), (.+?), (\w+)\)", TEXT)
    assert found is not None, f"no {call}"
    return list(found.groups())


def plain_descriptor(address: int, along_k: int, along_n: int) -> int:
    """``wg::plain_descriptor``."""
    return (address & 0x3FFFF) >> 4 | (along_k >> 4) << 16 | (along_n >> 4) << 32


def core_matrices(found: Descriptor, k: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Byte address of TF32's element (k, n) by the PTX ISA: K-major, no swizzle.

    ``((8, n), (T, 2)) : ((T, SBO), (1, LBO))``, T = 4 elements of four bytes.
    """
    assert found.swizzle == 0, "no swizzle"
    return found.start + n % 8 * 16 + n // 8 * found.stride + k % 4 * 4 + k // 4 * found.leading


def column_place(lane: np.ndarray) -> np.ndarray:
    """n, of eight, at which a lane of eight stores each of its four columns."""
    return lane % 4 * 2 + lane // 4


def swizzled(lane: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Chunk of 16 bytes at which a lane of eight stores its part of a row of 16 bits."""
    return lane ^ row % 8


def fragment_places(sums: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the 16 x 2 sums of a warp in each register of each lane."""
    register = np.arange(sums)
    row = G[:, None] + register // 2 % 2 * 8
    return row, (T * 2)[:, None] + register // 4 * 8 + register % 2


def first_copy(group: int, warp: int) -> int:
    """The first step whose part of A a producer warp of a group copies."""
    return warp * GROUPS + group


def first_step(group: int) -> int:
    """The first step whose rows of B a group of producers brings."""
    return group


def copying_turn(warp: int) -> int:
    """Number, of four, of the iterations after which a warp of a group copies again."""
    return warp


class Block:
    """One block of threads: its shared memory, rings and warps."""

    def __init__(self, p: Product, x: int, y: int, z: int) -> None:
        self.p, self.y, self.z = p, y, z
        self.share = p.firsts.load(np.array([x, x + 1]))[:, 0].tolist()
        base = 16 * int(p.random.integers(1, 200))  # where shared memory begins
        self.shared = Shared(base, p.shared_bytes)
        self.stages = base + (1024 - base % 1024) % 1024
        self.tiles = self.stages + p.stages * p.stage_bytes
        barriers = self.tiles + p.tile_stages * p.tile_bytes
        assert barriers % 8 == 0
        assert barriers + 16 * (p.stages + p.tile_stages) <= base + p.shared_bytes, "rings fit"
        self.full = [Barrier(PRODUCERS // 32) for _ in range(p.stages)]
        self.empty = [Barrier(WARPS) for _ in range(p.stages)]
        self.tiles_full = [Barrier(1) for _ in range(p.tile_stages)]
        self.tiles_empty = [Barrier(WARPS + PRODUCERS // 32) for _ in range(p.tile_stages)]
        self.whole = (y + 1) * p.cols <= p.n

    def run(self) -> None:
        warps = (CONSUMERS + GROUPS * PRODUCERS) // WARP
        running = [self.consumer(w) for w in range(WARPS)]
        running += [self.produce(w) for w in range(WARPS, warps)]
        random = self.p.random
        slow = {id(one) for one in running if random.random() < SLOW_WARPS}
        steps = sum(1 + self.steps_of(i) for i in range(*self.share))
        for _ in range(20000 * (steps + 1)):
            if not running:
                break
            coming = self.shared.coming
            which = int(random.integers(len(running) + len(coming)))
            if which < len(coming):
                coming.pop(which)()
                continue
            one = running[which - len(coming)]
            if id(one) in slow and random.random() > SLOW_TURNS:
                continue
            if next(one, "done") == "done":
                running.remove(one)
        assert not running and not self.shared.coming, "threads wait for ever"
        left = [*self.full, *self.empty, *self.tiles_full, *self.tiles_empty]
        assert all(one.pending == one.arrivals for one in left), "a warp went without arriving"

    def steps_of(self, place: int) -> int:
        _, first, end, _ = self.p.item(place)
        return -(-(end - first) // self.p.step_tiles)

    # -- rows of B

    def load_inside(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """16 bytes of each lane's row from the slab's column on, zeros outside: [32, 4] words."""
        p = self.p
        inside = np.full(WARP, True) if self.whole else self.y * p.cols + column < p.n
        at = self.z * p.p["b_batch_stride"] + self.y * p.cols + column + row * p.b_row
        octets = at.reshape(4, 8)
        assert (np.diff(octets) == 16 // p.size).all(), "eight lanes read 128 bytes side by side"
        found = np.zeros((WARP, 4), dtype=U32)
        if inside.any():
            loaded = np.ascontiguousarray(p.b.load(at[inside], 16 // p.size))
            found[inside] = loaded.view(U32)
        return found

    def load_rows(self, warp: int, ids: int, wanted: bool, half: int) -> np.ndarray:
        """``ids``: where they lie in shared memory. Words [kLoads, 32 lanes, 4]."""
        p = self.p
        thread = (warp - WARPS) % (PRODUCERS // WARP) * WARP + LANE
        octet = thread // 8
        words = np.empty((p.loads, WARP, 4), dtype=U32)
        if p.size == 4:
            column = octet // p.chunks * 32 + thread % 8 * 4 + half * p.loads // 4 * p.block_columns
            held = self.shared.read(ids + octet % p.chunks * 16, np.int32, 4).astype(np.int64)
            for r in range(4):
                row = held[:, r] if wanted else np.zeros(WARP, dtype=np.int64)
                for block in range(p.loads // 4):
                    further = block * p.block_columns
                    words[block * 4 + r] = self.load_inside(row, column + further)
            return words
        for i in range(p.loads):
            unit = octet + (half * p.loads + i) * OCTETS
            row, column = unit % p.step_rows, unit // p.step_rows * 64 + thread % 8 * 8
            held = self.shared.read(ids + (row // 8 * 8 + staged(row % 8)) * 4, np.int32)[:, 0]
            id = held.astype(np.int64) if wanted else np.zeros(WARP, dtype=np.int64)
            words[i] = self.load_inside(id, column)
        return words

    def store_rows(self, warp: int, words: np.ndarray, stage: int, half: int) -> list[np.ndarray]:
        """Returns where it stored."""
        p = self.p
        thread = (warp - WARPS) % (PRODUCERS // WARP) * WARP + LANE
        octet, lane = thread // 8, thread % 8
        stored = []
        if p.size == 4:
            to = stage + octet % p.chunks * (p.cols * 16) + octet // p.chunks * 512
            to = to + column_place(lane) * 16
            for block in range(p.loads // 4):
                rows = round_tf32(words[block * 4 : block * 4 + 4])  # [row, lane, column]
                at = to + (half * p.loads // 4 + block) * p.block_columns * 16
                for j in range(4):
                    self.shared.store(at + j * 128, rows[:, :, j].T)
                    stored.append(at + j * 128)
            return stored
        for i in range(p.loads):
            unit = octet + (half * p.loads + i) * OCTETS
            row, box = unit % p.step_rows, unit // p.step_rows
            at = stage + (box * p.step_rows + row) * 128 + swizzled(lane, row) * 16
            self.shared.store(at, words[i])
            stored.append(at)
        return stored

    def produce(self, warp: int) -> Iterator[None]:
        p = self.p
        group, number = divmod(warp - WARPS, PRODUCERS // WARP)
        tiles = TileCopies(self, first_copy(group, number))
        yield from tiles.next()
        at = Steps(self)
        at.skip(first_step(group))
        if not at.more():
            return

        def ids() -> int:
            return self.tiles + at.tiles.stage * p.tile_bytes

        def wait_for_ids() -> Iterator[None]:
            if at.more():
                yield from self.tiles_full[at.tiles.stage].wait(at.tiles.parity)

        def ids_are_read() -> None:
            if at.more():
                self.tiles_empty[at.tiles.stage].arrive()

        yield from wait_for_ids()
        low = self.load_rows(warp, ids(), at.more(), 0)
        yield
        high = self.load_rows(warp, ids(), at.more(), 1)
        ids_are_read()
        turn = 0
        while at.more():
            stage = self.stages + at.turn.stage * p.stage_bytes
            full = self.full[at.turn.stage]
            yield from self.empty[at.turn.stage].wait(at.turn.parity ^ 1)
            stored = self.store_rows(warp, low, stage, 0)
            at.skip(GROUPS)
            yield from wait_for_ids()
            low = self.load_rows(warp, ids(), at.more(), 0)
            yield
            stored += self.store_rows(warp, high, stage, 1)
            self.shared.fence(np.stack(stored))
            full.arrive()
            yield
            high = self.load_rows(warp, ids(), at.more(), 1)
            ids_are_read()
            if turn == copying_turn(number):
                yield from tiles.next()
            turn = turn + 1 if turn + 1 < COPIERS // GROUPS else 0

    # -- products

    def decode(self, warp: int, at: int, tiles: int) -> list[np.ndarray]:
        """Weights [stack, words, 32 lanes] of each tile of a step."""
        p = self.p
        weights = []
        aligned = 0
        if p.weighted:
            first = int(self.shared.read(np.array(at + p.offsets_at), np.int32)[0])
            aligned = first // (16 // p.size) * (16 // p.size)
        for i in range(p.step_tiles):
            strip = i * WARPS + warp
            bits = np.zeros(4, dtype=U32)
            if i < tiles:
                bits = self.shared.read(np.array(at + p.bits_at + strip * 16), U32, 4)
            before = 0
            if p.weighted:
                offset = self.shared.read(np.array(at + p.offsets_at + strip * 4), np.int32)
                before = int(offset[0]) - aligned

            def value(n: np.ndarray, here: np.ndarray, before: int = before) -> np.ndarray:
                from_ = p.values_at + (before + n[here]) * p.size
                assert (from_ + p.size <= p.tile_bytes).all(), "past the step's values"
                return self.shared.read(at + from_, p.element.storage)[:, 0]

            lanes = np.broadcast_to(bits.reshape(1, 1, 2, 2), (1, WARP, 2, 2))
            found, _ = decode(p.element, p.weighted, lanes, value)
            weights.append(found[:, :, 0])
        return weights

    def issue(self, stage: int, weights: list[np.ndarray]) -> list[tuple[np.ndarray, int]]:
        """Instructions of a step: the warp's rows of the left operand, B's descriptor."""
        p = self.p
        names = {"kCols": p.cols, "kStepRows": p.step_rows}
        call = "plain_descriptor" if p.size == 4 else "descriptor"
        make = plain_descriptor if p.size == 4 else descriptor
        issued = []
        for i in range(0, p.step_tiles, 1 if p.size == 4 else 2):
            start, leading, stride = (
                eval(field, {"__builtins__": {}}, {"i": i, **names}) for field in fields_of(call)
            )
            if p.size == 4:
                word = weights[i]
                a = [word[0][0], word[1][0], word[0][1], word[1][1]]
            else:
                a = [w[s][0] for w in weights[i : i + 2] for s in range(2)]
            issued.append((self.left(a), make(stage + start, leading, stride)))
        return issued

    def left(self, a: list[np.ndarray]) -> np.ndarray:
        """Sixteen rows of the left operand from a warp's registers, by the PTX ISA's fragments."""
        p = self.p
        found = np.zeros((16, p.k), dtype=np.float32)
        for i, register in enumerate(a):
            row = G + 8 * (i % 2)
            if p.size == 4:
                found[row, T + 4 * (i // 2)] = (register & TF32_BITS).view(np.float32)
            else:
                pair = np.ascontiguousarray(register).view(np.uint16).reshape(WARP, 2)
                for e in range(2):
                    found[row, 2 * T + e + 8 * (i // 2)] = p.element.widen(pair[:, e])
        return found

    def right(self, word: int) -> np.ndarray:
        """k x kCols of B, found by a descriptor: raw bits."""
        p, found = self.p, Descriptor.of(word)
        k, n = np.arange(p.k)[:, None], np.arange(p.cols)
        at = core_matrices(found, k, n) if p.size == 4 else found.mn_major(k, n)
        return self.shared.operand(at, p.element.storage)

    def take_tiles(self, warp: int, turn: Turn, tiles: int, into: list[np.ndarray]) -> Any:
        yield from self.tiles_full[turn.stage].wait(turn.parity)
        into[:] = self.decode(warp, self.tiles + turn.stage * self.p.tile_bytes, tiles)
        self.tiles_empty[turn.stage].arrive()
        turn.next()

    def consume(self, warp: int, at: tuple[Turn, Turn], begin: int, end: int, tile: Any) -> Any:
        """``tile`` [16, kCols], in place: sums of the warp's rows."""
        p, (turn, tiles) = self.p, at
        now: list[np.ndarray] = []
        yield from self.take_tiles(warp, tiles, end - begin, now)
        for first in range(begin, end, p.step_tiles):
            yield from self.full[turn.stage].wait(turn.parity)
            issued = self.issue(self.stages + turn.stage * p.stage_bytes, now)
            read = [self.right(word) for _, word in issued]
            following: list[np.ndarray] = []
            left = end - first - p.step_tiles
            yield
            if left > 0:
                yield from self.take_tiles(warp, tiles, left, following)
            yield
            for (a, word), before in zip(issued, read, strict=True):
                steady = np.array_equal(before, self.right(word))
                b = p.widen(before) if steady else np.float32(np.nan)
                with np.errstate(invalid="ignore"):
                    tile[:] = tile + (a @ b if steady else b)
            self.empty[turn.stage].arrive()
            turn.next()
            now = following

    def consumer(self, warp: int) -> Iterator[None]:
        p = self.p
        at = Turn(p.stages), Turn(p.tile_stages)
        for place in range(*self.share):
            window, first, end, slot = p.item(place)
            tile = np.zeros((16, p.cols), dtype=np.float32)
            if first < end:
                yield from self.consume(warp, at, first, end, tile)
            sums = tile[fragment_places(p.cols // 2)]
            yield
            column = self.y * p.cols
            if slot >= 0:
                p.store_partial(self, warp, slot, sums)
            elif not p.store_groups(self, warp, window, column, sums):
                p.exact(self, warp, window, column, column + p.cols)


class Product(Launch):
    """One launch: its configuration, parameters and memory."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        super().__init__(machine, config, params)
        self.step_tiles, self.shared_bytes = config["kStepTiles"], machine.shared_bytes
        self.stages, self.tile_stages = config["kStages"], config["kTileStages"]
        assert config["kThreads"] == CONSUMERS + GROUPS * PRODUCERS
        size = self.size
        self.k = 32 // size
        self.step_rows = 8 * self.step_tiles
        self.stage_bytes = self.step_rows * self.cols * size
        self.loads = self.stage_bytes // 32 // PRODUCERS
        self.chunks = 2 * self.step_tiles
        self.block_columns = OCTETS // self.chunks * 32
        self.id_bytes = self.bits_at = self.step_rows * 4
        self.bit_bytes = self.step_tiles * HEIGHT
        self.offsets_at = self.bits_at + self.bit_bytes
        self.offset_bytes = self.step_tiles * WARPS * 4 + 16
        self.values_at = self.offsets_at + self.offset_bytes
        self.tile_bytes = self.offsets_at
        if self.weighted:
            self.tile_bytes = self.values_at + self.step_rows * HEIGHT * size + 16
        array = machine.array
        self.items = array(params["items"], np.int32)
        self.firsts = array(params["items"] + 16 * params["item_count"], np.int32)
        self.columns_raw = array(params["columns"], np.uint8)
        self.bitmaps_raw = array(params["bitmaps"], np.uint8)
        self.strips_raw = array(params["strip_value_ptr"], np.uint8)
        self.values_raw = array(params["values"], np.uint8)

    def run(self, grid: tuple[int, int, int]) -> None:
        for block in self.in_random_order(grid):
            Block(self, *block).run()

    def partial_floats(self, grid: tuple[int, int, int]) -> int:
        """Of all slots of a launch."""
        return grid[1] * grid[2] * self.p["slot_count"] * HEIGHT * self.cols

    def store_partial(self, block: Block, warp: int, slot: int, sums: np.ndarray) -> None:
        """``sums`` [32 lanes, kSums] to their slot: words of four, lanes side by side."""
        to = self.partial_sums(block, slot, warp) + LANE * 4
        for w in range(self.cols // 2 // 4):
            self.partials.store(to + w * WARP * 4, sums[:, 4 * w : 4 * w + 4])

    def item(self, place: int) -> list[int]:
        assert place < self.p["item_count"]
        return self.items.load(np.array(4 * place), 4).tolist()

    def widen(self, raw: np.ndarray) -> np.ndarray:
        """An operand as the Tensor Cores see it."""
        return self.element.widen(raw & TF32_BITS if self.size == 4 else raw)


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    assert machine.to_join is None, "windows in pieces were never added up"
    product = Product(machine, config, params)
    product.run(grid)
    machine.recomputed += product.recomputed
    if not params["slot_count"]:
        product.check_writes(grid[2], product.c.writes)
        return
    used = product.partials.writes[: product.partial_floats(grid)]
    assert (used == 1).all(), "every slot is filled, once"
    assert not product.partials.writes[used.size :].any(), "past the last slot"
    machine.to_join = product


REPLAYS = {"spmm_wcsr": replay_spmm, "join_wcsr": replay_join}


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that replays the window kernels, and holds the copies that its runner makes."""
    made = Machine(REPLAYS)
    made.install(monkeypatch)
    pad = wcsr_runner.pad

    def held(matrix: Tensor, by: tuple[int, int]) -> Tensor:
        padded = pad(matrix, by)
        made.hold(padded)
        return padded

    monkeypatch.setattr(wcsr_runner, "pad", held)
    return made
