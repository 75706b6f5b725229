"""Products of a matrix of more than 2^31 entries, made on the device. Needs a GPU of 139 GiB.

    python -m tools.large_products --out DIR      # large_products.jsonl, two minutes at most

One JSON line per step, with the seconds of a product, the memory beside A (``peak_share``: of A's
own bytes) and whether sampled results were within the bound of float64 (``right``). The exit status
is 1 if one was not.

    arrays      st.spmm of (indptr int64, indices int32, values, shape): no plan
    planning    st.plan of the same
    plan        plan @ B
    cusparse-k  cuSPARSE's CSR algorithm k with 64-bit offsets, or its refusal
    gradients   backward of functional.spmm for values and B, with the transpose and without it
    plan-dB     the gradient of plan @ B for B

Row i has 1 to 599 entries or none, each in a stratum of the columns of its own, so that columns
ascend and hardly a row of B is read twice while it is in a cache. ``--near COLUMNS`` draws them
from a band about the diagonal. ``--cpu`` runs small sizes: a test of the script, whose times mean
nothing.
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
import sparsetile.functional
from sparsetile.bench.cusparse import CSR_ALGORITHMS, CsrSpmm
from sparsetile.check.bound import error_bound
from sparsetile.core.timer import measure
from sparsetile.intake import CSR

# Entries that are drawn or looked at together.
PART = 2**26
SAMPLED = 64
MEAN = 300


def degrees(rows: int, entries: int, device: torch.device) -> Tensor:
    """Return entries of each row: 0 to 599 at random, of this sum."""
    found = torch.randint(0, 2 * MEAN, (rows,), device=device)
    while left := entries - int(found.sum()):
        able = ((found > 0) & (found < 2 * MEAN - 1)).nonzero()[: abs(left), 0]
        found[able] += 1 if left > 0 else -1
    return found


def matrix(
    rows: int, entries: int, near: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return row pointers and columns of a square matrix."""
    lengths = degrees(rows, entries, device)
    indptr = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, out=indptr[1:])
    width = min(near or rows, rows)
    indices = torch.empty(entries, dtype=torch.int32, device=device)
    step = max(PART // (2 * MEAN), 1)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        begin, stop = int(indptr[first]), int(indptr[end])
        own = lengths[first:end]
        row = torch.repeat_interleave(own, output_size=stop - begin)
        place = torch.arange(begin, stop, device=device) - indptr[first:end][row]
        length = own[row]
        low, high = place * width // length, (place + 1) * width // length
        drawn = torch.rand(stop - begin, device=device).mul_(high - low).long()
        # A band of columns about the diagonal, inside of the matrix.
        base = (row + first - width // 2).clamp_(0, rows - width)
        indices[begin:stop] = base.add_(low).add_(torch.minimum(drawn, high - low - 1))
    return indptr, indices


def sampled_rows(indptr: Tensor) -> Tensor:
    """Rows that are compared: at random, the first, the last, those where pieces may meet."""
    rows = indptr.numel() - 1
    middle = torch.searchsorted(indptr, indptr[-1:] // 2)
    near = torch.cat([middle + step for step in (-2, -1, 0, 1)])
    some = torch.randint(0, rows, (SAMPLED,), device=indptr.device)
    ends = torch.tensor([0, rows - 1], device=indptr.device)
    return torch.cat([some, near, ends]).clamp_(0, rows - 1).unique()


def right_sums(found: Tensor, products: Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is the sum of these products, in float64, over the first dimension."""
    exact, size = products.sum(0), products.abs().sum(0)
    bound = error_bound(exact, size, products.shape[0], dtype=dtype)
    return bool(((found.double() - exact).abs() <= bound).all())


def right_rows(
    indptr: Tensor, indices: Tensor, values: Tensor, B: Tensor, C: Tensor, rows: Tensor
) -> bool:
    """Whether sampled rows of C are right."""
    if not bool(torch.isfinite(C).all()):
        return False
    for row in rows.tolist():
        begin, end = int(indptr[row]), int(indptr[row + 1])
        products = values[begin:end].double()[:, None] * B[indices[begin:end].long()].double()
        if not right_sums(C[row], products, B.dtype):
            return False
    return True


def right_columns(
    indptr: Tensor, indices: Tensor, values: Tensor, G: Tensor, dB: Tensor, columns: Tensor
) -> bool:
    """Whether sampled rows of Aᵀ·G are right: A is searched for the entries of these columns."""
    chosen = torch.zeros(dB.shape[0], dtype=torch.bool, device=dB.device)
    chosen[columns] = True
    places = torch.cat([
        chosen[indices[at : at + PART].long()].nonzero()[:, 0] + at
        for at in range(0, indices.numel(), PART)
    ])  # fmt: skip
    rows = torch.searchsorted(indptr, places, right=True) - 1
    for column in columns.tolist():
        mine = indices[places] == column
        products = values[places[mine]].double()[:, None] * G[rows[mine]].double()
        if not right_sums(dB[column], products, G.dtype):
            return False
    return bool(torch.isfinite(dB).all())


def right_entries(
    indptr: Tensor, indices: Tensor, G: Tensor, B: Tensor, found: Tensor, rows: Tensor
) -> bool:
    """Whether the gradients of the entries of sampled rows are right."""
    for row in rows.tolist():
        begin, end = int(indptr[row]), int(indptr[row + 1])
        products = B[indices[begin:end].long()].double() * G[row].double()
        if not right_sums(found[begin:end], products.T, B.dtype):
            return False
    return True


class Steps:
    """Runs steps, and prints a line for each."""

    def __init__(self, device: torch.device, out: Path | None, a_bytes: int) -> None:
        self.device, self.a_bytes, self.wrong = device, a_bytes, 0
        self._file = None if out is None else (out / "large_products.jsonl").open("a")
        self.common: dict[str, Any] = {}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, work: Callable[[], Any]) -> tuple[Any, float, float]:
        """Return a result, its seconds, and the memory that it took, as a share of A's bytes."""
        cuda = self.device.type == "cuda"
        self.wait()
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        found = work()
        self.wait()
        seconds = time.perf_counter() - started
        taken = torch.cuda.max_memory_allocated() - before if cuda else 0
        return found, seconds, taken / self.a_bytes

    def line(self, step: str, **fields: Any) -> None:
        self.wrong += fields.get("right", True) is False
        text = json.dumps({"step": step, **self.common, **fields})
        print(text, flush=True)
        if self._file is not None:
            print(text, file=self._file, flush=True)


def run(
    steps: Steps, indptr: Tensor, indices: Tensor, dtype: torch.dtype, n: int, gradients: bool
) -> None:
    """Every step in one type."""
    device, rows, entries = indptr.device, indptr.numel() - 1, indices.numel()
    values = torch.empty(entries, dtype=dtype, device=device)
    for part in values.split(PART):
        part.uniform_(-1, 1)
    steps.a_bytes = sum(each.nbytes for each in (indptr, indices, values))
    steps.common |= {"dtype": str(dtype).removeprefix("torch."), "a_bytes": steps.a_bytes}
    B = torch.randn(rows, n, device=device).to(dtype)
    A, chosen = (indptr, indices, values, (rows, rows)), sampled_rows(indptr)

    def times(product: Callable[[], Tensor]) -> dict[str, Any]:
        C, first, share = steps.peak(product)
        right = right_rows(indptr, indices, values, B, C, chosen)
        del C
        return {
            "right": right, "first_s": first, "peak_share": share,
            "seconds": measure(product, device, repeats=3),
        }  # fmt: skip

    steps.line("arrays", **times(lambda: st.spmm(A, B)))
    plan, seconds, share = steps.peak(lambda: st.plan(A, n=n, dtype=dtype))
    steps.line("planning", seconds=seconds, peak_share=share, plan=repr(plan))
    steps.line("plan", **times(lambda: plan @ B))
    if device.type == "cuda":
        del plan
        for algorithm in sorted(CSR_ALGORITHMS):
            # It takes offsets of 64 bits only with columns of 64 bits.
            wide = CSR(indptr, indices.long(), None, (rows, rows))
            cusparse(steps, wide, values, B, algorithm, times)
            del wide
    if not gradients:
        return
    G = torch.randn(rows, n, device=device).to(dtype)
    columns = torch.randint(0, rows, (SAMPLED,), device=device).unique()
    weights, x = values.detach().requires_grad_(), B.detach().requires_grad_()
    for kept in (False, True):
        C = st.functional.spmm(indptr, indices, weights, x)
        _, seconds, share = steps.peak(lambda C=C: C.backward(G))  # type: ignore[misc]
        del C
        assert weights.grad is not None and x.grad is not None
        right = right_columns(indptr, indices, values, G, x.grad, columns)
        right &= right_entries(indptr, indices, G, B, weights.grad, chosen)
        steps.line("gradients", right=right, transpose_kept=kept, seconds=seconds, peak_share=share)
        weights.grad = x.grad = None


def plan_gradient(steps: Steps, indptr: Tensor, indices: Tensor, n: int) -> None:
    """The gradient of a pattern's plan for B: what the transpose takes."""
    rows, device = indptr.numel() - 1, indptr.device
    plan = st.plan((indptr, indices, None, (rows, rows)), n=n, dtype=torch.bfloat16)
    steps.a_bytes = indptr.nbytes + indices.nbytes
    steps.common |= {"dtype": "bfloat16", "a_bytes": steps.a_bytes}
    ones = torch.ones((), dtype=torch.bfloat16, device=device).expand(indices.numel())
    x = torch.randn(rows, n, device=device).bfloat16().requires_grad_()
    G = torch.randn(rows, n, device=device).bfloat16()
    columns = torch.randint(0, rows, (SAMPLED,), device=device).unique()
    for kept in (False, True):
        C, first, share = steps.peak(lambda: plan @ x)
        _, seconds, _ = steps.peak(lambda C=C: C.backward(G))  # type: ignore[misc]
        assert x.grad is not None
        right = right_columns(indptr, indices, ones, G, x.grad, columns)
        steps.line(
            "plan-dB", right=right, transpose_kept=kept, forward_s=first, seconds=seconds,
            peak_share=share,
        )  # fmt: skip
        x.grad = None


def cusparse(
    steps: Steps, csr: CSR, values: Tensor, B: Tensor, algorithm: int,
    times: Callable[[Callable[[], Tensor]], dict[str, Any]],
) -> None:  # fmt: skip
    """One algorithm, or what the library says."""
    try:
        C = torch.full((csr.shape[0], B.shape[1]), float("nan"), dtype=B.dtype, device=B.device)
        product = CsrSpmm(csr, values, B, C, algorithm)
        steps.line(f"cusparse-{algorithm}", **times(product.run))
    except (RuntimeError, torch.OutOfMemoryError) as error:
        steps.line(f"cusparse-{algorithm}", refused=str(error)[:200])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--entries", type=int, default=3_000_000_000)
    parser.add_argument("--near", type=int)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    if options.cpu:
        options.rows, options.entries = 2000, 600_000
    torch.manual_seed(0)
    steps = Steps(device, options.out, 1)
    indptr, indices = matrix(options.rows, options.entries, options.near, device)
    steps.common = {
        "rows": options.rows, "entries": options.entries, "near": options.near, "n": options.n,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }  # fmt: skip
    if not options.no_gradients:
        plan_gradient(steps, indptr, indices, options.n)
    for name in options.dtype.split(","):
        run(steps, indptr, indices, getattr(torch, name), options.n, not options.no_gradients)
        st.clear_plan_cache()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 1 if steps.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
