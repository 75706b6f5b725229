"""``spmm_wcsr.cu`` in NumPy: the same index arithmetic, the same waits, warp by warp.

Functions and names are those of the device code. The warps of a block run in random turns, copies
of A's tiles land at random times, blocks of threads come in random order: what is read too early,
or overwritten too early, is NaN or a complaint. Products read B from their start until they are
waited for, and must find it where its descriptor says. Numbers that the code spells out are read
from its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sparsetile.jit.source import DEVICE_TREE
from tests.kernels.replay import Array, Machine
from tests.kernels.replay_bcsr import Turn
from tests.kernels.replay_mma import LANE, TRAITS, U32, G, T, popc, round_tf32
from tests.kernels.replay_ring import assert_no_conflicts
from tests.kernels.replay_tile import decode
from tests.kernels.replay_tree import Tree
from tests.kernels.replay_wgmma import RUBBISH, Barrier, Descriptor, descriptor

TEXT = (DEVICE_TREE / "spmm_wcsr.cu").read_text()
WARP = 32
# Share of the warps that are far slower than others, and how often one of them takes its turn.
SLOW_WARPS, SLOW_TURNS = 0.15, 0.03
TF32_BITS = U32(0xFFFFE000)  # that the Tensor Cores look at


def constant(name: str) -> int:
    """A number that the code spells out."""
    return int(re.search(rf"constexpr int {name} = (\d+);", TEXT).group(1))


HEIGHT, PRODUCERS, GROUPS = (constant(name) for name in ("kHeight", "kProducers", "kGroups"))
AHEAD = constant("kAhead")
WARPS = HEIGHT // 16
CONSUMERS = WARPS * 32
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


def staged(column: np.ndarray) -> np.ndarray:
    return column % 2 * 4 + column // 2


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


class TileCopies:
    """Copies the steps of the block's items, one after the other."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.place, self.items = block.share
        self.first = self.end = self.used = 0
        self.begins = np.zeros(WARP, dtype=np.int64)
        self.turn = Turn(block.p.tile_stages)

    def next(self) -> Iterator[None]:
        block, p = self.block, self.block.p
        while self.first >= self.end:
            if self.place >= self.items:
                return
            _, self.first, self.end, _ = p.item(self.place)
            self.place += 1
            self.used = 31
        value = stop = 0
        if p.weighted:
            if self.used == 31:
                tile = np.minimum(self.first + LANE * p.step_tiles, self.end)
                self.begins = p.strips.load(tile * WARPS)[:, 0].astype(np.int64)
                self.used = 0
            value, stop = self.begins[self.used : self.used + 2].tolist()
            self.used += 1
        yield from block.tiles_empty[self.turn.stage].wait(self.turn.parity ^ 1)
        to = block.tiles + self.turn.stage * p.tile_bytes
        full, copy = block.tiles_full[self.turn.stage], block.shared.copy_bytes
        each = 16 // p.size
        aligned = value // each * each
        size = (stop - aligned + each - 1) // each * 16
        expected = p.id_bytes + p.bit_bytes
        if p.weighted:
            expected += p.offset_bytes + size
        full.expect(expected)
        copy(to, p.columns_raw, self.first * 32, p.id_bytes, full)
        copy(to + p.bits_at, p.bitmaps_raw, self.first * HEIGHT, p.bit_bytes, full)
        if p.weighted:
            copy(to + p.offsets_at, p.strips_raw, self.first * WARPS * 4, p.offset_bytes, full)
            if size:
                assert p.values_at + size <= p.tile_bytes, "more values than a step holds"
                copy(to + p.values_at, p.values_raw, aligned * p.size, size, full)
        yield
        self.first += p.step_tiles
        self.turn.next()


class Steps:
    """The steps of a block's items that one group of producers takes."""

    def __init__(self, block: Block, group: int) -> None:
        self.p = block.p
        self.place, self.end = block.share
        self.first = self.stop = 0
        self.turn, self.tiles = Turn(self.p.stages), Turn(self.p.tile_stages)
        if self.place < self.end:
            self.open()
        self.settle()
        for _ in range(group):
            self.next()

    def open(self) -> None:
        _, self.first, self.stop, _ = self.p.item(self.place)

    def settle(self) -> None:
        while self.first >= self.stop and self.place < self.end:
            self.place += 1
            if self.place < self.end:
                self.open()

    def more(self) -> bool:
        return self.place < self.end

    def next(self) -> None:
        self.first += self.p.step_tiles
        self.turn.next()
        self.tiles.next()
        self.settle()


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
        tiles = TileCopies(self)

        def copy_ahead(steps: int) -> Iterator[None]:
            if warp == WARPS:
                for _ in range(steps):
                    yield from tiles.next()

        yield from copy_ahead(AHEAD)
        at = Steps(self, (warp - WARPS) * WARP // PRODUCERS)
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
        while at.more():
            stage = self.stages + at.turn.stage * p.stage_bytes
            full = self.full[at.turn.stage]
            yield from self.empty[at.turn.stage].wait(at.turn.parity ^ 1)
            stored = self.store_rows(warp, low, stage, 0)
            yield from copy_ahead(GROUPS)
            for _ in range(GROUPS):
                at.next()
            yield from wait_for_ids()
            low = self.load_rows(warp, ids(), at.more(), 0)
            yield
            stored += self.store_rows(warp, high, stage, 1)
            self.shared.fence(np.stack(stored))
            full.arrive()
            yield
            high = self.load_rows(warp, ids(), at.more(), 1)
            ids_are_read()

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
            if slot >= 0:
                found = p.tree_of(self, warp).climb_sums(slot, sums)
                if found is None:
                    continue
                sums = found
            if not p.store_window(self, warp, window, sums):
                p.exact(self, warp, window)


class Product:
    """One launch: its configuration, parameters and memory."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.p = params
        self.element, self.output = TRAITS[config["ELEMENT"]], TRAITS[config["OUTPUT"]]
        self.cols, self.step_tiles = config["kCols"], config["kStepTiles"]
        self.stages, self.tile_stages = config["kStages"], config["kTileStages"]
        self.weighted, self.shared_bytes = config["kWeighted"], machine.shared_bytes
        assert config["kThreads"] == CONSUMERS + GROUPS * PRODUCERS
        assert self.tile_stages >= AHEAD + 2 * GROUPS
        size = self.size = self.element.size
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
        self.columns = array(params["columns"], np.int32)
        self.columns_raw = array(params["columns"], np.uint8)
        self.bitmaps = array(params["bitmaps"], np.uint64)
        self.bitmaps_raw = array(params["bitmaps"], np.uint8)
        self.strips = array(params["strip_value_ptr"], np.int32)
        self.strips_raw = array(params["strip_value_ptr"], np.uint8)
        self.values = array(params["values"], self.element.storage)
        self.values_raw = array(params["values"], np.uint8)
        self.window_row_ptr = array(params["window_row_ptr"], np.int32)
        self.b = array(params["b"], self.element.storage)
        self.c = array(params["c"], self.output.storage)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.parents = array(params["parent_of_slot"], np.int32) if params["slot_count"] else None
        self.nodes = array(params["nodes"], np.int32, 4) if params["node_count"] else None
        self.arrivals = array(params["arrivals"], np.int32)
        self.partials = array(params["partials"], np.uint8)
        self.n = params["n"]
        self.b_row = params["b_row_bytes"] // size
        self.random = np.random.default_rng(machine.seed)
        self.recomputed = 0

    def run(self, grid: tuple[int, int, int]) -> None:
        self.slabs = grid[1]
        blocks = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        for block in self.random.permutation(len(blocks)).tolist():
            Block(self, *blocks[block]).run()
        self.check_writes(grid[2])

    def check_writes(self, batches: int) -> None:
        """Each element of C once; of a row past its end only what fills a lane's access."""
        step = 16 // self.output.size
        row = np.arange(self.p["rows"])[:, None] * self.p["c_row_stride"]
        batch = np.arange(batches)[:, None, None] * self.p["c_batch_stride"]
        most = np.zeros_like(self.c.writes)
        most[batch + row + np.arange(-(-self.n // step) * step)] = 1
        assert (self.c.writes <= most).all(), "written beside C, or twice"
        assert (self.c.writes[batch + row + np.arange(self.n)] == 1).all(), "not all is written"

    def item(self, place: int) -> list[int]:
        assert place < self.p["item_count"]
        return self.items.load(np.array(4 * place), 4).tolist()

    def widen(self, raw: np.ndarray) -> np.ndarray:
        """An operand as the Tensor Cores see it."""
        return self.element.widen(raw & TF32_BITS if self.size == 4 else raw)

    def tree_of(self, block: Block, warp: int) -> Tree:
        layer = (block.z * self.slabs + block.y) * WARPS + warp
        return Tree(
            self.parents, self.nodes, self.arrivals, self.partials,
            first_counter=layer * self.p["node_count"], first_slot=layer * self.p["slot_count"],
            lanes=WARP, slot_bytes=self.cols // 2 * 4,
        )  # fmt: skip

    # -- C

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
        self, block: Block, row: np.ndarray, column: np.ndarray, x: np.ndarray, plain: bool
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

    def store_window(self, block: Block, warp: int, window: int, sums: np.ndarray) -> bool:
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

    def exact(self, block: Block, warp: int, window: int) -> None:
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


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    product = Product(machine, config, params)
    product.run(grid)
    machine.recomputed = product.recomputed


REPLAYS = {"spmm_wcsr": replay_spmm}
