"""``sddmm_csr.cu`` in NumPy: the same index arithmetic, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.kernels.replay import ELEMENTS, Machine
from tests.kernels.replay_threads import group_work


def add_lanes(dot: np.ndarray, lanes: int) -> np.ndarray:
    """``add_lanes``: [groups, lanes, unroll] sums -> [groups, lanes], lane l holds l % unroll."""
    lane, step = np.arange(lanes), 1
    held = list(np.moveaxis(dot, 2, 0))
    while step < lanes:
        odd = (lane & step).astype(bool)
        if len(held) > 1:
            pairs = list(zip(held[::2], held[1::2], strict=True))
            mine = [np.where(odd, second, first) for first, second in pairs]
            other = [np.where(odd, first, second) for first, second in pairs]
            held = [m + o[:, lane ^ step] for m, o in zip(mine, other, strict=True)]
        else:
            held = [held[0] + held[0][:, lane ^ step]]
        step *= 2
    return held[0]


def replay_sddmm(
    machine: Machine, config: Mapping[str, Any], params: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    """``sddmm_csr``: one dot product an entry."""
    element = ELEMENTS[config["ELEMENT"]]
    acc = np.float64 if element is np.float64 else np.float32
    lanes, vec, times, threads, unroll = (
        config[name] for name in ("kLanes", "kVec", "kTimes", "kThreads", "kUnroll")
    )
    step, slab = lanes * vec, lanes * vec * times
    items = machine.array(params["items"], np.int32, 4)
    columns = machine.array(params["columns"], np.int32)
    g, b = machine.array(params["g"], element), machine.array(params["b"], element)
    out = machine.array(params["out"], acc)
    machine.written[params["out"]] = out
    work, _ = group_work(grid[0], lanes, threads, params)
    heads = np.arange(0, work.lane.size, lanes)  # the first thread of each group
    lane = np.arange(lanes)

    def dots(g_row: int, b_base: int, column: np.ndarray) -> np.ndarray:
        """[lanes, unroll] partial sums of some entries."""
        dot = np.zeros((lanes, unroll), dtype=acc)
        for first in range(0, params["n"], slab):
            for q in range(times):
                at = first + lane * vec + q * step
                inside = at < params["n"]
                left = g.load(g_row + np.where(inside, at, 0), vec).astype(acc)
                for u in range(unroll):
                    row = b_base + column[u] * params["b_row_stride"]
                    right = b.load(row + np.where(inside, at, 0), vec).astype(acc)
                    dot[inside, u] += (left * right).sum(1, dtype=acc)[inside]
        return dot

    for z in range(grid[2]):
        for head in heads.tolist():
            if work.index[head] >= work.end[head]:
                continue
            row, start, end, _ = items.data[work.index[head]].tolist()
            g_row = z * params["g_batch_stride"] + row * params["g_row_stride"]
            b_base = z * params["b_batch_stride"]
            for begin in range(work.first[head], end - start, work.stride[head]):
                here = end - start - begin
                own = columns.load(start + begin + np.where(lane < here, lane, 0))[:, 0]
                result = np.zeros(lanes, dtype=acc)
                for j in range(0, min(lanes, here), unroll):
                    sums = add_lanes(dots(g_row, b_base, own[j : j + unroll])[None], lanes)[0]
                    result = np.where(lane // unroll == j // unroll, sums, result)
                stored = lane < here
                place = z * params["out_batch_stride"] + start + begin + lane[stored]
                out.store(place, result[stored, None])
