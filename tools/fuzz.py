"""Checks random products and layers; replays any of them by its number.

    python -m tools.fuzz --seconds 200 --device cuda --processes 12 [--kind KIND] [--seed S]
                         [--cases N] [--out DIR]
    python -m tools.fuzz --device cuda --kind products --replay NUMBER

``--kind products``: shapes, structures, containers, types, systems, row orders, layouts, epilogues,
reductions, NaN and Inf, transposes, updates, plan files, gradients and one-call products are drawn
by ``tools/fuzz_cases.py``; ``tools/fuzz_judge.py`` checks the results.
``--kind layers``: layers of ``sparsetile.nn``, PyG's under the patch, one-call products and pruned
models are called several times, and their tensors are changed in between (``tools/fuzz_layers.py``,
``tools/fuzz_layer_checks.py``). By default both kinds are drawn. Each failure is one line: how to
replay it, the case, what was wrong. Each process runs the cases of its own seed
(``tools/fuzz_pool.py``); on a GPU they share it (``tools/shared_gpu.py``). With ``--out`` the
counts are written to ``DIR/<gpu or cpu>/fuzz.json``.
Exit code 1 when a case failed, 2 for bad usage, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.cli.console import note
from tools.as_capability import capability_of
from tools.fuzz_cases import CASES_OF_A_SEED, Case
from tools.fuzz_checks import run_case
from tools.fuzz_layer_checks import own_pyg, run_layer_case
from tools.fuzz_layers import KINDS, LAYERS, LayerCase, draw_case
from tools.fuzz_pool import (
    Outcome,
    Tally,
    Work,
    case_numbers,
    check_usage,
    emptied,
    judged,
    print_outcomes,
    proof,
    read_run,
    run_in_processes,
    run_tool,
    tool_parser,
)
from tools.shared_gpu import is_shared, shared_gpu

SCHEMA = 3  # 3: a digest for each part of the code
RECORD_NAME = "fuzz.json"
# Cases of each kind in a record that is committed.
FEWEST_CASES = {
    "cpu": {"products": 20_000, "layers": 20_000},
    "cuda": {"products": 20_000, "layers": 5_000},
}
# Of a GPU that was treated as an older one.
FEWEST_AS = {"products": 3_500, "layers": 1_000}
FEWEST_TOGETHER_AS = 5_000


def try_case(case: Case | LayerCase, folder: Path) -> Outcome:
    """Run one case and judge its result or its error."""

    def run() -> str:
        if isinstance(case, LayerCase):
            run_layer_case(case)
            return case.layer
        return run_case(case, folder).system

    return judged(case, run, may_refuse=not isinstance(case, LayerCase))


def _cases(
    device: str, seed: int, numbers: Iterable[int], kind: str, begins: Callable[[int], None]
) -> Iterator[Outcome]:
    """Run cases of a seed, in order; ``begins`` is called with the number of each."""
    with own_pyg(), tempfile.TemporaryDirectory() as name:
        for number in numbers:
            begins(number)
            yield _quietly(draw_case(seed, number, device, kind), Path(name))
            if number % 200 == 199:
                st.clear_plan_cache()
                emptied(Path(name))


def fuzz(device: str, seed: int, cases: int, kind: str = "all") -> dict[str, Any]:
    """Run the first cases of a seed in this process; return the counts for the record."""
    tally = Tally(note)
    for outcome in _cases(device, seed, range(cases), kind, lambda number: None):
        tally.add(outcome)
    return tally.found()


def worker(device: str, seed: str, first: str, until: str, alone: str, kind: str) -> None:
    """Run the cases of a seed and print the outcome of each, for ``tools.fuzz_pool``."""
    if alone == "0":
        torch.set_num_threads(1)
    numbers = case_numbers(int(first), float(until))
    print_outcomes(
        device, int(seed), lambda begins: _cases(device, int(seed), numbers, kind, begins)
    )


def _quietly(case: Case | LayerCase, folder: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SparseLinear: blocks of .* do not divide")
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        warnings.filterwarnings("ignore", category=sp.SparseEfficiencyWarning)
        return try_case(case, folder)


def check_fuzz(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of a GPU, one sentence each; empty when all is right."""
    forms = {"kinds": dict, "systems": dict, "layers": dict, "failures": list}
    record, problems, again = read_run(path, "fuzz", SCHEMA, forms, {})
    if not record:
        return problems
    least = FEWEST_CASES.get(str(record.get("device")), {})
    if capability_of(record) is not None:
        least = FEWEST_AS
        if (found := sum(record["kinds"].values())) < FEWEST_TOGETHER_AS:
            problems.append(f"{path}: {found} cases, fewer than {FEWEST_TOGETHER_AS}; {again}")
    for kind, fewest in least.items():
        cases = record["kinds"].get(kind, 0)
        if cases < fewest:
            problems.append(f"{path}: {cases} cases of {kind}, fewer than {fewest}; {again}")
    # A machine without PyG draws others instead of its layers.
    uncalled = sorted({name for name in LAYERS if "pyg" not in name} - set(record["layers"]))
    if uncalled:
        problems.append(f"{path}: no call of {', '.join(uncalled)}; {again}")
    return problems + [f"{path}: {line}" for line in record["failures"]]


def _replay(case: Case | LayerCase) -> int:
    for field in fields(case):
        print(f"{field.name} = {getattr(case, field.name)!r}")
    with tempfile.TemporaryDirectory() as name:
        outcome = _quietly(case, Path(name))
    print(f"ran on: {outcome.system}")
    print(f"outcome: {outcome.wrong or outcome.refused or 'right'}")
    return 1 if outcome.wrong else 0


def _run(asked: argparse.Namespace) -> int:
    check_usage("fuzz", asked, seed=0, replay=0, processes=1, cases=1)
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    if asked.replay is not None:
        seed, number = divmod(asked.replay, CASES_OF_A_SEED)
        return _replay(draw_case(seed, number, asked.device, asked.kind))
    device, kind = asked.device, asked.kind
    work = Work("fuzz", device, lambda s, number: draw_case(s, number, device, kind), (kind,))

    def run() -> dict[str, Any]:
        share = device == "cuda" and asked.processes > 1
        alone: contextlib.AbstractContextManager[dict[str, str]] = contextlib.nullcontext({})
        with shared_gpu() if share else alone as around:
            counts = run_in_processes(
                work, seed, asked.seconds, asked.processes, note, around, asked.cases or math.inf
            )
            mps = share and is_shared(around)
        return {"processes": asked.processes, "mps": mps, "kind": kind, **counts}

    found = proof("fuzz", SCHEMA, asked, run)
    ran = {**found["kinds"], **found["systems"]}
    counts = ", ".join(f"{name} {count}" for name, count in ran.items())
    refused = sum(found["refusals"].values())
    note(
        f"fuzz: seed {seed}: {found['cases']} cases in {found['seconds']} s ({counts}), "
        f"{refused} refused, {len(found['failures'])} failed"
    )
    return 1 if found["failures"] else 0


def main(arguments: Sequence[str]) -> int:
    """Fuzz, or replay a case, and return the exit code."""
    parser = tool_parser("fuzz", __doc__, 300.0, "each with a seed of its own")
    parser.add_argument("--kind", choices=KINDS, default="all", help="what is drawn")
    parser.add_argument("--cases", type=int, help="end after this many, before the seconds are up")
    return run_tool(parser, arguments, _run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
