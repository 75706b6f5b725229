"""Products on the CPU beside scipy's, in one process: a record in minutes.

    python -m tools.cpu_times --data DIR --out results/cpu

writes ``cpu_times.jsonl``: the environment, then one line for each matrix of the core suite, type
(float32, float64) and width (1, 8, 32, 128) with the medians of scipy's ``A @ B``, of a plan and of
``st.spmm`` without a plan, measured in turns; then the fixed cost of a product of 10 x 10 and the
first product of a process, after one process has left compiled code on disk. Every product is
compared with float64 first. ``sparsetile bench cpu`` measures more baselines and takes longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import matmul
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy.sparse
import torch

import sparsetile as st
from sparsetile.bench.analysis import geomean
from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_table
from sparsetile.data.catalog import load
from sparsetile.data.suites import members

__all__ = ["DTYPES", "WIDTHS", "first_product", "fixed_cost", "main", "products", "turns"]

DTYPES, WIDTHS = ("float32", "float64"), (1, 8, 32, 128)
_ROUNDS = 11
_ROUND_SECONDS = 0.006  # of each product in a round, if one takes less
_FIRST = """
import time, torch, sparsetile as st
A = torch.eye(1000).to_sparse_csr()
B = torch.ones(1000, 32)
wall, cpu = time.perf_counter(), time.process_time()
st.spmm(A, B)
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def turns(calls: Mapping[str, Callable[[], Any]], rounds: int = _ROUNDS) -> dict[str, float]:
    """Return the median seconds of each call, measured in turns."""
    repeats = {}
    for name, call in calls.items():
        call()
        begun = time.perf_counter()
        call()
        repeats[name] = max(1, int(_ROUND_SECONDS / max(time.perf_counter() - begun, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.perf_counter() - begun) / repeats[name])
    return {name: median(found) for name, found in seconds.items()}


def _operands(A: st.CSR, dtype: str, n: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return A for scipy and for torch, with random values, and B."""
    torch.manual_seed(n)
    element = getattr(torch, dtype)
    values, B = torch.randn(A.nnz, dtype=element), torch.randn(A.shape[1], n, dtype=element)
    indptr = A.indptr.int()  # as scipy has them
    theirs = scipy.sparse.csr_array((values.numpy(), A.indices.numpy(), indptr.numpy()), A.shape)
    ours = torch.sparse_csr_tensor(indptr, A.indices, values, A.shape, check_invariants=False)
    return theirs, ours, B


def _worst(found: Any, theirs: Any, B: torch.Tensor) -> float:
    """Return the largest error over the bound of a sum's rounding, element by element."""
    exact = theirs.astype(np.float64) @ B.double().numpy()
    size = abs(theirs).astype(np.float64) @ B.double().abs().numpy()
    entries = np.diff(theirs.indptr)[:, None] + 1
    bound = entries * np.finfo(theirs.dtype).eps * size + np.finfo(theirs.dtype).tiny
    return float((np.abs(found.numpy() - exact) / bound).max(initial=0.0))


def products(data: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the line of each product."""
    for name in names:
        A = load(name, data)
        for dtype in DTYPES:
            for n in WIDTHS:
                theirs, ours, B = _operands(A, dtype, n)
                plan, dense = st.plan(ours, n, system="cpu"), B.numpy()
                calls: dict[str, Callable[[], Any]] = {
                    "scipy": partial(matmul, theirs, dense),
                    "plan": partial(matmul, plan, B),
                    "spmm": partial(st.spmm, ours, B),
                }
                worst = max(_worst(calls[call](), theirs, B) for call in ("plan", "spmm"))
                line = {"matrix": name, "rows": A.shape[0], "nnz": A.nnz, "dtype": dtype, "n": n}
                yield line | {"error_over_bound": worst, "seconds": turns(calls)}


def fixed_cost() -> dict[str, Any]:
    """Return the seconds of a product of 10 x 10 with one column."""
    A = st.CSR(torch.arange(11), torch.arange(10).int(), torch.ones(10), (10, 10))
    theirs, ours, B = _operands(A, "float32", 1)
    plan, dense = st.plan(ours, 1), B.numpy()
    calls: dict[str, Callable[[], Any]] = {
        "scipy": partial(matmul, theirs, dense),
        "plan": partial(matmul, plan, B),
        "spmm": partial(st.spmm, ours, B),
    }
    return {"what": "fixed cost, 10 x 10", "seconds": turns(calls, 51)}


def first_product(processes: int = 6) -> dict[str, Any]:
    """Return the seconds of the first product of a process: medians of all but the first one."""
    found = []
    for _ in range(processes):
        words = [sys.executable, "-W", "ignore", "-c", _FIRST]
        made = subprocess.run(words, capture_output=True, text=True, check=True)
        found.append([float(each) for each in made.stdout.split()])
    wall, cpu = (median(each) for each in zip(*found[1:], strict=True))
    return {"what": "first product of a process", "seconds": {"wall": wall, "cpu": cpu}}


def _show(lines: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for dtype in DTYPES:
        for n in WIDTHS:
            chosen = [each for each in lines if (each["dtype"], each["n"]) == (dtype, n)]
            for system in ("plan", "spmm"):
                ratios = {
                    each["matrix"]: each["seconds"]["scipy"] / each["seconds"][system]
                    for each in chosen
                }
                if ratios:
                    worst = min(ratios, key=ratios.__getitem__)
                    mean = f"{geomean(ratios.values()):.2f}"
                    rows.append([dtype, str(n), system, mean, f"{ratios[worst]:.2f} {worst}"])
    print_table(("dtype", "N", "by", "over scipy", "worst"), rows, right=("N", "over scipy"))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the record, print tables; return 1 if a product was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--matrices", help="names with commas instead of the core suite")
    asked = parser.parse_args(words)
    names = asked.matrices.split(",") if asked.matrices else [m.name for m in members("core")]
    environment = describe_environment("cpu") | {"commit": commit()}
    lines = list[dict[str, Any]]()
    for line in products(asked.data, names):
        lines.append(line)
        if (line["dtype"], line["n"]) == (DTYPES[-1], WIDTHS[-1]):
            note(f"cpu_times: {line['matrix']}")
    more = [fixed_cost(), first_product()]
    record = [{"environment": environment}, *lines, *more]
    asked.out.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(each) + "\n" for each in record)
    (asked.out / "cpu_times.jsonl").write_text(text, encoding="utf-8")
    _show(lines)
    for each in more:
        times = ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in each["seconds"].items())
        print(f"{each['what']}: {times}")
    wrong = [each for each in lines if each["error_over_bound"] > 1]
    for each in wrong:
        note(f"cpu_times: wrong: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
