"""Measures what ``st.plan`` chooses by itself, on all matrices of a folder, beside cuSPARSE, dense.

    python -m tools.unseen_times --data DIR --out results/h200 --time-limit 150

A figure is one matrix, type (TF32, float16, exact float32) and width. It has the kernel time of
``st.plan(A, n)`` right after planning and after it has grown, of ``st.plan(A, n,
expected_runs=10_000)``, of cuSPARSE's three algorithms in float32 and of dense in the same type,
from replayed CUDA graphs in one run. Every result of a plan is compared with float64 first.

``grown`` is what a plan chooses once it has computed as many products as pay for comparing all
systems (``later``; null: it keeps its first choice). They are counted, not computed. Dense is left
out where reading A written out would take twice as long as cuSPARSE.

Processes make all plans once beside each other, so that kernels are compiled before anything is
timed. Neither they nor the measurement use the machine's kept timings. The record
``unseen.jsonl`` in the folder of --out has the environment in its first line, then a line for each
figure and for what was skipped. Exit code 1 if a result was wrong or a figure failed.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import operator
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile.bench.analysis import geomean
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit, describe_environment
from sparsetile.bench.operands import Operands
from sparsetile.cli.console import note, print_table
from tools.fresh_cases import (
    Case,
    Context,
    Figure,
    Figures,
    graph_time,
    matrix_names,
    poison,
    sampled_error,
    tf32,
    wrong,
)

__all__ = ["MODES", "TYPES", "main", "summary"]

# Type of B and C, and whether torch allows TF32.
TYPES = {
    "TF32": (torch.float32, True),
    "float16": (torch.float16, False),
    "float32": (torch.float32, False),
}
# Plans, by what is measured of them.
MODES = ("planned", "grown", "10000 runs")
RUNS = 10_000
PART = "unseen"
# Dense is measured if A, written out, is read within this multiple of cuSPARSE's time.
DENSE_TIMES, BYTES_A_SECOND = 2.0, 4.2e12
PROCESSES = 14


def _plan(A: Tensor, n: int, dtype: torch.dtype, mode: str) -> tuple[st.Plan, Figure]:
    """A plan of a mode, and what is known of it. ``grown`` has made its comparison."""
    plan = st.plan(A, n, dtype=dtype, expected_runs=RUNS if mode == "10000 runs" else None)
    if mode != "grown":
        return plan, {}
    later = plan._variant.later
    if later is None:
        return plan, {"later": None}
    known = {"later": later.left}
    later.left = 1
    plan @ torch.zeros(A.shape[1], n, dtype=dtype, device=A.device)
    return plan, known


def _dense(case: Case, B: Tensor, least: float) -> float:
    """Seconds of a dense product; infinite if it is left out, as without a GPU."""
    rows, cols = case.csr.shape
    if math.isinf(least) or rows * cols * B.element_size() > DENSE_TIMES * least * BYTES_A_SECOND:
        return math.inf
    operands = Operands(case.csr, B, None, "spmm", "sum")
    return graph_time(BASELINES["torch-dense"].prepare(operands).run, case.device).median


def _figure(case: Case, kind: str, n: int) -> Figure:
    """Kernel times of one matrix, type and width."""
    dtype, allowed = TYPES[kind]
    B, A = case.dense(n), case.fresh()
    if dtype is torch.float16:  # away from zero: single products must not be subnormal
        B += 16.0 * torch.sign(B)
    B = B.to(dtype)
    found: Figure = {"type": kind, "n": n, "nnz": case.csr.nnz, "rows": case.rows}
    found |= {"us": {}, "systems": {}}
    values = A.values().to(dtype).to(torch.float32)
    for mode in MODES:
        plan, known = _plan(A, n, dtype, mode)
        run = functools.partial(operator.matmul, plan, B)
        poison((case.rows, n), dtype, case.device)
        error = sampled_error(A.crow_indices(), A.col_indices(), values, B, run())
        found |= known | wrong(
            max(error, found.get("error", 0.0)), allowed or dtype is torch.float16
        )
        if found.get("wrong"):
            return found
        found["us"][mode] = 1e6 * graph_time(run, case.device).median
        order = plan._variant.permutation.name
        found["systems"][mode] = plan.system + ("" if order == "identity" else f", {order}")
    baselines = case.baselines(n)
    found["us"] |= {name: 1e6 * each for name, each in baselines.kernel.items()}
    best = min(baselines.kernel.values(), default=math.inf)
    dense = _dense(case, B, best)
    if math.isfinite(dense):
        found["us"]["dense"] = 1e6 * dense
    if math.isfinite(best):
        ours = {mode: 1e-6 * found["us"][mode] for mode in MODES}
        found["ratios"] = {mode: best / each for mode, each in ours.items()} | {
            f"{mode} over the best": min(best, dense) / each for mode, each in ours.items()
        }
    return found | baselines.facts


def _cells(kinds: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, int]]:
    for n in widths:
        for kind in kinds:
            yield kind, n


def _compile(asked: tuple[str, Path, str, Sequence[str], Sequence[int]]) -> str:
    """Make the plans of one matrix and multiply once, in a process of its own; return errors."""
    name, data, device, kinds, widths = asked
    problems = []
    try:
        case = _case(name, data, torch.device(device))
        for kind, n in _cells(kinds, widths):
            dtype, allowed = TYPES[kind]
            with tf32(allowed):
                for mode in MODES[1:]:  # what a plan begins with is in `grown`
                    plan, _ = _plan(case.fresh(), n, dtype, mode)
                    plan @ case.dense(n).to(dtype)
    except Exception as error:  # the figure fails too, and says so
        problems.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(problems)


def _case(name: str, data: Path, device: torch.device) -> Case:
    context = Context(device, data, [], Figures(Path(os.devnull)), torch.int64, small=False)
    return context.case(name)


def _own_timings(folder: str) -> None:
    """Keep timings of close calls in a folder that nothing else reads."""
    os.environ["SPARSETILE_TUNE_DIR"] = folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _compile_all(
    names: Sequence[str], data: Path, device: str, kinds: Sequence[str], widths: Sequence[int]
) -> None:
    """Compile what the plans need, in processes; those of the largest matrices begin first."""
    sizes = {name: (data / f"{name}.npz").stat().st_size for name in names}
    asked = [
        (name, data, device, kinds, widths) for name in sorted(names, key=lambda each: -sizes[each])
    ]
    context = multiprocessing.get_context("spawn")  # a forked process has no CUDA
    with (
        tempfile.TemporaryDirectory() as folder,
        context.Pool(min(PROCESSES, len(names)), _own_timings, (folder,)) as pool,
    ):
        for problem in pool.imap_unordered(_compile, asked):
            if problem:
                note(f"unseen_times: compiling: {problem}")


def summary(figures: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows: type, N, mode, matrices, mean over cuSPARSE, lowest over the best, how many are low."""
    made = []
    for kind in TYPES:
        for n in sorted({line["n"] for line in figures}):
            chosen = [
                line for line in figures
                if (line["type"], line["n"]) == (kind, n) and "ratios" in line
            ]  # fmt: skip
            for mode in MODES if chosen else ():
                mean = geomean(line["ratios"][mode] for line in chosen)
                over = sorted(
                    (line["ratios"][f"{mode} over the best"], line["subject"]) for line in chosen
                )
                below = sum(ratio < 0.97 for ratio, _ in over)
                lowest = f"{over[0][0]:.2f} {over[0][1]}"
                made.append(
                    [kind, str(n), mode, str(len(chosen)), f"{mean:.3f}", lowest, str(below)]
                )
    return made


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="unseen_times", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--matrices", default="all", help="all, core, or names with commas")
    parser.add_argument("--types", default=",".join(TYPES), help="types with commas")
    parser.add_argument("--widths", default="32,128,512", help="widths with commas")
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(words)
    asked.widths = [int(n) for n in asked.widths.split(",")]
    asked.types = asked.types.split(",")
    if unknown := set(asked.types) - set(TYPES):
        parser.error(f"--types must be of {', '.join(TYPES)}, got {', '.join(sorted(unknown))}")
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, none is here. Pass --device cpu")
    return asked


def _measure(context: Context, kinds: Sequence[str], widths: Sequence[int]) -> None:
    def measure(case: Case) -> None:
        for kind, n in _cells(kinds, widths):
            with tf32(TYPES[kind][1]):
                named = functools.partial(_figure, case, kind, n)
                context.attempt(PART, f"N={n} {kind}", case.name, named)

    context.each_matrix(PART, measure)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the table; return 1 if a result was wrong or failed."""
    asked = _parse(words)
    begun = time.perf_counter()
    figures = Figures(asked.out / "unseen.jsonl")
    names = matrix_names(asked.matrices, asked.data)
    figures.begin(
        describe_environment(asked.device)
        | {"commit": asked.commit or commit(), "matrices": len(names)}
    )
    if asked.device == "cuda":
        _compile_all(names, asked.data, asked.device, asked.types, asked.widths)
        note(f"unseen_times: compiled after {time.perf_counter() - begun:.1f} s")
    context = Context(
        torch.device(asked.device), asked.data, names, figures, torch.int64, small=False
    )
    context.deadline = begun + asked.time_limit
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        _own_timings(folder)
        _measure(context, asked.types, asked.widths)
    found = [line for line in figures.of(PART) if "type" in line]
    print_table(
        ("type", "N", "plan", "matrices", "over cuSPARSE", "lowest over the best", "below 0.97"),
        summary(found), right=("N", "matrices", "over cuSPARSE", "below 0.97"),
    )  # fmt: skip
    problems = figures.problems(PART)
    for text in problems[:20]:
        note(f"unseen_times: {text}")
    note(f"unseen_times: {len(found)} figures in {time.perf_counter() - begun:.1f} s")
    return int(any(text.startswith(("failed", "wrong")) for text in problems))


if __name__ == "__main__":
    raise SystemExit(main())
