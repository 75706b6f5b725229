"""``spmm_bittcf.cu`` in NumPy: the same index arithmetic, lane by lane.

Functions and names are those of the device code. Arrays are [items, 32 lanes]: the warps of one
slab and batch run together, except that the pieces of cut windows arrive at their tree in random
order, one after the other. Rows of B pass through the ring of ``replay_ring.py``, which checks that
no byte is read too early or overwritten too early; products are those of ``replay_mma.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sparsetile.systems import acc_runner, bound
from tests.kernels.replay import ELEMENTS, Array, Machine
from tests.kernels.replay_mma import LANE, LANES, U32, G, T, byte_perm, mma, popc, round_tf32
from tests.kernels.replay_ring import CHUNK, Ring, assert_no_conflicts


class TileMachine(Machine):
    """A machine on which the runner of the acc system works."""

    def install(
        self, monkeypatch: pytest.MonkeyPatch, processors: int = 132, l2: int = 50 * 2**20
    ) -> None:
        super().install(monkeypatch, processors, l2)
        stand_ins = {
            "scratch": self.scratch,
            "enter": lambda device: None,
            "current_device": lambda: None,
            "current_stream_handle": lambda device: 0,
            "on_device": lambda device: contextlib.nullcontext(),
        }
        for module in (acc_runner, bound):
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)


@dataclass
class Head:
    bits: np.ndarray  # [items, 32, 2]
    offset: np.ndarray  # [items, 32]


class Windows:
    """The windows of each item that are still to be stored; arrays [items]."""

    def __init__(self, product: Product, item: np.ndarray) -> None:
        self.product = product
        self.window = item[:, 0].copy()
        self.left = np.where(item[:, 3] < 0, -item[:, 3], 0)
        self.stop, self.later = np.full(len(item), -1), np.full(len(item), -1)
        for i in range(len(item)):
            if self.left[i] > 0:
                self.stop[i] = product.offset_of(self.window[i] + 1)
            if self.left[i] > 1:
                self.later[i] = product.offset_of(self.window[i] + 2)
        self.spoilt = [0] * len(item)

    def close(self, i: int, tile: int, tally: np.ndarray) -> None:
        while self.left[i] > 0 and self.stop[i] == tile:
            stored = self.product.store_window(int(self.window[i]), tally[i])
            self.spoilt[i] = (self.spoilt[i] << 1 | (not stored)) & 0xFFFFFFFF
            tally[i] = 0
            self.window[i] += 1
            self.left[i] -= 1
            self.stop[i] = self.later[i]
            if self.left[i] > 1:
                self.later[i] = self.product.offset_of(self.window[i] + 2)

    def repair(self, i: int) -> None:
        rest = self.spoilt[i]
        while rest:
            lowest = (rest & -rest).bit_length()  # __ffs
            self.product.exact(int(self.window[i]) - lowest)
            rest &= rest - 1


class Product:
    """One launch of spmm_bittcf: its configuration, parameters and memory."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.config, self.p = config, params
        self.span, self.pieces, self.vec = (config[k] for k in ("kSpan", "kPieces", "kVec"))
        self.weighted = config["kWeighted"]
        element, output = ELEMENTS[config["ELEMENT"]], ELEMENTS[config["OUTPUT"]]
        self.element = np.dtype(element)
        self.halves = self.element.itemsize == 2
        self.piece_cols = 8 * self.span
        self.cols = self.pieces * self.piece_cols
        self.pairs = self.span // 2
        self.stages = config["kStages"]
        self.row_bytes = self.cols * self.element.itemsize
        self.side = self.row_bytes // 16 if self.row_bytes < 128 else 8
        self.load_rows_at_once = 32 // self.side
        self.heights = 8 // self.load_rows_at_once
        self.segments = self.row_bytes // (16 * self.side)
        self.row_stride = self.row_bytes + 16
        self.stage_bytes = 8 * self.row_stride
        self.ring_bytes = self.stages * self.stage_bytes
        self.words = self.span * self.element.itemsize // 4
        self.unsigned = np.uint16 if self.halves else U32
        array = machine.array
        self.items = array(params["items"], np.int32, 4)
        self.parent_of_slot = (
            array(params["parent_of_slot"], np.int32) if params["slot_count"] else None
        )
        self.nodes = array(params["nodes"], np.int32, 4) if params["node_count"] else None
        self.arrivals = array(params["arrivals"], np.int32)
        self.partials = array(params["partials"], np.float32)
        self.b, self.c = array(params["b"], self.unsigned), array(params["c"], output)
        self.row_window_offset = array(params["row_window_offset"], np.int32)
        self.tc_offset = array(params["tc_offset"], np.int32)
        self.sparse_a_to_b = array(params["sparse_a_to_b"], np.int32)
        self.tc_local_bit = array(params["tc_local_bit"], np.uint64)
        self.half_bits = array(params["tc_local_bit"], U32)
        self.values = array(params["values"], self.unsigned)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.b_row = params["b_row_bytes"] // self.element.itemsize
        machine.written[params["c"]] = self.c
        self.random = np.random.default_rng(7)
        self.recomputed = 0

    def inside(self, offset: int) -> np.ndarray:
        return offset < self.left

    def run(self, grid: tuple[int, int, int]) -> None:
        warps = grid[0] * (self.config["kThreads"] // 32)
        index = np.arange(warps)
        index = index[index < self.p["item_count"]]
        item = self.items.data[index].astype(np.int64)
        for self.z in range(grid[2]):
            for self.y in range(grid[1]):
                self.layer = self.z * grid[1] + self.y
                self.column = self.y * self.cols + G * self.span
                self.left = self.p["n"] - self.column
                self.base = self.z * self.p["b_batch_stride"] + self.column
                self.warps(item)

    def warps(self, item: np.ndarray) -> None:
        tally = np.zeros((len(item), self.pieces, self.pairs, LANES, 4), dtype=np.float32)
        windows = Windows(self, item)
        if self.stages == 0:
            self.walk(item, windows, tally)
        else:
            self.stream(item, windows, tally, whole=(self.y + 1) * self.cols <= self.p["n"])
        assert not windows.left.any(), "every window of a run is stored"
        cut = item[:, 3] >= 0
        for warp in self.random.permutation(np.nonzero(cut)[0]).tolist():
            if self.climb(int(item[warp, 3]), tally[warp]):
                stored = self.store_window(int(windows.window[warp]), tally[warp])
                windows.window[warp] += 1
                windows.spoilt[warp] = int(not stored)
                windows.repair(warp)
        for warp in np.nonzero(~cut)[0].tolist():
            windows.repair(warp)

    def offset_of(self, window: int) -> int:
        return int(self.row_window_offset.load(np.array(window))[0])

    def store_window(self, window: int, tally: np.ndarray) -> bool:
        """``tally`` [kPieces, kPairs, 32, 4]; False, and C as it was, if it is not finite."""
        with np.errstate(invalid="ignore"):
            if (tally * np.float32(0) != 0).any():
                return False
        for r in range(2):
            row = self.row_of(window, 2 * T + r)
            for j in range(self.pieces):
                sums = np.empty((LANES, self.span), dtype=np.float32)
                for v in range(self.span):
                    sums[:, v] = tally[j, v // 2, :, (v & 1) * 2 + r]
                self.finish(row, j, sums)
        return True

    # -- the loop over tiles

    def load_head(self, tile: np.ndarray) -> Head:
        at = np.repeat(tile[:, None], LANES, axis=1)
        bits = np.zeros((*at.shape, 2), dtype=U32)
        offset = np.zeros(at.shape, dtype=np.int64)
        if self.weighted:
            bits[:] = self.half_bits.load(at * 2, 2)
            offset[:] = self.tc_offset.load(at)[..., 0]
        else:
            bits[..., 0] = self.half_bits.load(at * 2 + G // 4)[..., 0]
        return Head(bits, offset)

    def load_weights(self, head: Head) -> np.ndarray:
        """[words, items, 32]."""
        shift = ((G & 3) * 8 + T * 2).astype(U32)
        half = head.bits[..., 0]
        if self.weighted:
            half = np.where(G < 4, half, head.bits[..., 1])
        pair = half >> shift
        first, second = np.zeros(half.shape, dtype=U32), np.zeros(half.shape, dtype=U32)
        has_first, has_second = (pair & 1).astype(bool), (pair & 2).astype(bool)
        if self.weighted:
            below = popc(half & ~(U32(0xFFFFFFFF) << shift))
            at = head.offset + np.where(G < 4, 0, popc(head.bits[..., 0])) + below
            first[has_first] = self.values.load(at[has_first])[..., 0]
            at = at + has_first
            second[has_second] = self.values.load(at[has_second])[..., 0]
        else:
            one = np.float16(1).view(np.uint16) if self.halves else np.float32(1).view(U32)
            first[has_first], second[has_second] = one, one
        return np.stack([first | second << U32(16)] if self.halves else [first, second])

    def multiply(self, rows: list[np.ndarray], weights: np.ndarray, sums: np.ndarray) -> None:
        """Two rows of B [items, 32, kWords] of one piece, sums [items, kPairs, 32, 4] in place."""
        for q in range(self.pairs):
            if self.halves:
                a = [byte_perm(rows[0][..., q], rows[1][..., q], s) for s in (0x5410, 0x7632)]
            else:
                a = [round_tf32(rows[k][..., 2 * q + m]) for k in range(2) for m in range(2)]
            mma(sums[:, q], a, list(weights), self.halves)

    def closing(self, windows: Windows, tile: np.ndarray, end: np.ndarray, tally, alive) -> Any:
        """Store what ends at each item's tile; return the items that have tiles left."""
        for i in alive[tile[alive] == windows.stop[alive]].tolist():
            windows.close(i, int(tile[i]), tally)
        return alive[tile[alive] < end[alive]]

    # -- rows of B through the ring

    def load_rows(self, tile: np.ndarray) -> np.ndarray:
        """Rows of B that lanes copy: [items, 32, kHeights]."""
        row = np.arange(self.heights) * self.load_rows_at_once + (LANE // self.side)[:, None]
        return self.sparse_a_to_b.load(tile[:, None, None] * 8 + row)[..., 0].astype(np.int64)

    def copy_rows(self, ring: Ring, warp, rows: np.ndarray, stage: np.ndarray, whole: bool) -> None:
        place = LANE % self.side * 16
        to = stage[:, None] + LANE // self.side * self.row_stride + place
        size = self.element.itemsize
        slab = self.z * self.p["b_batch_stride"] + self.y * self.cols
        for h in range(self.heights):
            for j in range(self.segments):
                step = j * self.side * 16
                inside = whole | (self.y * self.cols + (place + step) // size < self.p["n"])
                start = slab + rows[..., h] * self.b_row + (place + step) // size
                # Copies of no bytes still name an address, the slab's first.
                start = np.where(inside, start, slab)
                data = np.ascontiguousarray(self.b.load(start, CHUNK // size)).view(np.uint8)
                data = np.where(np.broadcast_to(inside, start.shape)[..., None], data, 0)
                at = to + h * self.load_rows_at_once * self.row_stride + step
                if self.row_bytes >= 128:
                    assert_no_conflicts(at, CHUNK)
                ring.copy(warp, at, data)

    def stream(self, item: np.ndarray, windows: Windows, tally: np.ndarray, whole: bool) -> None:
        count, end = len(item), item[:, 2]
        last = np.maximum(end - 1, 0)
        ring = Ring(count, self.ring_bytes)
        rows = np.zeros((count, LANES, self.heights), dtype=np.int64)
        following, fill = item[:, 1].copy(), np.zeros(count, dtype=np.int64)

        def copy_next(warp: np.ndarray) -> None:
            more = warp[following[warp] < end[warp]]
            self.copy_rows(ring, more, rows[more], fill[more], whole)
            further = fill[more] + self.stage_bytes
            fill[more] = np.where(further < self.ring_bytes, further, 0)
            following[more] += 1
            rows[more] = self.load_rows(np.minimum(following[more], last[more]))
            ring.commit(warp)

        head = Head(
            np.zeros((count, LANES, 2), dtype=U32), np.zeros((count, LANES), dtype=np.int64)
        )
        weights = np.zeros((1 if self.halves else 2, count, LANES), dtype=U32)

        def take_head(warp: np.ndarray, tile: np.ndarray) -> None:
            new = self.load_head(tile)
            head.bits[warp], head.offset[warp] = new.bits, new.offset

        busy = np.nonzero(following < end)[0]
        if busy.size:
            rows[busy] = self.load_rows(following[busy])
            take_head(busy, following[busy])
            for _ in range(self.stages - 1):
                copy_next(busy)
            weights[:, busy] = self.load_weights(Head(head.bits[busy], head.offset[busy]))
            take_head(busy, np.minimum(item[busy, 1] + 1, last[busy]))
        read = 2 * T * self.row_stride + G * self.span * self.element.itemsize
        read = np.repeat(read[None], count, axis=0)
        wrap = read + self.ring_bytes
        tile, alive = item[:, 1].copy(), np.arange(count)
        while (alive := self.closing(windows, tile, end, tally, alive)).size:
            ring.sync(alive)
            copy_next(alive)
            later = self.load_weights(Head(head.bits[alive], head.offset[alive]))
            take_head(alive, np.minimum(tile[alive] + 2, last[alive]))
            ring.wait(alive, self.stages - 1)
            ring.sync(alive)
            for j in range(self.pieces):
                pair = []
                for r in range(2):
                    at = read[alive] + r * self.row_stride
                    at = at + j * self.piece_cols * self.element.itemsize
                    pair.append(ring.read(alive, at, 4 * self.words).view(U32))
                sums = tally[alive, j]
                self.multiply(pair, weights[:, alive], sums)
                tally[alive, j] = sums
            read[alive] += self.stage_bytes
            read = np.where(read >= wrap, read - self.ring_bytes, read)
            weights[:, alive] = later
            tile[alive] += 1
        ring.end()

    # -- rows of B straight to registers

    def load_row(self, row: np.ndarray, offset: int) -> np.ndarray:
        """Rows [items, 32] of B as words [items, 32, kWords]; zeros past the last column."""
        loaded = np.zeros((*row.shape, self.span), dtype=self.unsigned)
        for v in range(0, self.span, self.vec):
            here = np.broadcast_to(self.inside(offset + v), row.shape)
            place = self.base + row * self.b_row + offset + v
            loaded[here, v : v + self.vec] = self.b.load(place[here], self.vec)
        return loaded.view(U32)

    def walk(self, item: np.ndarray, windows: Windows, tally: np.ndarray) -> None:
        tile, alive = item[:, 1].copy(), np.arange(len(item))
        while (alive := self.closing(windows, tile, item[:, 2], tally, alive)).size:
            weights = self.load_weights(self.load_head(tile[alive]))
            id = self.sparse_a_to_b.load((tile[alive, None] * 4 + T) * 2, 2).astype(np.int64)
            for j in range(self.pieces):
                pair = [self.load_row(id[..., k], j * self.piece_cols) for k in range(2)]
                sums = tally[alive, j]
                self.multiply(pair, weights, sums)
                tally[alive, j] = sums
            tile[alive] += 1

    # -- what follows

    def climb(self, slot: int, tally: np.ndarray) -> bool:
        """``tally`` [kPieces, kPairs, 32, 4], in place."""
        words = self.pieces * self.pairs  # of 16 bytes a lane
        slots = self.layer * self.p["slot_count"]
        counters = self.layer * self.p["node_count"]

        def place(s: int) -> np.ndarray:
            return (slots + s) * LANES * words * 4 + (np.arange(words)[:, None] * LANES + LANE) * 4

        while True:
            self.partials.store(place(slot), tally.reshape(words, LANES, 4))
            node = int(self.parent_of_slot.load(np.array(slot))[0])
            first, children, own, _ = self.nodes.data[node].tolist()
            counter = int(self.arrivals.load(np.array(counters + node))[0])
            last = counter == children - 1
            self.arrivals.data[counters + node] = 0 if last else counter + 1
            if not last:
                return False
            for child in range(children):
                other = self.partials.load(place(first + child), 4).reshape(tally.shape)
                tally[:] = other if child == 0 else tally + other
            if own < 0:
                return True
            slot = own

    def row_of(self, window: int, r: np.ndarray) -> np.ndarray:
        position = window * 8 + r
        here = position < self.p["rows"]
        rows = np.where(here, position, -1)
        if self.order is not None:
            rows[here] = self.order.load(position[here])[:, 0]
        return rows

    def exact(self, window: int) -> None:
        self.recomputed += 1
        begin, end = self.row_window_offset.load(np.array([window, window + 1]))[:, 0].tolist()
        for r in range(2):
            row = self.row_of(window, 2 * T + r)
            for j in range(self.pieces):
                sums = np.zeros((LANES, self.span), dtype=np.float32)
                for tile in range(begin, end):
                    bits = int(self.tc_local_bit.load(np.array(tile))[0])
                    for column in range(8):
                        for lane in np.nonzero(row >= 0)[0].tolist():
                            bit = int(2 * T[lane] + r) * 8 + column
                            if bits >> bit & 1:
                                k = int(self.sparse_a_to_b.load(np.array(tile * 8 + column))[0])
                                self.add_entry(tile, bits, bit, k, lane, j, sums)
                self.finish(row, j, sums)

    def add_entry(self, tile, bits, bit, k, lane, j, sums) -> None:
        weight = np.float32(1)
        if self.weighted:
            at = int(self.tc_offset.load(np.array(tile))[0]) + (bits & (1 << bit) - 1).bit_count()
            weight = self.values.load(np.array(at)).view(self.element).astype(np.float32)[0]
        for v in range(self.span):
            offset = j * self.piece_cols + v
            if self.inside(offset)[lane]:
                raw = self.b.load(np.array(self.base[lane] + k * self.b_row + offset))
                x = raw if self.halves else round_tf32(raw)
                with np.errstate(invalid="ignore"):
                    sums[lane, v] += weight * x.view(self.element).astype(np.float32)[0]

    def finish(self, row: np.ndarray, j: int, sums: np.ndarray) -> None:
        offset = j * self.piece_cols
        at = self.z * self.p["c_batch_stride"] + self.column + offset + row * self.p["c_row_stride"]
        if self.p["epilogue"]:
            scale = np.full(LANES, self.p["alpha"], dtype=np.float32)
            if self.p["mean"]:
                here = row >= 0
                entries = np.ones(LANES, dtype=np.int64)
                entries[here] = (
                    self.indptr.load(row[here] + 1)[:, 0] - self.indptr.load(row[here])[:, 0]
                )
                scale = np.where(entries > 0, scale / np.maximum(entries, 1), scale)
            sums = (sums * scale[:, None]).astype(np.float32)
            for v in range(self.span):
                here = (row >= 0) & self.inside(offset + v)
                if self.p["beta"] != 0.0:
                    old = self.c.data[at[here] + v].astype(np.float32)
                    sums[here, v] += np.float32(self.p["beta"]) * old
                if self.bias is not None:
                    sums[here, v] += self.bias.load(self.column[here] + offset + v)[:, 0]
            if self.p["relu"]:
                sums = np.where(sums < 0, np.float32(0), sums)
        part = min(self.vec, 16 // self.c.data.itemsize)
        for v in range(0, self.span, part):
            here = (row >= 0) & self.inside(offset + v)
            self.c.store(at[here] + v, sums[here, v : v + part])


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    product = Product(machine, config, params)
    product.run(grid)
    machine.recomputed = product.recomputed  # type: ignore[attr-defined]


REPLAYS = {"spmm_bittcf": replay_spmm}

__all__ = ["REPLAYS", "Array", "TileMachine"]
