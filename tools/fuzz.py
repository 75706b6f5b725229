"""Checks random products and layers; replays any of them by its number.

    python -m tools.fuzz --seconds 200 --device cuda --processes 12 [--kind KIND] [--seed S]
                         [--out DIR]
    python -m tools.fuzz --device cuda --kind products --replay NUMBER

``--kind products``: shapes, structures, containers, types, systems, row orders, layouts, epilogues,
reductions, NaN and Inf, transposes, updates, plan files, gradients, one-call products and wrong
calls are drawn by ``tools/fuzz_cases.py``; ``tools/fuzz_judge.py`` checks the results.
``--kind layers``: layers of ``sparsetile.nn``, PyG's under the patch, one-call products and pruned
models are called several times, and their tensors are changed in between (``tools/fuzz_layers.py``,
``tools/fuzz_layer_checks.py``). By default both kinds are drawn. Each failure is one line: how to
replay it, the case, what was wrong. Each process runs the cases of its own seed
(``tools/fuzz_pool.py``). With ``--out`` the counts are written to ``DIR/<gpu or cpu>/fuzz.json``.
Exit code 1 when a case failed, 2 for bad usage, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.cli.console import note
from sparsetile.core.errors import UnsupportedError, value_error
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from sparsetile.systems.registry import exact_system
from tools.fuzz_cases import CASES_OF_A_SEED, Case
from tools.fuzz_checks import run_case
from tools.fuzz_judge import Run, Wrong
from tools.fuzz_layer_checks import own_pyg, run_layer_case
from tools.fuzz_layers import KINDS, LAYERS, LayerCase, draw_case
from tools.fuzz_pool import Outcome, Tally, Work, case_numbers, emptied, run_in_processes
from tools.fuzz_refusals import grouped, is_refusal
from tools.parts import part_digests
from tools.record import device_facts, read_proof, write_json

SCHEMA = 3  # 3: a digest for each part of the code
RECORD_NAME = "fuzz.json"
# Cases of each kind in a record that is committed.
FEWEST_CASES = {
    "cpu": {"products": 20_000, "layers": 20_000},
    "cuda": {"products": 20_000, "layers": 5_000},
}


def try_case(case: Case | LayerCase, folder: Path) -> Outcome:
    """Run one case and judge its result or its error."""
    if isinstance(case, LayerCase):
        return _try_layer(case)
    try:
        run: Run = run_case(case, folder)
    except Wrong as error:
        return Outcome(case, case.system, wrong=str(error))
    except UnsupportedError as error:
        # Only a system that was chosen by name may reject the case.
        able = ("auto", exact_system(case.device).name)
        if is_refusal(error) and case.system not in able:
            return Outcome(case, case.system, refused=grouped(error, case.system))
        return Outcome(case, case.system, wrong=_described(error))
    except Exception as error:
        return Outcome(case, case.system, wrong=_described(error))
    return Outcome(case, run.system, refused=run.refused)


def _try_layer(case: LayerCase) -> Outcome:
    try:
        run_layer_case(case)
    except Wrong as error:
        return Outcome(case, case.layer, wrong=str(error))
    except Exception as error:
        return Outcome(case, case.layer, wrong=_described(error))
    return Outcome(case, case.layer)


def _described(error: BaseException) -> str:
    """The error with the line of the package or tool that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "sparsetile" in f.filename or "fuzz" in f.filename]
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}: {' '.join(str(error).split())[:300]}"


def _cases(
    device: str, seed: int, first: int, until: float, kind: str, begins: Callable[[int], None]
) -> Iterator[Outcome]:
    """Run the cases of a seed, in order; ``begins`` is called with the number of each."""
    with own_pyg(), tempfile.TemporaryDirectory() as name:
        for number in case_numbers(first, until):
            begins(number)
            yield _quietly(draw_case(seed, number, device, kind), Path(name))
            if number % 200 == 199:
                st.clear_plan_cache()
                emptied(Path(name))


def fuzz(device: str, seed: int, seconds: float, kind: str = "all") -> dict[str, Any]:
    """Run the cases of a seed in this process; return the counts for the record."""
    tally = Tally(note)
    until = time.monotonic() + seconds
    for outcome in _cases(device, seed, 0, until, kind, lambda number: None):
        tally.add(outcome)
    return tally.found()


def worker(device: str, seed: str, first: str, until: str, alone: str, kind: str) -> None:
    """Run the cases of a seed and print the outcome of each, for ``tools.fuzz_pool``."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints

    def say(**facts: Any) -> None:
        messages.write(json.dumps(facts) + "\n")

    if alone == "0":
        torch.set_num_threads(1)
    if device == "cuda":
        say(compiled="imports")
        warm(device, int(seed), lambda name: say(compiled=name))
    arguments = (device, int(seed), int(first), float(until), kind)
    for outcome in _cases(*arguments, lambda number: say(case=number)):
        say(case=outcome.case.number, system=outcome.system, wrong=outcome.wrong,
            refused=outcome.refused)  # fmt: skip
        if outcome.wrong and device == "cuda":
            torch.cuda.synchronize()  # raises if the context is lost: a new process continues


def warm(device: str, turn: int, say: Callable[[str], None]) -> None:
    """Compile row orders, each process another one first; the cache on disk is shared."""
    rows = torch.arange(300).repeat_interleave(8)
    A = (torch.stack([rows, (rows * 7 + torch.arange(2400) % 8 * 31) % 300]), None, (300, 300))
    names = sorted(REORDERERS)
    for k in range(len(names)):
        with contextlib.suppress(UnsupportedError):
            st.plan(A, 8, reorder=names[(turn + k) % len(names)], device=device)
        say(names[(turn + k) % len(names)])


def _quietly(case: Case | LayerCase, folder: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SparseLinear: blocks of .* do not divide")
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        warnings.filterwarnings("ignore", category=sp.SparseEfficiencyWarning)
        return try_case(case, folder)


def check_fuzz(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of a GPU, one sentence each; empty when all is right."""
    again = "run `python -m tools.fuzz` on that GPU again"
    record, problems = read_proof(path, SCHEMA, again)
    if not record:
        return problems
    forms = {"failures": list, "systems": dict, "layers": dict, "kinds": dict}
    if not all(isinstance(record.get(name), form) for name, form in forms.items()):
        return [f"{path}: does not count kinds, systems, layers and failures; {again}"]
    for kind, fewest in FEWEST_CASES.get(str(record.get("device")), {}).items():
        cases = record["kinds"].get(kind, 0)
        if cases < fewest:
            problems.append(f"{path}: {cases} cases of {kind}, fewer than {fewest}; {again}")
    # A machine without PyG draws others instead of its layers.
    uncalled = sorted({name for name in LAYERS if "pyg" not in name} - set(record["layers"]))
    if uncalled:
        problems.append(f"{path}: no call of {', '.join(uncalled)}; {again}")
    able = {name for name in SYSTEMS if record.get("device") in SYSTEMS[name].devices}
    missing = sorted(able - set(record["systems"]))
    if missing or not able:
        problems.append(f"{path}: no product of {', '.join(missing) or 'any system'}; {again}")
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
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise value_error(
            "fuzz", "--device", "a device of this machine", "cuda where there is no GPU",
            "Use --device cpu",
        )  # fmt: skip
    if not 0 < asked.seconds < math.inf:
        raise value_error(
            "fuzz", "--seconds", "a number above 0", asked.seconds, "Omit it for 300 seconds"
        )
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    if seed < 0 or (asked.replay is not None and asked.replay < 0):
        raise value_error("fuzz", "--seed and --replay", "0 or more", seed, "Use another number")
    if not 1 <= asked.processes <= 256:
        raise value_error("fuzz", "--processes", "1 to 256", asked.processes, "Use one per core")
    if asked.replay is not None:
        seed, number = divmod(asked.replay, CASES_OF_A_SEED)
        return _replay(draw_case(seed, number, asked.device, asked.kind))
    facts, digest = device_facts(asked.device), part_digests()
    device, kind = asked.device, asked.kind
    work = Work("fuzz", device, lambda s, number: draw_case(s, number, device, kind), (kind,))
    found = run_in_processes(work, seed, asked.seconds, asked.processes, note)
    if part_digests() != digest:
        raise value_error("fuzz", "the code", "left as it is meanwhile", "a change", "Run it again")
    ran = {**found["kinds"], **found["systems"]}
    counts = ", ".join(f"{name} {count}" for name, count in ran.items())
    refused = sum(found["refusals"].values())
    note(
        f"fuzz: seed {seed}: {found['cases']} cases in {found['seconds']} s ({counts}), "
        f"{refused} refused, {len(found['failures'])} failed"
    )
    if asked.out is not None:
        record = {
            "schema": SCHEMA,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **facts,
            "device": asked.device,
            "parts": digest,
            "processes": asked.processes,
            "kind": asked.kind,
            **found,
        }
        folder = facts["gpu"]["slug"] if asked.device == "cuda" else "cpu"
        note(f"fuzz: wrote {write_json(record, asked.out / folder / RECORD_NAME)}")
    return 1 if found["failures"] else 0


def main(arguments: Sequence[str]) -> int:
    """Fuzz, or replay a case, and return the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to go on")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kind", choices=KINDS, default="all", help="what is drawn")
    parser.add_argument("--processes", type=int, default=1, help="each with a seed of its own")
    parser.add_argument("--seed", type=int, help="of the first process; a fresh one if omitted")
    parser.add_argument("--replay", type=int, help="run this one case alone and print it")
    parser.add_argument("--out", type=Path, help="folder whose <gpu or cpu>/fuzz.json is written")
    asked = parser.parse_args(list(arguments))
    try:
        return _run(asked)
    except (ValueError, OSError) as error:
        note(f"fuzz: error: {error}")
        return 2
    except KeyboardInterrupt:
        note("fuzz: stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
