"""The GPU record: proof that today's code passed its tests on a GPU.

CI has no GPU. ``sparsetile verify`` runs the tests marked ``gpu`` where there is one and writes
``results/<gpu>/verify.json`` with the digest of everything between ``plan()`` and the launch. A
test in CI calls :func:`check_record`, which reports a record whose digest is not today's, so a
kernel that changed and was not run does not land.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sparsetile.check.digest import code_digest
from sparsetile.check.environment import driver_version, gpu_slug, nvrtc_text
from sparsetile.core.errors import value_error
from sparsetile.jit import device_arch

__all__ = [
    "RECORD_NAME",
    "ROOT",
    "SCHEMA",
    "check_record",
    "collect",
    "device_facts",
    "machine_facts",
    "one_thread_each",
    "read_proof",
    "run_tests",
    "write_json",
    "write_record",
    "write_text",
]

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 2  # 2: code_digest covers systems, formats, balance and operators, and ignores comments
RECORD_NAME = "verify.json"
# Processes that share the GPU while its tests run.
PROCESSES = 14
_OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed")
# What the child process runs: a fresh interpreter, so that no state of the caller reaches tests.
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.record import _child_main; sys.exit(_child_main(sys.argv[1:]))"
)


class _Outcomes:
    """pytest plugin: one outcome and one duration per test, whatever its phases did."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        held = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        held["seconds"] += report.duration
        if hasattr(report, "wasxfail"):
            held["outcome"] = "xfailed" if report.skipped else "xpassed"
        elif report.failed:  # also in set-up or tear-down
            held["outcome"] = "failed"
        elif report.skipped:
            held["outcome"] = "skipped"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported hides its tests: count it as one
            self.tests[report.nodeid] = {"outcome": "failed", "seconds": 0.0}


def _child_main(arguments: Sequence[str]) -> int:
    """Run pytest in this process and leave the outcomes in the file named first."""
    import pytest

    outcomes = _Outcomes()
    code = int(pytest.main(list(arguments[1:]), plugins=[outcomes]))
    Path(arguments[0]).write_text(json.dumps({"exit": code, "tests": outcomes.tests}))
    return code


def one_thread_each() -> dict[str, str]:
    """Return the environment of processes that share the cores: torch takes one thread in each.

    Where fourteen processes had sixteen threads each on sixteen cores, a small float64 reference
    took 20 s instead of 0.1 s.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_tests(root: Path, *, marker: str, expression: str | None = None) -> dict[str, Any]:
    """Run the tests of a checkout in a process of their own; their output goes to stderr.

    Parameters
    ----------
    root : Path
        The checkout; its ``tests`` folder is run.
    marker : str
        pytest marker expression that selects the tests.
    expression : str, optional
        pytest ``-k`` expression that selects further.

    Returns
    -------
    dict
        Test id -> ``{"outcome", "seconds"}``.

    Raises
    ------
    RuntimeError
        pytest ended before it could report, for example because a test killed the process.
    ValueError
        pytest refused ``expression``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        command = [sys.executable, "-c", _CHILD, str(ROOT), str(ROOT / "src")]
        command += [str(report), "tests", "-m", marker]
        environment = None
        if importlib.util.find_spec("xdist") is not None:
            # Most of a GPU test's time is the host's: compiling, and float64 references.
            command += ["-n", str(PROCESSES), "--dist", "worksteal"]
            environment = one_thread_each()
        if expression:
            command += ["-k", expression]
        ended = subprocess.run(command, cwd=root, env=environment, stdout=2, check=False)
        if not report.is_file():
            raise RuntimeError(
                "verify: the tests must run to their end, got exit code "
                f"{ended.returncode} from pytest before its report. "
                "See its output above: a crash in a kernel ends the whole process."
            )
        found = json.loads(report.read_text())
    if found["exit"] == 4:  # pytest's code for bad usage; the selection is all that was given
        raise value_error(
            "verify", "-k", "an expression that pytest understands", repr(expression),
            "See the output above",
        )  # fmt: skip
    if found["exit"] not in (0, 1, 5) and not _failures(found["tests"]):
        raise RuntimeError(
            f"verify: the tests must run to their end, got exit code {found['exit']} from "
            "pytest. See its output above."
        )
    return found["tests"]


def _failures(tests: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, test in tests.items() if test["outcome"] == "failed"]


def _ran(tests: dict[str, dict[str, Any]]) -> int:
    return sum(test["outcome"] != "skipped" for test in tests.values())


def machine_facts() -> dict[str, Any]:
    """Return what a record says of the machine: GPU, driver and versions.

    Raises
    ------
    ValueError
        torch finds no GPU here.
    """
    if not torch.cuda.is_available():
        raise value_error(
            "verify", "machine", "one with a CUDA GPU that torch can use", "none",
            "Run `sparsetile doctor` to see what is missing",
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": {
            "name": properties.name,
            "slug": gpu_slug(properties.name),
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
    """Return what a record of runs on ``"cpu"`` or ``"cuda"`` says of the machine."""
    if device == "cuda":
        return machine_facts()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": platform.machine(), **versions}


def collect(root: Path, *, expression: str | None = None) -> dict[str, Any]:
    """Run the tests marked ``gpu`` and return the record of what came of it.

    Parameters
    ----------
    root : Path
        Source checkout.
    expression : str, optional
        Run only the tests that match this ``-k`` expression. Such a record is marked as partial
        and :func:`check_record` does not accept it.

    Returns
    -------
    dict
        Plain data, ready for JSON: ``schema``, ``date``, ``gpu``, ``driver``, ``torch``, ``cuda``,
        ``nvrtc``, ``python``, ``code_digest``, ``selection``, ``seconds``, ``counts``, ``tests``.
    """
    facts = machine_facts()
    digest = code_digest()
    started = time.perf_counter()
    tests = run_tests(root, marker="gpu", expression=expression)
    if code_digest() != digest:
        raise RuntimeError(
            "verify: the code must stay as it is while the tests run, got a change. Run it again."
        )
    counts = Counter(test["outcome"] for test in tests.values())
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "code_digest": digest,
        "selection": expression,
        "seconds": round(time.perf_counter() - started, 3),
        "counts": {"total": len(tests), **{name: counts[name] for name in _OUTCOMES}},
        "tests": {
            name: {"outcome": test["outcome"], "seconds": round(test["seconds"], 4)}
            for name, test in sorted(tests.items())
        },
    }


def write_record(record: dict[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write ``record`` to ``folder/<gpu>/verify.json``, replacing the file at once or not at all.

    Raises
    ------
    ValueError
        No test of the record ran, so it would prove nothing.
    """
    if _ran(record["tests"]) == 0:
        raise value_error(
            "write_record", "record", "of at least one test that ran", "none",
            "Run it where the tests marked gpu are not skipped",
        )  # fmt: skip
    return write_json(record, Path(folder) / record["gpu"]["slug"] / RECORD_NAME)


def write_text(text: str, path: Path) -> Path:
    """Write ``text`` to ``path``, replacing the file at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_json(body: dict[str, Any], path: Path) -> Path:
    """Write ``body`` as JSON to ``path``, replacing the file at once or not at all."""
    return write_text(json.dumps(body, indent=1) + "\n", path)


def read_proof(
    path: str | os.PathLike[str], schema: int, again: str
) -> tuple[dict[str, Any], list[str]]:
    """Read a record with a ``code_digest`` and return it with what is wrong with it so far.

    It is empty where it cannot be read or has another schema. ``again`` says how to renew it.
    """
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return {}, [f"{path}: cannot be read ({error}); {again}"]
    if not isinstance(record, dict) or record.get("schema") != schema:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        return {}, [f"{path}: has schema {found}, this checkout reads {schema}; {again}"]
    if record.get("code_digest") != code_digest():
        return record, [f"{path}: the code it covers changed since it was written; {again}"]
    return record, []


def check_record(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record, one sentence each; empty when it vouches for today.

    Parameters
    ----------
    path : path-like
        A ``verify.json``.
    """
    again = "run `sparsetile verify` on that GPU again"
    record, problems = read_proof(path, SCHEMA, again)
    if not record:
        return problems
    tests = record.get("tests")
    if not isinstance(tests, dict) or not all(
        isinstance(test, dict) and test.get("outcome") in _OUTCOMES for test in tests.values()
    ):
        return [f"{path}: does not list an outcome per test; {again}"]
    if _ran(tests) == 0:
        problems.append(f"{path}: no test ran; {again}")
    if record.get("selection"):
        problems.append(
            f"{path}: covers only the tests selected by -k {record['selection']!r}; {again}"
        )
    problems += [f"{path}: {name} {tests[name]['outcome']}" for name in _failures(tests)]
    return problems
