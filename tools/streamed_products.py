"""Products of a matrix twice as large as what may be on the GPU: copies beside products.

    python -m tools.streamed_products --out DIR      # streamed_products.jsonl, half a minute

A is made on the GPU, goes to pinned memory of the host, and torch's memory is then capped at B, C
and half of A (``cap_bytes``). One JSON line per type: the rate of copies alone (``pcie``, bytes per
second, of blocks as large as panels), of a streamed product (``rate``) and their ratio (``share``);
the seconds of the same product with A on the GPU (``resident_s``) and of copies and products one
after the other (``apart_s``); the peak of torch's memory; whether sampled rows of C and of the
gradient are within the bound of float64 (``right``). The exit status is 1 if not. ``--cpu`` runs
small sizes: a test of the script, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.timer import measure
from sparsetile.dist import stream_plan
from sparsetile.dist.streamed import PANEL_BYTES
from tools.large_products import (
    PART,
    SAMPLED,
    matrix,
    right_columns,
    right_sums,
    sampled_rows,
)

BLOCKS = 32


def pcie_rate(device: torch.device, size: int) -> float:
    """Bytes per second of copies from pinned memory."""
    if device.type != "cuda":
        return 1e9
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(BLOCKS)]
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def copies() -> None:
        for block in host:
            there.copy_(block, non_blocking=True)

    return BLOCKS * size / measure(copies, device, repeats=5)


def resident_seconds(A: Any, B: Tensor) -> float:
    """Seconds of a product with A on the device."""
    return measure(lambda: st.spmm(A, B), B.device, repeats=5)


def products(indptr: Tensor, indices: Tensor, values: Tensor, B: Tensor, row: int) -> Tensor:
    """The products that a row of C is the sum of, in float64."""
    some = slice(int(indptr[row]), int(indptr[row + 1]))
    return values[some].double()[:, None] * B[indices[some].long()].double()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run(
    rows: int, entries: int, n: int, dtype: torch.dtype, device: torch.device, gradient: bool
) -> dict[str, Any]:
    """The fields of a line."""
    cuda = device.type == "cuda"
    indptr, indices = matrix(rows, entries, None, device)
    values = torch.empty(entries, dtype=dtype, device=device)
    for part in values.split(PART):
        part.uniform_(-1, 1)
    del part  # a view, which keeps all values
    B = torch.randn(rows, n, device=device).to(dtype)
    G = torch.randn(rows, n, device=device).to(dtype)
    A = (indptr, indices, values, (rows, rows))
    resident = resident_seconds(A, B)
    sampled = {row: products(indptr, indices, values, B, row) for row in
               sampled_rows(indptr).tolist()}  # fmt: skip
    columns = torch.randint(0, rows, (SAMPLED,), device=device).unique()
    host = tuple(each.cpu() for each in A[:3])
    del A, indptr, indices, values
    st.clear_plan_cache()
    size = PANEL_BYTES if cuda else 2**16
    prepared = time.perf_counter()
    plan = stream_plan((*host, (rows, rows)), device=device, panel_bytes=size)
    prepared = time.perf_counter() - prepared
    rate, cap, total = pcie_rate(device, size), 0, 0
    if cuda:
        torch.cuda.empty_cache()
        cap = torch.cuda.memory_allocated() + 2 * B.nbytes + plan.bytes // 2
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap / total)
        torch.cuda.reset_peak_memory_stats()
    C = plan @ B
    right = all(right_sums(C[row], each, dtype) for row, each in sampled.items())
    del C, sampled
    seconds = measure(lambda: plan @ B, device, repeats=5)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    found = {
        "dtype": str(dtype).removeprefix("torch."), "rows": rows, "entries": entries, "n": n,
        "device": torch.cuda.get_device_name() if cuda else "cpu", "right": right,
        "a_bytes": plan.bytes, "cap_bytes": cap, "peak_bytes": peak, "panels": plan.panels,
        "panel_bytes": plan.panel_bytes, "plan_s": prepared, "seconds": seconds, "pcie": rate,
        "rate": plan.bytes / seconds, "share": plan.bytes / seconds / rate,
        "resident_s": resident, "apart_s": plan.bytes / rate + resident,
    }  # fmt: skip
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if gradient:
        found["transpose_s"] = timed(lambda: plan.T, device)
        x = B.requires_grad_()
        C = plan @ x
        found["backward_s"] = timed(lambda: C.backward(G), device)
        assert x.grad is not None
        there = [each.to(device) for each in host]
        right = right_columns(there[0], there[1], there[2], G, x.grad, columns)
        found["right"] = found["right"] and right
    if cuda:
        torch.cuda.empty_cache()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--entries", type=int, default=600_000_000)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--gradient", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    if options.cpu:
        options.rows, options.entries = 1000, 200_000
    torch.manual_seed(0)
    right = True
    for name in options.dtype.split(","):
        dtype = getattr(torch, name)
        found = run(options.rows, options.entries, options.n, dtype, device, options.gradient)
        right &= found["right"]
        print(json.dumps(found), flush=True)
        if options.out is not None:
            with (options.out / "streamed_products.jsonl").open("a") as file:
                print(json.dumps(found), file=file)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
