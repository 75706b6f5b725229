"""Draws products at random and checks them; replays any of them by seed and number.

    python -m tools.fuzz --seconds 300 --device cpu [--seed S] [--case N] [--out DIR]

Shapes, structures, containers, types, systems, row orders, layouts, epilogues, reductions, NaN and
Inf, transposes, updates, plan files, gradients, layers, one-call products and wrong calls are drawn
by ``tools/fuzz_cases.py``; ``tools/fuzz_judge.py`` says what must come of them. Each failure is
one line: how to replay it, the case, what was wrong. With ``--out`` the counts are written to
``DIR/<gpu or cpu>/fuzz.json``. Exit code 1 when a case failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.check.digest import code_digest
from sparsetile.cli.console import note
from sparsetile.core.errors import UnsupportedError, value_error
from sparsetile.systems.registry import exact_system
from tools.fuzz_cases import Case, draw
from tools.fuzz_checks import run_case
from tools.fuzz_judge import Run, Wrong
from tools.fuzz_refusals import grouped, is_refusal
from tools.record import machine_facts, write_json

__all__ = ["Outcome", "fuzz", "main", "try_case"]

SCHEMA = 1
RECORD_NAME = "fuzz.json"


@dataclass(frozen=True)
class Outcome:
    """What came of a case: what was ``wrong``, or what was rightly ``refused``, if anything."""

    case: Case
    system: str
    wrong: str = ""
    refused: str = ""

    @property
    def line(self) -> str:
        """How to replay the case, the case, what was wrong."""
        shown = (f"{field.name}={getattr(self.case, field.name)!r}" for field in fields(self.case))
        return f"{self.case.replay} | {', '.join(shown)} | {self.wrong}"


def try_case(case: Case, folder: Path) -> Outcome:
    """Run one case and judge also what it raised."""
    try:
        run: Run = run_case(case, folder)
    except Wrong as error:
        return Outcome(case, case.system, wrong=str(error))
    except UnsupportedError as error:
        # Only a system that was asked for by name may be unable.
        able = ("auto", exact_system(case.device).name)
        if is_refusal(error) and case.system not in able:
            return Outcome(case, case.system, refused=grouped(error, case.system))
        return Outcome(case, case.system, wrong=_described(error))
    except Exception as error:
        return Outcome(case, case.system, wrong=_described(error))
    return Outcome(case, run.system, refused=run.refused)


def _described(error: BaseException) -> str:
    """The error with the line of the package or tool that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "sparsetile" in f.filename or "fuzz" in f.filename]
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}: {' '.join(str(error).split())[:300]}"


def fuzz(device: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run the cases of a seed, in order, for so many seconds; return what the record holds."""
    begun = time.perf_counter()
    features: dict[str, Counter[str]] = {}
    systems: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures: list[str] = []
    cases = 0
    with tempfile.TemporaryDirectory() as name:
        for number in itertools.count():
            if time.perf_counter() - begun >= seconds:
                break
            case = draw(seed, number, device)
            outcome = _quietly(case, Path(name))
            cases += 1
            for feature, value in case.features.items():
                features.setdefault(feature, Counter())[value] += 1
            if outcome.wrong:
                failures.append(outcome.line)
                note(f"fuzz: {outcome.line}")
            elif outcome.refused:
                refusals[outcome.refused] += 1
            else:
                systems[outcome.system] += 1
            if number % 200 == 199:
                st.clear_plan_cache()
                for path in Path(name).iterdir():
                    path.unlink()
    return {
        "seeds": [seed],
        "cases": cases,
        "seconds": round(time.perf_counter() - begun, 1),
        "systems": dict(sorted(systems.items())),
        "features": {name: dict(sorted(found.items())) for name, found in features.items()},
        "refusals": dict(refusals.most_common()),
        "failures": failures,
    }


def _quietly(case: Case, folder: Path) -> Outcome:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        warnings.filterwarnings("ignore", category=sp.SparseEfficiencyWarning)
        return try_case(case, folder)


def _facts(device: str) -> dict[str, Any]:
    if device == "cuda":
        return machine_facts()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": platform.machine(), **versions}


def _replay(case: Case) -> int:
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
    if seed < 0 or (asked.case is not None and asked.case < 0):
        raise value_error("fuzz", "--seed and --case", "0 or more", seed, "Use another number")
    if asked.case is not None:
        return _replay(draw(seed, asked.case, asked.device))
    facts, digest = _facts(asked.device), code_digest()
    found = fuzz(asked.device, seed, asked.seconds)
    counts = ", ".join(f"{name} {count}" for name, count in found["systems"].items())
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
            "code_digest": digest,
            **found,
        }
        folder = facts["gpu"]["slug"] if asked.device == "cuda" else "cpu"
        note(f"fuzz: wrote {write_json(record, asked.out / folder / RECORD_NAME)}")
    return 1 if found["failures"] else 0


def main(arguments: Sequence[str]) -> int:
    """Fuzz, or replay a case, as the arguments ask and return the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to go on")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, help="of all cases; a fresh one if omitted")
    parser.add_argument("--case", type=int, help="run this one case alone and print it")
    parser.add_argument("--out", type=Path, help="folder whose <gpu or cpu>/fuzz.json is written")
    asked = parser.parse_args(list(arguments))
    try:
        return _run(asked)
    except (ValueError, OSError) as error:
        note(f"fuzz: error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
