"""``spmm_bittcf.cu`` in NumPy: the same index arithmetic, lane by lane.

Functions and names are those of the device code. Arrays are [items, 32 lanes]: the warps of one
slab and batch run together, except that the pieces of cut windows arrive at their tree in random
order, one after the other. Rows of B and tiles of A pass through the ring of ``replay_ring.py``,
which checks that no byte is read too early or overwritten too early; tiles are decoded by
``replay_tile.py``, products are those of ``replay_mma.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.kernels.replay import Machine
from tests.kernels.replay_mma import LANE, LANES, TRAITS, U32, G, T, multiply, popc, round_tf32
from tests.kernels.replay_ring import CHUNK, Ring, assert_no_conflicts
from tests.kernels.replay_tile import TileStore, decode
from tests.kernels.replay_tree import Tree


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
        self.stack, self.stages = config["kStack"], config["kStages"]
        self.weighted = config["kWeighted"]
        self.element, self.output = TRAITS[config["ELEMENT"]], TRAITS[config["OUTPUT"]]
        self.size = self.element.size
        self.piece_cols = 8 * self.span
        self.cols = self.pieces * self.piece_cols
        self.pairs = self.span // 2
        self.row_bytes = self.cols * self.size
        self.side = self.row_bytes // 16 if self.row_bytes < 128 else 8
        self.load_rows_at_once = 32 // self.side
        self.heights = 8 // self.load_rows_at_once
        self.segments = self.row_bytes // (16 * self.side)
        self.row_stride = self.row_bytes + 16
        self.tile_at = 8 * self.row_stride
        self.store = TileStore(self.element, self.weighted, self.stack)
        self.stage_bytes = self.tile_at + self.store.bytes
        self.ring_bytes = self.stages * self.stage_bytes
        self.words = self.span * self.size // 4
        array = machine.array
        self.items = array(params["items"], np.int32, 4)
        self.parent_of_slot = (
            array(params["parent_of_slot"], np.int32) if params["slot_count"] else None
        )
        self.nodes = array(params["nodes"], np.int32, 4) if params["node_count"] else None
        self.arrivals = array(params["arrivals"], np.int32)
        self.partials = array(params["partials"], np.uint8)
        self.b = array(params["b"], self.element.storage)
        self.c = array(params["c"], self.output.storage)
        self.row_window_offset = array(params["row_window_offset"], np.int32)
        self.tc_offset = array(params["tc_offset"], np.int32)
        self.sparse_a_to_b = array(params["sparse_a_to_b"], np.int32)
        self.tc_local_bit = array(params["tc_local_bit"], np.uint64)
        self.half_bits = array(params["tc_local_bit"], U32)
        self.values = array(params["values"], self.element.storage)
        self.value_words = array(params["values"], U32)
        self.order = array(params["order"], np.int32)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], np.float32)
        self.b_row = params["b_row_bytes"] // self.size
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
        shape = (len(item), self.pieces * self.pairs, self.stack, LANES, 4)
        tally = np.zeros(shape, dtype=np.float32)
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
        """``tally`` [kPieces * kPairs, kStack, 32, 4]; False, and C as it was, if not finite."""
        with np.errstate(invalid="ignore"):
            if (tally * np.float32(0) != 0).any():
                return False
        for place in range(2 * self.stack):
            stack, r = divmod(place, 2)
            row = self.row_of(window, 8 * stack + 2 * T + r)
            for j in range(self.pieces):
                sums = np.empty((LANES, self.span), dtype=np.float32)
                for v in range(self.span):
                    sums[:, v] = tally[j * self.pairs + v // 2, stack, :, (v & 1) * 2 + r]
                self.finish(row, j, sums)
        return True

    # -- the loop over tiles

    def multiply(self, rows: list[np.ndarray], weights: np.ndarray, j: int, tally, warp) -> None:
        """Two rows of B [items, 32, kWords] of piece j, added to the items' sums."""
        for q in range(self.pairs):
            sums = tally[warp, j * self.pairs + q]
            multiply(self.element, rows, q, weights, sums)
            tally[warp, j * self.pairs + q] = sums

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
        size = self.size
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
                ring.copy(warp[:, None], at, data)

    def stream(self, item: np.ndarray, windows: Windows, tally: np.ndarray, whole: bool) -> None:
        count, end = len(item), item[:, 2]
        last = np.maximum(end - 1, 0)
        ring = Ring(count, self.ring_bytes)
        rows = np.zeros((count, LANES, self.heights), dtype=np.int64)
        following, fill = item[:, 1].copy(), np.zeros(count, dtype=np.int64)
        next_begin, next_end, begin, read = (np.zeros(count, dtype=np.int64) for _ in range(4))

        def offset(tile: np.ndarray) -> np.ndarray:
            return self.tc_offset.load(tile * self.stack)[..., 0].astype(np.int64)

        def copy_next(warp: np.ndarray) -> None:
            more = warp[following[warp] < end[warp]]
            self.copy_rows(ring, more, rows[more], fill[more], whole)
            self.store.copy(
                self.tc_local_bit, self.value_words, following[more], next_begin[more],
                next_end[more], ring, more, fill[more] + self.tile_at,
            )  # fmt: skip
            further = fill[more] + self.stage_bytes
            fill[more] = np.where(further < self.ring_bytes, further, 0)
            following[more] += 1
            next_begin[more] = next_end[more]
            rows[more] = self.load_rows(np.minimum(following[more], last[more]))
            if self.weighted:
                next_end[more] = offset(np.minimum(following[more], last[more]) + 1)
            ring.commit(warp)

        busy = np.nonzero(following < end)[0]
        if busy.size:
            rows[busy] = self.load_rows(following[busy])
            if self.weighted:
                begin[busy] = next_begin[busy] = offset(following[busy])
                next_end[busy] = offset(following[busy] + 1)
            for _ in range(self.stages - 1):
                copy_next(busy)
        tile, alive = item[:, 1].copy(), np.arange(count)
        while (alive := self.closing(windows, tile, end, tally, alive)).size:
            ring.sync(alive)
            copy_next(alive)
            ring.wait(alive, self.stages - 1)
            ring.sync(alive)
            stage = read[alive]
            weights, values = self.store.read(ring, alive, stage + self.tile_at, begin[alive])
            begin[alive] += values
            for j in range(self.pieces):
                pair = []
                for r in range(2):
                    at = (2 * T + r) * self.row_stride
                    at = at + (G * self.span + j * self.piece_cols) * self.size
                    at = stage[:, None] + at
                    assert_no_conflicts(at, 4 * self.words)
                    pair.append(ring.read(alive[:, None], at, 4 * self.words).view(U32))
                self.multiply(pair, weights, j, tally, alive)
            further = stage + self.stage_bytes
            read[alive] = np.where(further < self.ring_bytes, further, 0)
            tile[alive] += 1
        ring.end()

    # -- rows of B straight to registers

    def load_row(self, row: np.ndarray, offset: int) -> np.ndarray:
        """Rows [items, 32] of B as words [items, 32, kWords]; zeros past the last column."""
        loaded = np.zeros((*row.shape, self.span), dtype=self.element.storage)
        for v in range(0, self.span, self.vec):
            here = np.broadcast_to(self.inside(offset + v), row.shape)
            place = self.base + row * self.b_row + offset + v
            loaded[here, v : v + self.vec] = self.b.load(place[here], self.vec)
        return loaded.view(U32)

    def walk(self, item: np.ndarray, windows: Windows, tally: np.ndarray) -> None:
        tile, alive = item[:, 1].copy(), np.arange(len(item))
        while (alive := self.closing(windows, tile, item[:, 2], tally, alive)).size:
            here = tile[alive]
            at = (here[:, None] * self.stack + np.arange(self.stack)) * 2
            bits = self.half_bits.load(at, 2)
            bits = np.repeat(bits[:, None], LANES, axis=1)
            first = np.zeros_like(here)
            if self.weighted:
                first[:] = self.tc_offset.load(here * self.stack)[..., 0]

            def value(n: np.ndarray, wanted: np.ndarray, first: np.ndarray = first) -> np.ndarray:
                return self.values.load((first[:, None] + n)[wanted])[..., 0]

            weights, _ = decode(self.element, self.weighted, bits, value)
            id = self.sparse_a_to_b.load((here[:, None] * 4 + T) * 2, 2).astype(np.int64)
            for j in range(self.pieces):
                pair = [self.load_row(id[..., k], j * self.piece_cols) for k in range(2)]
                self.multiply(pair, weights, j, tally, alive)
            tile[alive] += 1

    # -- what follows

    def climb(self, slot: int, tally: np.ndarray) -> bool:
        """``tally`` [kPieces * kPairs, kStack, 32, 4], in place."""
        bytes_a_lane = tally.size // LANES * 4
        tree = Tree(
            self.parent_of_slot, self.nodes, self.arrivals, self.partials,
            first_counter=self.layer * self.p["node_count"],
            first_slot=self.layer * self.p["slot_count"],
            lanes=LANES, slot_bytes=bytes_a_lane,
        )  # fmt: skip
        of_lanes = np.ascontiguousarray(np.moveaxis(tally, 2, 0))

        def add(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
            return (mine.view(np.float32) + other.view(np.float32)).view(np.uint8)

        found = tree.climb(slot, of_lanes.view(np.uint8).reshape(LANES, bytes_a_lane), add)
        if found is None:
            return False
        tally[:] = np.moveaxis(found.view(np.float32).reshape(of_lanes.shape), 0, 2)
        return True

    def row_of(self, window: int, r: np.ndarray) -> np.ndarray:
        position = window * (8 * self.stack) + r
        here = position < self.p["rows"]
        rows = np.where(here, position, -1)
        if self.order is not None:
            rows[here] = self.order.load(position[here])[:, 0]
        return rows

    def exact(self, window: int) -> None:
        self.recomputed += 1
        begin, end = self.row_window_offset.load(np.array([window, window + 1]))[:, 0].tolist()
        for place in range(2 * self.stack):
            stack, place_row = place // 2, 2 * T + place % 2
            row = self.row_of(window, 8 * stack + place_row)
            for j in range(self.pieces):
                sums = np.zeros((LANES, self.span), dtype=np.float32)
                for tile in range(begin, end):
                    part = tile * self.stack + stack
                    bits = self.tc_local_bit.load(np.array(part))[0]
                    for column in range(8):
                        bit = (place_row * 8 + column).astype(np.uint64)
                        here = (row >= 0) & (bits >> bit & np.uint64(1)).astype(bool)
                        if here.any():
                            k = int(self.sparse_a_to_b.load(np.array(tile * 8 + column))[0])
                            below = popc(bits & ~(~np.uint64(0) << bit))
                            self.add_entry(part, below, k, np.nonzero(here)[0], j, sums)
                self.finish(row, j, sums)

    def add_entry(self, part: int, below: np.ndarray, k: int, lanes, j: int, sums) -> None:
        """Entries of some lanes' rows in one column of a tile."""
        weight = np.ones(lanes.size, dtype=np.float32)
        if self.weighted:
            at = int(self.tc_offset.load(np.array(part))[0]) + below[lanes]
            weight = self.element.widen(self.values.load(at)[:, 0])
        for v in range(self.span):
            offset = j * self.piece_cols + v
            here = self.inside(offset)[lanes]
            mine = lanes[here]
            raw = self.b.load(self.base[mine] + k * self.b_row + offset)[:, 0]
            x = round_tf32(raw) if self.size == 4 else raw
            with np.errstate(invalid="ignore"):
                sums[mine, v] += weight[here] * self.element.widen(x)

    def finish(self, row: np.ndarray, j: int, sums: np.ndarray) -> None:
        offset = j * self.piece_cols
        at = self.z * self.p["c_batch_stride"] + self.column + offset + row * self.p["c_row_stride"]
        scale = np.full(LANES, self.p["alpha"], dtype=np.float32)
        if self.p["mean"]:
            here = row >= 0
            entries = np.ones(LANES, dtype=np.int64)
            entries[here] = (
                self.indptr.load(row[here] + 1)[:, 0] - self.indptr.load(row[here])[:, 0]
            )
            scale = np.where(entries > 0, scale / np.maximum(entries, 1), scale)
        sums = (sums * scale[:, None]).astype(np.float32)
        if self.p["epilogue"]:
            for v in range(self.span):
                here = (row >= 0) & self.inside(offset + v)
                if self.p["beta"] != 0.0:
                    old = self.output.widen(self.c.load(at[here] + v)[:, 0])
                    sums[here, v] += np.float32(self.p["beta"]) * old
                if self.bias is not None:
                    sums[here, v] += self.bias.load(self.column[here] + offset + v)[:, 0]
            if self.p["relu"]:
                sums = np.where(sums < 0, np.float32(0), sums)
        part = min(self.vec, 16 // self.output.size)
        for v in range(0, self.span, part):
            here = (row >= 0) & self.inside(offset + v)
            self.c.store(at[here] + v, self.output.narrow(sums[here, v : v + part]))


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    product = Product(machine, config, params)
    product.run(grid)
    machine.recomputed = product.recomputed


REPLAYS = {"spmm_bittcf": replay_spmm}
