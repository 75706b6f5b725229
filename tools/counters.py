"""Counters of NVIDIA's profiler for products of each system, as one JSON record.

    python -m tools.counters --data DIR --out FILE.json [--matrices a,b] [--commit TEXT]
                             [--time-limit SECONDS]

The papers argue with hit rates of caches, use of the Tensor Cores, bank conflicts and busy cycles
of SMs. This runs ``ncu`` once over a process that multiplies each matrix by each system and by
cuSPARSE's algorithms at N = 128 (``voltrix`` at 512 too), with clocks and caches as in use. A
product's entry holds the seconds of its kernels under the profiler, and the counters of the one
that takes longest. Exit code 1 if a product is wrong or ncu fails, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.operands import Operands
from sparsetile.cli.console import note
from sparsetile.core.errors import value_error
from sparsetile.data.catalog import load
from sparsetile.plan.planner import build_plan
from sparsetile.systems.brp.system import DIRECT
from sparsetile.systems.voltrix.system import UNBALANCED
from tools.record import ROOT, machine_facts, write_json
from tools.study import CUSPARSE, WRONG, Case, Found, error_of, with_random_values

SCHEMA = 1
MATRICES = ("PubMed", "CoauthorCS", "CoauthorPhysics", "DD", "ogbl-ddi", "bcsstk32")
N, WIDE = 128, 512
PAPER = "1x4"
# What a counter is called here, and ncu's names for it: the first that this ncu knows is read.
COUNTERS = {
    "seconds": ("gpu__time_duration.sum",),
    "registers": ("launch__registers_per_thread",),
    "l1_hits": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hits": ("lts__t_sector_hit_rate.pct",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "bank_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    ),
    "tensor_cycles": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "sm_throughput": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "least_active_cycles": ("sm__cycles_active.min",),
    "mean_active_cycles": ("sm__cycles_active.avg",),
    "most_active_cycles": ("sm__cycles_active.max",),
}
# The kernel that separates one product's from the next one's.
_BETWEEN = "spin_kernel"


@dataclass(frozen=True)
class Product:
    """One product that is profiled; without a system, that of a baseline."""

    name: str
    system: str | None = None
    ablation: str | None = None
    dtype: torch.dtype = torch.float32
    n: int = N


PRODUCTS = (
    *(Product(name) for name in CUSPARSE),
    Product("csr", "csr"),
    Product("acc", "acc"),
    Product("rsh", "rsh"),
    Product("wcsr", "wcsr"),
    Product(f"brp {PAPER}", "brp", PAPER),
    Product(f"brp {DIRECT}", "brp", DIRECT),
    Product("voltrix", "voltrix"),
    Product("voltrix 512", "voltrix", n=WIDE),
    Product(f"voltrix 512 {UNBALANCED}", "voltrix", UNBALANCED, n=WIDE),
    Product("acc float16", "acc", dtype=torch.float16),
    Product("rsh float16", "rsh", dtype=torch.float16),
)


def _runner(case: Case, product: Product) -> Callable[[], Tensor]:
    """Return the product as a call; raises if the matrix or the GPU does not suit it."""
    B, _ = case.operands(product.n, product.dtype)
    if product.system is None:
        return BASELINES[product.name].prepare(Operands(case.csr, B, None, "spmm", "sum")).run
    plan = build_plan(
        case.csr, product.n, dtype=product.dtype, system=product.system,
        ablation=product.ablation, reorder="identity",
    )  # fmt: skip
    return lambda: plan.run(B)


def multiply(data: Path, names: Sequence[str], out: Path) -> int:
    """What is profiled: run each product, and write which of them ran and how exact they were."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device, runtime = torch.device("cuda", 0), torch.cuda.cudart()
    ran: list[Found] = []
    for matrix in names:
        case = with_random_values(Case(matrix, load(matrix, data), device))
        for product in PRODUCTS:
            entry: Found = {"matrix": matrix, "product": product.name}
            try:
                run = _runner(case, product)
                for _ in range(2):
                    C = run()
                torch.cuda.synchronize()
                runtime.cudaProfilerStart()
                torch.cuda._sleep(1000)
                run()
                torch.cuda.synchronize()
                runtime.cudaProfilerStop()
                entry["error"] = error_of(C, case.operands(product.n, product.dtype)[1])
            except (RuntimeError, ValueError) as error:
                entry["skipped"] = " ".join(str(error).split())[:300]
            ran.append(entry)
            out.write_text(json.dumps(ran))
    return 0


def known_counters(ncu: str) -> dict[str, str]:
    """Return ncu's name of each counter that it has here."""
    asked = [ncu, "--query-metrics", "--query-metrics-mode", "base"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    found = {}
    for name, candidates in COUNTERS.items():
        for candidate in candidates:
            if candidate.startswith("launch__") or candidate.split(".")[0] in listed:
                found[name] = candidate
                break
    return found


def kernels_of(text: str, counters: dict[str, str]) -> Iterator[list[Found]]:
    """Return the kernels of each product in ncu's table, a kernel as its counters by our names."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if not rows:
        return
    head = rows[0]
    place = {name: head.index(column) for name, column in counters.items() if column in head}
    kernel = head.index("Kernel Name")
    group: list[Found] | None = None
    for row in rows[2:]:  # the second has the units
        if _BETWEEN in row[kernel]:
            if group is not None:
                yield group
            group = []
        elif group is not None:
            numbers = {name: _number(row[at]) for name, at in place.items()}
            group.append({"kernel": row[kernel].partition("(")[0], **numbers})
    if group is not None:
        yield group


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def summary(kernels: Sequence[Found]) -> Found:
    """Return one product's entry: what its kernels took, in seconds, and the longest one's
    counters."""
    longest = max(kernels, key=lambda kernel: kernel["seconds"] or 0.0)
    seconds = 1e-9 * sum(kernel["seconds"] or 0.0 for kernel in kernels)
    return {**longest, "seconds": seconds, "kernels": len(kernels)}


def _profile(ncu: str, asked: argparse.Namespace, folder: Path) -> tuple[list[Found], str]:
    """Return the products that ran and what ncu wrote."""
    counters = known_counters(ncu)
    note(f"counters: {', '.join(counters)}; unknown here: {sorted(set(COUNTERS) - set(counters))}")
    table, ran = folder / "ncu.csv", folder / "ran.json"
    command = [
        ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join(counters.values()), "--csv", "--page", "raw", "--print-units",
        "base", "--log-file", str(table), sys.executable, "-m", "tools.counters", "--data",
        str(asked.data), "--matrices", asked.matrices, "--multiply", str(ran),
    ]  # fmt: skip
    try:
        subprocess.run(command, cwd=ROOT, check=False, timeout=asked.time_limit)
    except subprocess.TimeoutExpired:
        note("counters: the time limit ended the run: later products are missing")
    text = table.read_text() if table.is_file() else ""
    groups = list(kernels_of(text, counters))
    entries = json.loads(ran.read_text()) if ran.is_file() else []
    measured = [entry for entry in entries if "skipped" not in entry]
    for entry, kernels in zip(measured, groups, strict=False):
        if kernels:
            entry["counters"] = summary(kernels)
    problems = "" if groups else " ".join(text.split())[-600:] or "ncu wrote nothing"
    return entries, problems


def main(arguments: Sequence[str]) -> int:
    """Profile, write the record, and return the exit code."""
    parser = argparse.ArgumentParser(prog="counters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--matrices", default=",".join(MATRICES), help="names, comma-separated")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--multiply", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(list(arguments))
    names = [name for name in asked.matrices.split(",") if name]
    if asked.multiply is not None:
        return multiply(asked.data, names, asked.multiply)
    try:
        if asked.out is None:
            raise value_error("counters", "--out", "a file", "nothing", "Name the record")
        facts = machine_facts()
        ncu = shutil.which("ncu")
        if ncu is None:
            raise value_error(
                "counters", "ncu", "NVIDIA's profiler on the PATH", "none", "Install the toolkit"
            )
    except ValueError as error:
        note(f"counters: error: {error}")
        return 2
    with tempfile.TemporaryDirectory(prefix="sparsetile-counters-") as folder:
        entries, problem = _profile(ncu, asked, Path(folder))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": asked.commit or source_commit(),
        **facts,
        "n": N,
        "products": entries,
    }
    wrong = [e for e in entries if "skipped" not in e and not _right(e["error"])]
    for entry in wrong:
        note(f"counters: wrong: {entry['matrix']}, {entry['product']}: {entry['error']}")
    if problem:
        note(f"counters: error: no counters: {problem}")
        return 1
    write_json(record, asked.out)
    note(f"counters: wrote {asked.out}")
    return 1 if wrong else 0


def _right(error: float | None) -> bool:
    return error is not None and error <= WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
