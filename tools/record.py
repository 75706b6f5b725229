"""The GPU record: proof that the current code passed its tests on a GPU.

CI has no GPU. ``sparsetile verify`` runs the tests marked ``gpu`` on a machine with one and writes
``results/<gpu>/verify.json``: every outcome, and a digest of each part of the code between
``plan()`` and the launch (``tools.parts``). An outcome counts while the digests of ``shared`` and
of the systems that its test belongs to are unchanged; the next run keeps these and runs the others.
A test in CI calls :func:`check_record`, which reports changed parts, so that a changed kernel is
not merged before its tests were run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparsetile.check.environment import driver_version, gpu_slug, nvrtc_text
from sparsetile.core import settings
from sparsetile.core.errors import value_error
from sparsetile.jit import device_arch
from tools.gpu_tests import GpuTests
from tools.left_out import collected, leave_out
from tools.parts import SHARED, changed_parts, part_digests

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 3  # 3: a digest for each part of the code; 2 had one of all of it
RECORD_NAME = "verify.json"
# Processes that share the GPU while its tests run.
PROCESSES = 14
_OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed")
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)
_AGAIN = "run `sparsetile verify` on that GPU again"
# The child process: a fresh interpreter, so that the caller's state does not affect tests.
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.record import _child_main; sys.exit(_child_main(sys.argv[1:]))"
)


class _Outcomes:
    """pytest plugin: one outcome per test over all its phases."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests.setdefault(report.nodeid, "passed")
        if hasattr(report, "wasxfail"):
            self.tests[report.nodeid] = "xfailed" if report.skipped else "xpassed"
        elif report.failed:  # also in set-up or tear-down
            self.tests[report.nodeid] = "failed"
        elif report.skipped:
            self.tests[report.nodeid] = "skipped"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported hides its tests: count it as one
            self.tests[report.nodeid] = "failed"


def _child_main(arguments: Sequence[str]) -> int:
    """Run pytest in this process and write the outcomes to the first argument."""
    import pytest

    outcomes = _Outcomes()
    code = int(pytest.main(list(arguments[1:]), plugins=[outcomes]))
    Path(arguments[0]).write_text(json.dumps({"exit": code, "tests": outcomes.tests}))
    return code


def one_thread_each() -> dict[str, str]:
    """Return the environment of processes that share the cores: one torch thread in each.

    With fourteen processes of sixteen threads each on sixteen cores, a small float64 reference
    took 20 s instead of 0.1 s.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_tests(
    root: Path, *, marker: str, expression: str | None = None, kept: Iterable[str] = ()
) -> tuple[dict[str, str], set[str]]:
    """Run the tests of a checkout in a process of their own; their output goes to stderr.

    Tests of ``kept`` are not run. Return the outcome of each test, and the ids of all, those of
    ``kept`` too. Raise RuntimeError if pytest ended before it could report, for example because a
    test killed the process, and ValueError if it refused ``expression``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        command = [sys.executable, "-c", _CHILD, str(ROOT), str(ROOT / "src")]
        command += [str(report), "tests", "-m", marker, "-p", "tools.left_out"]
        environment = {**os.environ, **leave_out(sorted(kept), Path(folder))}
        if importlib.util.find_spec("xdist") is not None:
            # Most of a GPU test's time is spent on the host: compiling, and float64 references.
            command += ["-n", str(PROCESSES), "--dist", "worksteal"]
            environment |= one_thread_each()
        if expression:
            command += ["-k", expression]
        ended = subprocess.run(command, cwd=root, env=environment, stdout=2, check=False)
        if not report.is_file():
            raise RuntimeError(
                "verify: the tests must run to their end, got exit code "
                f"{ended.returncode} from pytest before its report. "
                "See its output above: a crash in a kernel ends the whole process."
            )
        found, there = json.loads(report.read_text()), collected(Path(folder))
    if found["exit"] == 4:  # pytest's code for bad usage; only the selection can be wrong
        raise value_error(
            "verify", "-k", "an expression that pytest understands", repr(expression),
            "See the output above",
        )  # fmt: skip
    if found["exit"] not in (0, 1, 5) and "failed" not in found["tests"].values():
        raise RuntimeError(
            f"verify: the tests must run to their end, got exit code {found['exit']} from "
            "pytest. See its output above."
        )
    return found["tests"], there


def machine_facts() -> dict[str, Any]:
    """Return the machine's entry of a record: GPU, driver and versions."""
    if not torch.cuda.is_available():
        raise value_error(
            "verify", "machine", "one with a CUDA GPU that torch can use", "none",
            "Run `sparsetile doctor` to see what is missing",
        )  # fmt: skip
    properties, chosen = torch.cuda.get_device_properties(0), settings.chosen_gpu()
    slug = gpu_slug(properties.name)
    return {
        "gpu": {
            "name": properties.name,
            # Proofs of another capability (SPARSETILE_CAPABILITY) have a folder of their own.
            "slug": slug if chosen is None else f"{slug}/as-{chosen.slug}",
            "arch": device_arch(0),
            "count": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
        },
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": nvrtc_text(),
        "python": platform.python_version(),
    }


def device_facts(device: str) -> dict[str, Any]:
    """Return the machine's entry of a record of runs on ``"cpu"`` or ``"cuda"``."""
    if device == "cuda":
        return machine_facts()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": platform.machine(), **versions}


def _outcomes(record: Mapping[str, Any], tests: GpuTests) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the outcome of each test of a record, and the systems it belonged to."""
    if record["schema"] != SCHEMA:
        found = {
            name: (test["outcome"], tests.parts(name)) for name, test in record["tests"].items()
        }
    else:
        found = {
            (f"{file}::{name}" if name else file): (outcome, frozenset(parts.split()) - {SHARED})
            for parts, files in record["tests"].items()
            for file, outcomes in files.items()
            for outcome, names in outcomes.items()
            for name in names
        }
    if not all(outcome in _OUTCOMES for outcome, _ in found.values()):
        raise ValueError("an outcome that no test has")
    return found


def counting(record: Mapping[str, Any], tests: GpuTests) -> dict[str, str]:
    """Return the outcomes of a record that need not be renewed.

    ``shared``, the systems that the test belongs to, and the code of these systems must be
    unchanged. Failures do not count.
    """
    changed = set(changed_parts(record))
    if SHARED in changed or (changed and "parts" not in record):
        return {}
    return {
        name: outcome
        for name, (outcome, parts) in _outcomes(record, tests).items()
        if outcome != "failed" and not parts & changed and tests.parts(name) <= parts
    }


def passed_files(path: Path, facts: Mapping[str, Any]) -> set[str]:
    """Return the files of tests that all passed or were skipped, in a record of today's code and
    of a machine with these facts; empty for any other record."""
    record, _ = read_proof(path, SCHEMA, "")
    if record.get("schema") != SCHEMA or any(record.get(name) != facts[name] for name in facts):
        return set()
    if changed_parts(record):
        return set()
    found: dict[str, set[str]] = {}
    for files in record["tests"].values():
        for file, outcomes in files.items():
            found.setdefault(file, set()).update(outcomes)
    return {file for file, seen in found.items() if "passed" in seen <= {"passed", "skipped"}}


def _grouped(outcomes: Mapping[str, str], tests: GpuTests) -> dict[str, Any]:
    """Return outcomes in the form of a record: by systems, file and outcome."""
    found: dict[str, Any] = {}
    for test in sorted(outcomes):
        file, _, name = test.partition("::")
        parts = " ".join(sorted(tests.parts(test))) or SHARED
        files = found.setdefault(parts, {})
        files.setdefault(file, {}).setdefault(outcomes[test], []).append(name)
    return dict(sorted(found.items()))


def collect(
    root: Path, *, earlier: Iterable[Path] = (), expression: str | None = None
) -> dict[str, Any]:
    """Run the tests marked ``gpu`` whose outcomes do not count, and return the record of all.

    Outcomes of the first of the folders ``earlier`` that has a record for this GPU are kept, as far
    as they count and are of a machine like this one. With an ``expression`` (pytest's ``-k``) only
    the tests that match run, and the record has no others.
    """
    facts = machine_facts()
    before, tests, now = part_digests(), GpuTests(root), datetime.now(UTC).isoformat("T", "seconds")
    kept: dict[str, str] = {}
    dates: dict[str, str] = {}
    paths = (folder / facts["gpu"]["slug"] / RECORD_NAME for folder in earlier)
    if path := next((path for path in paths if path.is_file()), None):
        record, problems = read_proof(path, SCHEMA, "")
        if not problems and all(record.get(name) == fact for name, fact in facts.items()):
            with contextlib.suppress(*_MALFORMED):
                kept = counting(record, tests)
                dates = record.get("dates") or dict.fromkeys(before, record["date"])
                dates = {name: dates[name] for name in dates if name not in changed_parts(record)}
    started = time.perf_counter()
    ran, there = run_tests(root, marker="gpu", expression=expression, kept=kept)
    if part_digests() != before:
        raise RuntimeError(
            "verify: the code must stay as it is while the tests run, got a change. Run it again."
        )
    outcomes = {**{name: kept[name] for name in kept if name in there}, **ran}
    counts = Counter(outcomes.values())
    return {
        "schema": SCHEMA,
        "date": now,
        **facts,
        "parts": before,
        "dates": {name: dates.get(name, now) if kept else now for name in before},
        "ran": len(ran),
        "seconds": round(time.perf_counter() - started, 1),
        "counts": {"total": len(outcomes), **{name: counts[name] for name in _OUTCOMES}},
        "tests": _grouped(outcomes, tests),
    }


def write_record(record: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write ``record`` to ``folder/<gpu>/verify.json`` atomically."""
    if record["counts"]["total"] == record["counts"]["skipped"]:
        raise value_error(
            "write_record", "record", "of at least one test that ran", "none",
            "Run it where the tests marked gpu are not skipped",
        )  # fmt: skip
    return write_json(record, Path(folder) / record["gpu"]["slug"] / RECORD_NAME)


def record_parser(tool: str, about: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return the arguments of a tool that measures on a GPU into one file, or prints its table."""
    parser = argparse.ArgumentParser(
        prog=tool, description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--table", type=Path, help="print the table of a record, measure nothing")
    parser.add_argument("--time-limit", type=float, default=seconds, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    return parser


def parse_record(
    parser: argparse.ArgumentParser, words: Sequence[str] | None
) -> argparse.Namespace:
    """Return what was asked for; ends the process with code 2 if nothing can be measured."""
    asked = parser.parse_args(words)
    if asked.table is None and asked.out is None:
        parser.error("--out must be the file of the record. Pass --out or --table")
    if asked.table is None and not torch.cuda.is_available():
        parser.error("a GPU is needed, none is here. Pass --table for the table of a record")
    return asked


def command_of(tool: str, arguments: Sequence[str]) -> str:
    """Return a command as records have it: of absolute paths, which mean nothing elsewhere, the
    last part."""
    shown = (Path(word).name if Path(word).is_absolute() else word for word in arguments)
    return shlex.join(["python", "-m", f"tools.{tool}", *shown])


def write_text(text: str, path: Path) -> Path:
    """Write ``text`` to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_json(body: dict[str, Any], path: Path) -> Path:
    """Write ``body`` as JSON to ``path`` atomically."""
    return write_text(json.dumps(body, indent=1) + "\n", path)


def read_proof(
    path: str | os.PathLike[str], schema: int, again: str
) -> tuple[dict[str, Any], list[str]]:
    """Read a record of code and return it with what is wrong with it so far.

    It is empty if it cannot be read or has another schema. The schema before ``schema`` is read if
    it has one digest of all code. ``again`` says how to renew it.
    """
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return {}, [f"{path}: cannot be read ({error}); {again}"]
    found = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if found != schema and (found != schema - 1 or "code_digest" not in record):
        return {}, [f"{path}: has schema {found}, this checkout reads {schema}; {again}"]
    return record, []


def check_record(path: str | os.PathLike[str], there: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with a record, one sentence each; empty when it is current.

    ``there`` are the ids of tests that must be in it, those of systems of the CPU aside.
    """
    record, problems = read_proof(path, SCHEMA, _AGAIN)
    if not record:
        return problems
    tests = GpuTests(ROOT)
    try:
        known = _outcomes(record, tests)
    except _MALFORMED:
        return [f"{path}: does not list an outcome per test; {_AGAIN}"]
    if all(outcome == "skipped" for outcome, _ in known.values()):
        problems.append(f"{path}: no test ran; {_AGAIN}")
    if changed := changed_parts(record):
        problems.append(f"{path}: code changed since it was run ({', '.join(changed)}); {_AGAIN}")
    problems += [f"{path}: {name} failed" for name, (word, _) in known.items() if word == "failed"]
    absent = [
        name
        for name in there
        # An outcome also counts if the test uses fewer parts than when it ran: all are unchanged.
        if tests.needs_gpu(name) and (name not in known or not tests.parts(name) <= known[name][1])
    ]
    if absent:
        named = f"{absent[0]} and {len(absent) - 1} more" if len(absent) > 1 else absent[0]
        problems.append(f"{path}: lacks {named}; {_AGAIN}")
    return problems
