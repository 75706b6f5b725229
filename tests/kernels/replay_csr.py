"""``spmm_csr.cu`` in NumPy: the same index arithmetic, thread by thread.

Functions and names are those of the device code; a thread is an element of an array, and a
shuffle is an indexing of the groups' lanes. Threads of one slab and batch run together, except
that the pieces of cut units arrive at their tree in random order, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tests.kernels.replay import ELEMENTS, Array, Machine
from tests.kernels.replay_sddmm import replay_sddmm
from tests.kernels.replay_threads import WARP, Threads, group_work
from tests.kernels.replay_tree import Tree

LIST_STEP = 4
NO_ITEM = np.array([-1, 0, 0, -1])


@dataclass
class Chunk:
    column: np.ndarray
    value: np.ndarray
    entry: np.ndarray
    left: np.ndarray


class Product:
    """One launch of spmm_csr: its configuration, parameters and memory."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.config, self.p = config, params
        self.lanes, self.vec, self.times = config["kLanes"], config["kVec"], config["kTimes"]
        self.step = self.lanes * self.vec
        self.slab = self.step * self.times
        self.width = self.times * self.vec  # columns of a lane
        self.weighted, self.extremum = config["kWeighted"], config["kExtremum"]
        self.with_args = config["kArgs"]
        self.sign = -1 if self.extremum and params["minimum"] else 1
        self.column_bits = 32 - config["kRows"]
        self.groups = WARP // self.lanes
        element, output = ELEMENTS[config["ELEMENT"]], ELEMENTS[config["OUTPUT"]]
        self.acc = np.float64 if element is np.float64 else np.float32
        array = machine.array
        self.items = array(params["items"], np.int32, 4)
        self.parent_of_slot = (
            array(params["parent_of_slot"], np.int32) if params["slot_count"] else None
        )
        self.nodes = array(params["nodes"], np.int32, 4) if params["node_count"] else None
        self.arrivals = array(params["arrivals"], np.int32)
        self.columns = array(params["columns"], np.int32) if params["columns"] else None
        self.tagged = array(params["tagged"], np.int32)
        self.values = array(params["values"], element)
        self.packed = array(params["packed"], element)
        self.b, self.c = array(params["b"], element), array(params["c"], output)
        self.bundle_rows = array(params["bundle_rows"], np.int32, 4)
        self.indptr = array(params["indptr"], np.int64)
        self.bias = array(params["bias"], self.acc)
        self.partials = array(params["partials"], np.uint8)
        self.args = array(params["args"], np.int64)
        self.b_row = params["b_row_bytes"] // np.dtype(element).itemsize
        machine.written[params["c"]] = self.c
        self.random = np.random.default_rng(7)

    # -- helpers for groups of lanes

    def shfl(self, values: np.ndarray, lane: int) -> np.ndarray:
        return np.repeat(values.reshape(-1, self.lanes)[:, lane % self.lanes], self.lanes)

    def turned(self, values: np.ndarray, by: int) -> np.ndarray:
        """Each lane gets what the lane ``by`` places on had, round its group."""
        return np.roll(values.reshape(-1, self.lanes), -by, axis=1).reshape(-1)

    def by_warp(self, values: np.ndarray, reduce) -> np.ndarray:
        return np.repeat(reduce(values.reshape(-1, WARP), axis=1), WARP)

    def load_where(self, array: Array, at: np.ndarray, mask: np.ndarray, otherwise) -> np.ndarray:
        found = np.array(otherwise, dtype=array.data.dtype, copy=True)
        found[mask] = array.load(at[mask])[..., 0]
        return found

    # -- the kernel

    def run(self, grid: tuple[int, int, int]) -> None:
        if self.config["kRepair"] and self.args is not None and not self.args.load(np.array(0))[0]:
            return  # nobody saw what is not finite
        blocks, slabs = grid[0], grid[1]
        if self.p["slab_fast"]:
            # Slabs of a block follow each other in the grid; the order is none of the replay's.
            assert grid[1] == 1 and grid[0] % self.p["slabs"] == 0
            blocks, slabs = grid[0] // self.p["slabs"], self.p["slabs"]
        work, bundled = group_work(blocks, self.lanes, self.config["kThreads"], self.p)
        for self.z in range(grid[2]):
            for self.y in range(slabs):
                if self.config["kRows"] > 1:
                    self.product(work.take(bundled), self.config["kRows"])
                    self.product(work.take(~bundled), 1)
                else:
                    self.product(work, 1)

    def load_item(self, index: np.ndarray, end: np.ndarray) -> np.ndarray:
        found = np.tile(NO_ITEM, (index.size, 1))
        here = index < end
        assert (index[here] >= 0).all() and (index[here] < len(self.items.data)).all()
        found[here] = self.items.data[index[here]]
        return found

    def columns_of(self, first: np.ndarray) -> np.ndarray:
        """Places of a lane's elements, from the place of its first."""
        steps = np.arange(self.times)[:, None] * self.step + np.arange(self.vec)
        return first[:, None] + steps.reshape(-1)

    def load_row(self, b: np.ndarray, k: np.ndarray) -> np.ndarray:
        """A lane's part of row k of B, vector by vector."""
        first = b + k * self.b_row
        parts = [self.b.load(first + q * self.step, self.vec) for q in range(self.times)]
        return np.concatenate(parts, axis=1).astype(self.acc)

    def product(self, work: Threads, R: int) -> None:
        if not work.lane.size:
            return
        column = self.y * self.slab + work.lane * self.vec
        b = self.z * self.p["b_batch_stride"] + np.where(column < self.p["n"], column, 0)
        item = self.load_item(work.index, work.end)
        if self.config["kRepair"]:
            todo = ~self.is_finite(item[:, 0], column)
            work, item, column, b = work.take(todo), item[todo], column[todo], b[todo]
            if not column.size:
                return
        empty = -np.inf if self.extremum else 0
        total = np.full((column.size, R, self.width), empty, dtype=self.acc)
        first = item[:, 1] + work.first
        arg = np.repeat(np.where(first < item[:, 2], first, -1)[:, None], self.width, axis=1)
        if R == 1:
            self.gather_row(work, item, b, total, arg)
        else:
            self.gather_bundle(work, item, b, total, R)
        if self.groups > 1 and work.wide.any():
            self.join_groups(work.wide, total, arg)
        self.deliver(work, item, column, total, arg, R)

    def is_finite(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        finite = np.ones(row.size, dtype=bool)
        here = (column < self.p["n"]) & (row >= 0)
        at = self.z * self.p["c_batch_stride"] + row * self.p["c_row_stride"] + column
        for v in range(self.vec):
            finite[here] &= np.isfinite(self.c.load(at[here] + v)[:, 0])
        return self.by_warp(finite, np.min).astype(bool)

    def gather_row(self, work: Threads, item, b, total, arg) -> None:
        length = item[:, 2] - item[:, 1]
        begin = work.first.copy()
        next_column = np.zeros(length.size, dtype=np.int32)
        next_value = np.zeros(length.size, dtype=self.acc)

        def look_ahead(running: np.ndarray) -> None:
            nonlocal next_column, next_value
            ahead = (begin + work.lane < length) & running
            if ahead.any():
                at = item[:, 1] + begin + work.lane
                next_column = self.load_where(self.columns, at, ahead, next_column)
                if self.weighted:
                    loaded = self.load_where(self.values, at, ahead, np.zeros(at.size))
                    next_value = np.where(ahead, loaded.astype(self.acc), next_value)

        look_ahead(np.ones(length.size, dtype=bool))
        while True:
            left = length - begin
            most, least = self.by_warp(left, np.max), self.by_warp(left, np.min)
            if not (most > 0).any():
                break
            value = (next_value if self.weighted else np.ones_like(next_value)) * self.sign
            chunk = Chunk(next_column, value, item[:, 1] + begin, left)
            begin = begin + work.stride
            look_ahead(most > 0)
            whole = (most > 0) & (least >= self.lanes)
            for sizes, chosen in self.batches(whole, most):
                self.walk(chunk, chosen, sizes, b, total, arg, masked=not whole[chosen].all())
        if self.with_args:
            for thread, place in zip(*np.nonzero(np.isnan(total[:, 0])), strict=True):
                arg[thread, place] = self.first_nan(work, item, b, thread, place)

    def first_nan(self, work: Threads, item, b, thread: int, place: int) -> int:
        q, v = divmod(place, self.vec)
        begin, end = item[thread, 1] + work.first[thread], item[thread, 2]
        for start in range(begin, end, work.stride[thread]):
            for at in range(start, min(start + self.lanes, end)):
                k = int(self.columns.load(np.array(at))[0])
                x = self.b.load(np.array(b[thread] + k * self.b_row + q * self.step + v))[0]
                weight = self.values.load(np.array(at))[0] if self.weighted else 1
                if np.isnan(weight * x):
                    return at
        return -1

    def gather_bundle(self, work: Threads, item, b, total, R: int) -> None:
        """Each group walks its batches of the list by itself."""
        step = np.where(work.wide, self.groups, 1)
        end = item[:, 2] // LIST_STEP
        assert not ((item[:, 1] | item[:, 2]) % LIST_STEP).any(), "pieces are whole batches"
        at = item[:, 1] // LIST_STEP + work.first // self.lanes
        while (running := np.nonzero(at < end)[0]).size:
            tags = self.tagged.load(at[running] * LIST_STEP, LIST_STEP).astype(np.int64)
            tags &= 0xFFFFFFFF
            for m in range(LIST_STEP):
                k = tags[:, m] & ((1 << self.column_bits) - 1)
                x = self.load_row(b[running], k)
                weights = None
                if self.weighted:
                    weights = self.packed.load((at[running] * LIST_STEP + m) * R, R)
                for r in range(R):
                    held = (tags[:, m] >> (self.column_bits + r) & 1).astype(bool)
                    weight = 1 if weights is None else weights[held, r, None].astype(self.acc)
                    total[running[held], r] += weight * x[held]
            at = at + step

    def batches(self, whole: np.ndarray, most: np.ndarray):
        """Yield (sizes of the batches, threads) for each way that warps walk their chunk."""
        if whole.any():
            unroll = self.config["kUnroll"]
            yield [unroll] * (self.lanes // unroll), np.nonzero(whole)[0]
        partial = np.where((most > 0) & ~whole, np.minimum(most, self.lanes), 0)
        for count in np.unique(partial[partial > 0]).tolist():
            batch = min(self.config["kUnroll"], 4)
            rest = [count % batch] if count % batch else []
            yield [batch] * (count // batch) + rest, np.nonzero(partial == count)[0]

    def walk(self, chunk: Chunk, chosen, sizes, b, total, arg, *, masked: bool) -> None:
        mine = replace(
            chunk, **{field.name: getattr(chunk, field.name)[chosen] for field in fields(chunk)}
        )
        sums, args = total[chosen], arg[chosen]
        for M in sizes:
            for m in range(M):
                self.entry(mine, m, b[chosen], sums, args, masked and self.groups > 1)
            mine.column, mine.value = self.turned(mine.column, M), self.turned(mine.value, M)
            mine.entry, mine.left = mine.entry + M, mine.left - M
        total[chosen], arg[chosen] = sums, args

    def entry(self, chunk: Chunk, m: int, b, sums, args, masked: bool) -> None:
        x = self.load_row(b, self.shfl(chunk.column, m).astype(np.int64))
        here = m < chunk.left if masked else np.ones(b.size, dtype=bool)
        candidate = self.shfl(chunk.value, m)[here, None] * x[here]
        if self.extremum:
            held, best = sums[here, 0], args[here]
            with np.errstate(invalid="ignore"):
                best = np.where(candidate > held, (chunk.entry + m)[here, None], best)
            sums[here, 0], args[here] = np.maximum(held, candidate), best
        else:
            sums[here, 0] += candidate

    def join(self, held, best, other, other_arg) -> None:
        """``Accumulator::join`` of an extremum, in place."""
        if not self.with_args:
            held[:] = np.maximum(held, other)
            return
        with np.errstate(invalid="ignore"):
            nan, held_nan = np.isnan(other), np.isnan(held)
            tie = ((other == held) | (nan & held_nan)) & (other_arg < best)
            better = (best < 0) | (other > held) | (nan & ~held_nan) | tie
        taken = (other_arg >= 0) & better
        held[taken], best[taken] = other[taken], other_arg[taken]

    def join_groups(self, wide: np.ndarray, total, arg) -> None:
        """Groups of a warp add their sums of a wide item by shuffles."""
        place, step = np.arange(total.shape[0]), self.lanes
        while step < WARP:
            other, other_arg = total[place ^ step], arg[place ^ step]
            if self.extremum:
                held, best = total[wide, 0], arg[wide]
                self.join(held, best, other[wide, 0], other_arg[wide])
                total[wide, 0], arg[wide] = held, best
            else:
                total[wide] += other[wide]
            step *= 2

    def deliver(self, work: Threads, item, column, total, arg, R: int) -> None:
        mine = (item[:, 0] >= 0) & ~(work.wide & (work.first > 0))
        cut = mine & (item[:, 3] >= 0)
        done = mine & ~cut
        groups = np.nonzero(cut & (work.lane == 0))[0]
        for start in self.random.permutation(groups).tolist():
            group = slice(start, start + self.lanes)
            if self.combine(int(item[start, 3]), total[group], arg[group], R):
                done[group] = True
        done &= column < self.p["n"]
        if R == 1:
            empty = item[done, 1] == item[done, 2]
            self.finish(item[done, 0], column[done], total[done, 0], arg[done], empty)
            return
        rows = self.bundle_rows.data[item[done, 0]]
        assert (rows[:, 0] >= 0).all()
        for r in range(R):
            here = rows[:, r] >= 0
            none = np.zeros(here.sum(), dtype=bool)
            self.finish(
                rows[here, r], column[done][here], total[done][here, r], arg[done][here], none
            )

    def lane_bytes(self, R: int) -> int:
        """sizeof(Accumulator<R>): winners, if any, then sums."""
        size = np.dtype(self.acc).itemsize
        bytes_ = self.width * (R * size + (4 if self.with_args else 0))
        return -(-bytes_ // size) * size

    def raw(self, total: np.ndarray, arg: np.ndarray, R: int) -> np.ndarray:
        """``Accumulator<R>`` of each lane, as bytes."""
        lanes = total.shape[0]
        raw = np.zeros((lanes, self.lane_bytes(R)), dtype=np.uint8)
        parts = [arg.astype(np.int32)] if self.with_args else []
        at = 0
        for part in (*parts, np.ascontiguousarray(total.reshape(lanes, -1))):
            at = -(-at // part.itemsize) * part.itemsize
            size = part.shape[1] * part.itemsize
            raw[:, at : at + size] = np.ascontiguousarray(part).view(np.uint8)
            at += size
        return raw

    def from_raw(self, raw: np.ndarray, R: int) -> tuple[np.ndarray, np.ndarray]:
        lanes = raw.shape[0]
        arg, at = np.full((lanes, self.width), -1, dtype=np.int64), 0
        if self.with_args:
            at = 4 * self.width
            arg = np.ascontiguousarray(raw[:, :at]).view(np.int32).astype(np.int64)
        size = np.dtype(self.acc).itemsize
        at = -(-at // size) * size
        sums = np.ascontiguousarray(raw[:, at : at + R * self.width * size]).view(self.acc)
        return sums.reshape(lanes, R, self.width), arg

    def combine(self, slot: int, total: np.ndarray, arg: np.ndarray, R: int) -> bool:
        """Sums and winners of a group's lanes, in place."""
        layer = self.z * self.p["slabs"] + self.y
        tree = Tree(
            self.parent_of_slot, self.nodes, self.arrivals, self.partials,
            first_counter=layer * self.p["node_count"],
            first_slot=layer * self.p["slot_count"],
            lanes=self.lanes, slot_bytes=self.lane_bytes(self.config["kRows"]),
        )  # fmt: skip

        def join(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
            (sums, best), (more, more_arg) = self.from_raw(mine, R), self.from_raw(other, R)
            if self.extremum:
                self.join(sums[:, 0], best, more[:, 0], more_arg)
            else:
                sums = sums + more
            return self.raw(sums, best, R)

        found = tree.climb(slot, self.raw(total, arg, R), join)
        if found is None:
            return False
        total[:], arg[:] = self.from_raw(found, R)
        return True

    def finish(self, row, column, sums, arg, empty) -> None:
        at = (
            self.z * self.p["c_batch_stride"]
            + column
            + row.astype(np.int64) * self.p["c_row_stride"]
        )
        if self.extremum:
            sums = np.where(empty[:, None], self.acc(0), self.sign * sums)
        elif self.p["epilogue"]:
            scale = np.full(row.size, self.p["alpha"], dtype=self.acc)
            if self.p["mean"]:
                entries = self.indptr.load(row + 1)[:, 0] - self.indptr.load(row)[:, 0]
                scale = np.where(entries > 0, scale / np.maximum(entries, 1), scale)
            sums = (sums * scale[:, None]).astype(self.acc)
            if self.p["beta"] != 0.0:
                sums += self.acc(self.p["beta"]) * self.c.data[self.columns_of(at)].astype(self.acc)
            if self.bias is not None:
                sums += self.bias.data[self.columns_of(column)]
            if self.p["relu"]:
                sums = np.where(sums < 0, self.acc(0), sums)
        for q in range(self.times):
            part = slice(q * self.vec, (q + 1) * self.vec)
            if self.with_args:
                for v in range(self.vec):
                    place = q * self.vec + v
                    self.args.store(at + q * self.step + v, arg[:, place : place + 1])
            self.c.store(at + q * self.step, sums[:, part])


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    Product(machine, config, params).run(grid)


REPLAYS = {"spmm_csr": replay_spmm, "sddmm_csr": replay_sddmm}
