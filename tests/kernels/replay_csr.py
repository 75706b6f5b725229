"""``spmm_csr.cu`` and ``sddmm_csr.cu`` in NumPy: the same index arithmetic, thread by thread.

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

WARP = 32
COLUMN_BITS = 28
NO_ITEM = np.array([-1, 0, 0, -1])


@dataclass
class Threads:
    """GroupWork of every thread: some threads of a launch, whole warps."""

    lane: np.ndarray
    index: np.ndarray
    step: np.ndarray
    count: np.ndarray
    end: np.ndarray
    first: np.ndarray
    stride: np.ndarray
    wide: np.ndarray

    def take(self, chosen: np.ndarray) -> Threads:
        return Threads(*(getattr(self, field.name)[chosen] for field in fields(self)))


def group_work(
    blocks: int, lanes: int, threads: int, params: Mapping[str, Any]
) -> tuple[Threads, np.ndarray]:
    """Return the work of every thread, and whether its items are bundles."""
    item_end = np.array([params[f"item_end[{s}]"] for s in range(4)])
    block_end = np.array([params[f"block_end[{s}]"] for s in range(4)])
    block = np.repeat(np.arange(blocks), threads)
    thread = np.tile(np.arange(threads), blocks)
    section = sum((block >= block_end[s]).astype(int) for s in range(3))
    first_item = np.where(section == 0, 0, item_end[section - 1])
    first_block = np.where(section == 0, 0, block_end[section - 1])
    wide = section < 2
    count = np.where(wide, 1, params["strip"])
    step = np.where(wide, threads // WARP, threads // lanes)
    own = np.where(wide, thread // WARP, thread // lanes)
    index = first_item + (block - first_block) * step * count + own
    first = np.where(wide, thread % WARP // lanes * lanes, 0)
    stride = np.where(wide, WARP, lanes)
    work = Threads(thread % lanes, index, step, count, item_end[section], first, stride, wide)
    return work, section % 2 == 0


@dataclass
class Chunk:
    column: np.ndarray
    value: np.ndarray
    weights: np.ndarray
    entry: np.ndarray
    left: np.ndarray


class Product:
    """One launch of spmm_csr: its configuration, parameters and memory."""

    def __init__(self, machine: Machine, config: Mapping[str, Any], params: dict[str, Any]) -> None:
        self.config, self.p = config, params
        self.lanes, self.vec = config["kLanes"], config["kVec"]
        self.weighted, self.extremum = config["kWeighted"], config["kExtremum"]
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
        self.partials = array(params["partials"], self.acc)
        self.partial_args = array(params["partial_args"], np.int32) if self.extremum else None
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
        work, bundled = group_work(grid[0], self.lanes, self.config["kThreads"], self.p)
        for self.z in range(grid[2]):
            for self.y in range(grid[1]):
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

    def load_head(self, work: Threads, item: np.ndarray, R: int) -> tuple[np.ndarray, ...]:
        at = item[:, 1] + work.first + work.lane
        mask = at < item[:, 2]
        column = (
            self.load_where(self.columns if R == 1 else self.tagged, at, mask, np.zeros(at.size))
            if mask.any()
            else np.zeros(at.size, dtype=np.int32)
        )
        value = np.zeros(at.size, dtype=self.acc)
        if self.weighted and R == 1 and mask.any():
            value = self.load_where(self.values, at, mask, np.zeros(at.size)).astype(self.acc)
        return item, column, value

    def product(self, work: Threads, R: int) -> None:
        if not work.lane.size:
            return
        column = (self.y * self.lanes + work.lane) * self.vec
        b = self.z * self.p["b_batch_stride"] + np.where(column < self.p["n"], column, 0)
        head = self.load_head(work, self.load_item(work.index, work.end), R)
        if not self.config["kPipelined"]:
            self.one(work, head, column, b, R)
            return
        index = work.index + work.step
        next_item = self.load_item(np.where(work.count > 1, index, work.end), work.end)
        for turn in range(int(work.count.max())):
            index = index + work.step
            later = self.load_item(np.where(turn + 2 < work.count, index, work.end), work.end)
            following = self.load_head(work, next_item, R)
            running = turn < work.count
            assert (running == self.by_warp(running, np.min)).all()
            self.one(
                work.take(running), tuple(part[running] for part in head), column[running],
                b[running], R,
            )  # fmt: skip
            head, next_item = following, later

    def one(self, work: Threads, head: tuple, column: np.ndarray, b: np.ndarray, R: int) -> None:
        if self.config["kRepair"]:
            todo = ~self.is_finite(head[0][:, 0], column)
            work, head = work.take(todo), tuple(part[todo] for part in head)
            column, b = column[todo], b[todo]
            if not column.size:
                return
        total = np.zeros((column.size, R, self.vec), dtype=self.acc)
        arg = np.full((column.size, self.vec), -1, dtype=np.int64)
        self.gather(work, head, b, total, arg, R)
        self.deliver(work, head[0], column, total, arg, R)

    def is_finite(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        finite = np.ones(row.size, dtype=bool)
        here = (column < self.p["n"]) & (row >= 0)
        at = self.z * self.p["c_batch_stride"] + row * self.p["c_row_stride"] + column
        for v in range(self.vec):
            finite[here] &= np.isfinite(self.c.load(at[here] + v)[:, 0])
        return self.by_warp(finite, np.min).astype(bool)

    def gather(self, work, head, b, total, arg, R: int) -> None:
        item, next_column, next_value = head
        length = item[:, 2] - item[:, 1]
        begin = work.first.copy()
        values_base = item[:, 1] * R
        columns = self.columns if R == 1 else self.tagged
        while True:
            left = length - begin
            most, least = self.by_warp(left, np.max), self.by_warp(left, np.min)
            if not (most > 0).any():
                break
            column = np.where((work.lane >= left) & (R > 1) & (self.groups > 1), 0, next_column)
            weights = np.where((self.groups > 1) & (left <= 0), 0, values_base + begin * R)
            chunk = Chunk(column, next_value, weights, item[:, 1] + begin, left)
            begin = begin + work.stride
            ahead = (begin + work.lane < length) & (most > 0)
            if ahead.any():
                at = item[:, 1] + begin + work.lane
                next_column = self.load_where(columns, at, ahead, next_column)
                if self.weighted and R == 1:
                    loaded = self.load_where(self.values, at, ahead, np.zeros(at.size))
                    next_value = np.where(ahead, loaded.astype(self.acc), next_value)
            whole = (most > 0) & (least >= self.lanes)
            for sizes, chosen in self.batches(whole, most):
                self.walk(chunk, chosen, sizes, b, total, arg, R, masked=not whole[chosen].all())
        if self.groups > 1 and work.wide.any():
            self.join_groups(work.wide, total, arg)

    def batches(self, whole: np.ndarray, most: np.ndarray):
        """Yield (sizes of the batches, threads) for each way that warps walk their chunk."""
        if whole.any():
            unroll = self.config["kUnroll"]
            yield [unroll] * (self.lanes // unroll), np.nonzero(whole)[0]
        partial = np.where((most > 0) & ~whole, np.minimum(most, self.lanes), 0)
        for count in np.unique(partial[partial > 0]).tolist():
            rest = [count % 4] if count % 4 else []
            yield [4] * (count // 4) + rest, np.nonzero(partial == count)[0]

    def walk(self, chunk: Chunk, chosen, sizes, b, total, arg, R: int, *, masked: bool) -> None:
        mine = replace(
            chunk, **{field.name: getattr(chunk, field.name)[chosen] for field in fields(chunk)}
        )
        sums, args = total[chosen], arg[chosen]
        for M in sizes:
            for m in range(M):
                self.entry(mine, m, b[chosen], sums, args, R, masked and self.groups > 1)
            mine.column, mine.value = self.turned(mine.column, M), self.turned(mine.value, M)
            mine.weights, mine.entry = mine.weights + M * R, mine.entry + M
            mine.left = mine.left - M
        total[chosen], arg[chosen] = sums, args

    def entry(self, chunk: Chunk, m: int, b, sums, args, R: int, masked: bool) -> None:
        tagged = self.shfl(chunk.column, m).astype(np.int64) & 0xFFFFFFFF
        k = tagged if R == 1 else tagged & ((1 << COLUMN_BITS) - 1)
        x = self.b.load(b + k * self.b_row, self.vec).astype(self.acc)
        if R > 1:
            weights = self.packed.load(chunk.weights + m * R, R) if self.weighted else None
            for r in range(R):
                held = (tagged >> (COLUMN_BITS + r) & 1).astype(bool)
                weight = weights[held, r, None].astype(self.acc) if self.weighted else 1
                sums[held, r] += weight * x[held]
            return
        here = m < chunk.left if masked else np.ones(k.size, dtype=bool)
        weight = self.shfl(chunk.value, m)[here, None] if self.weighted else 1
        if self.extremum:
            entries = np.repeat((chunk.entry + m)[here, None], self.vec, axis=1)
            held, best = sums[here, 0], args[here]
            self.join_extremum(held, best, weight * x[here], entries)
            sums[here, 0], args[here] = held, best
        else:
            sums[here, 0] += weight * x[here]

    def join_extremum(self, held, best, candidate, entry) -> None:
        """``Accumulator::take``, in place."""
        with np.errstate(invalid="ignore"):
            better = candidate < held if self.p["minimum"] else candidate > held
            nan, held_nan = np.isnan(candidate), np.isnan(held)
            tie = ((candidate == held) | (nan & held_nan)) & (entry < best)
        taken = (entry >= 0) & ((best < 0) | better | (nan & ~held_nan) | tie)
        held[taken], best[taken] = candidate[taken], entry[taken]

    def join_groups(self, wide: np.ndarray, total, arg) -> None:
        """Groups of a warp add their sums of a wide item by shuffles."""
        place, step = np.arange(total.shape[0]), self.lanes
        while step < WARP:
            other, other_arg = total[place ^ step], arg[place ^ step]
            if self.extremum:
                held, best = total[wide, 0], arg[wide]
                self.join_extremum(held, best, other[wide, 0], other_arg[wide])
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
            if self.combine(int(item[start, 3]), work.lane[group], total[group], arg[group], R):
                done[group] = True
        done &= column < self.p["n"]
        if R == 1:
            self.finish(item[done, 0], column[done], total[done, 0], arg[done])
            return
        rows = self.bundle_rows.data[item[done, 0]]
        assert (rows[:, 0] >= 0).all()
        for r in range(R):
            here = rows[:, r] >= 0
            self.finish(rows[here, r], column[done][here], total[done][here, r], arg[done][here])

    def combine(self, slot: int, lane, total, arg, R: int) -> bool:
        width = self.p["slabs"] * self.lanes * self.vec
        slot_stride = width * self.config["kRows"]
        offset = (
            self.z * self.p["slot_count"] * slot_stride + (self.y * self.lanes + lane) * self.vec
        )
        counters = (self.z * self.p["slabs"] + self.y) * self.p["node_count"]
        while True:
            for r in range(R):
                self.partials.store(offset + slot * slot_stride + r * width, total[:, r])
            if self.extremum:
                self.partial_args.store(offset + slot * slot_stride, arg)
            node = int(self.parent_of_slot.load(np.array(slot))[0])
            first, children, own, _ = self.nodes.data[node].tolist()
            counter = int(self.arrivals.load(np.array(counters + node))[0])
            last = counter == children - 1
            self.arrivals.data[counters + node] = 0 if last else counter + 1
            if not last:
                return False
            total[:], arg[:] = 0, -1
            for child in range(children):
                at = offset + (first + child) * slot_stride
                for r in range(R):
                    other = self.partials.load(at + r * width, self.vec)
                    if self.extremum:
                        entries = self.partial_args.load(at, self.vec).astype(np.int64)
                        self.join_extremum(total[:, r], arg, other, entries)
                    else:
                        total[:, r] += other
            if own < 0:
                return True
            slot = own

    def finish(self, row, column, sums, arg) -> None:
        at = (
            self.z * self.p["c_batch_stride"]
            + column
            + row.astype(np.int64) * self.p["c_row_stride"]
        )
        if self.p["epilogue"]:
            scale = np.full(row.size, self.p["alpha"], dtype=self.acc)
            if self.p["mean"]:
                entries = self.indptr.load(row + 1)[:, 0] - self.indptr.load(row)[:, 0]
                scale = np.where(entries > 0, scale / np.maximum(entries, 1), scale)
            sums = (sums * scale[:, None]).astype(self.acc)
            if self.p["beta"] != 0.0:
                places = at[:, None] + np.arange(self.vec)
                sums += self.acc(self.p["beta"]) * self.c.data[places].astype(self.acc)
            if self.bias is not None:
                sums += self.bias.data[column[:, None] + np.arange(self.vec)]
            if self.p["relu"]:
                sums = np.where(sums < 0, self.acc(0), sums)
        if self.extremum:
            for v in range(self.vec):
                self.args.store(at + v, arg[:, v : v + 1])
        self.c.store(at, sums)


def replay_spmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    Product(machine, config, params).run(grid)


def replay_sddmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    """``sddmm_csr``: one dot product an entry."""
    element = ELEMENTS[config["ELEMENT"]]
    acc = np.float64 if element is np.float64 else np.float32
    lanes, vec, threads, unroll = (
        config[name] for name in ("kLanes", "kVec", "kThreads", "kUnroll")
    )
    items = machine.array(params["items"], np.int32, 4)
    columns = machine.array(params["columns"], np.int32)
    g, b = machine.array(params["g"], element), machine.array(params["b"], element)
    out = machine.array(params["out"], acc)
    machine.written[params["out"]] = out
    size = np.dtype(element).itemsize
    per_block = threads // lanes
    for z in range(grid[2]):
        for index in range(grid[0] * per_block):
            if index >= params["item_count"]:
                continue
            row, begin, end, _ = items.data[index].tolist()
            g_row = z * params["g_batch_stride"] + row * params["g_row_stride"]
            b_base = z * params["b_batch_stride"]
            for entry in range(begin, end, unroll):
                wanted = entry + np.arange(unroll)
                here = wanted < end
                column = np.zeros(unroll, dtype=np.int64)
                column[here] = columns.load(wanted[here])[:, 0]
                dot = np.zeros(unroll, dtype=acc)
                for slab in range(0, params["n"], lanes * vec):
                    at = slab + np.arange(lanes) * vec
                    at = at[at < params["n"]]
                    left = g.load(g_row + at, vec).astype(acc)
                    address = b_base + column[:, None] * params["b_row_stride"] + at
                    right = b.load(address, vec).astype(acc)
                    dot[here] += (left[None] * right).sum((1, 2), dtype=acc)[here]
                where = z * params["out_batch_stride"] + wanted[here]
                out.store(where, dot[here, None])
    assert size in (2, 4, 8)


REPLAYS = {"spmm_csr": replay_spmm, "sddmm_csr": replay_sddmm}
