"""Runs CPU tests against mutants of the package: one warm process that forks for each.

    python -m tools.host_runner JOBS.json --parallel 1 --warm torch numpy

What the package and the tests import from elsewhere takes seconds to import, so the process imports
it once. It never imports the package: each fork does, and finds the mutant's code in place of one
module (``tools/mutant_import.py``). Other jobs run a file of tests as it is and note the lines that
each test runs. ``tools/mutate_host.py`` writes JOBS.json, a list of objects with the fields of
:class:`HostJob`, and reads the result that each job leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools import mutant_import
from tools.mutant_runner import AnyJob, Progress, run_jobs

# What the package and its tests import, if it is installed. None of it imports the package.
PRELOAD = (
    "torch", "numpy", "scipy.sparse", "scipy.io", "numba", "hypothesis", "safetensors.torch",
    "torch._dynamo", "torch.distributed", "torch.distributed.tensor.parallel",
    "torch_geometric.nn", "transformers",
)  # fmt: skip
# Tests that run before the files of all others are collected.
FIRST = 12


@dataclass(frozen=True)
class HostJob(AnyJob):
    """Tests in the order to run them, or one file of tests."""

    code: str = ""  # a mutant, as ``tools/mutant_import.py`` reads it
    files: list[str] = field(default_factory=list)  # note which of their lines each test runs


@dataclass(eq=False)
class _Ordered(Progress):
    """Runs the tests that are asked for, in that order, no file twice in between."""

    tests: Sequence[str] = ()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failure:
            text = str(report.longrepr).strip().rpartition("\n")[2]
            self.failure = {"test": report.nodeid, "error": "while collecting", "text": text[:200]}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        places = {name: place for place, name in enumerate(self.tests)}
        wanted = [item for item in items if item.nodeid in places]
        first: dict[Any, int] = {}
        for item in wanted:
            place = places[item.nodeid]
            first[item.path] = min(place, first.get(item.path, place))
        items[:] = sorted(wanted, key=lambda item: (first[item.path], places[item.nodeid]))


@dataclass(eq=False)
class _Numbered(Progress):
    """Numbers the tests and measures how long each takes."""

    seconds: dict[str, float] = field(default_factory=dict)
    passing: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with (Path(self.job.folder) / "test").open("r+b") as file:
            self._number = mmap.mmap(file.fileno(), 4)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        super().pytest_runtest_logstart(nodeid)
        self.seconds[nodeid] = -time.perf_counter()
        self._number[:4] = len(self.seconds).to_bytes(4, "little")

    def pytest_runtest_logreport(self, report: Any) -> None:
        passed = report.passed and self.passing.get(report.nodeid, True)
        self.passing[report.nodeid] = passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        super().pytest_runtest_logfinish(nodeid)
        self._number[:4] = bytes(4)
        self.seconds[nodeid] = round(self.seconds[nodeid] + time.perf_counter(), 4)


def _prepare(job: HostJob) -> None:
    """Let this process and those that it starts run the mutant, or note lines."""
    folder = Path(job.folder)
    shim = folder / "path"
    shim.mkdir()
    shutil.copyfile(mutant_import.__file__, shim / "sitecustomize.py")
    paths = [str(shim), str(Path(job.root) / "src"), job.root]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    sys.path[:0] = paths[1:]
    os.chdir(job.root)
    if job.code:
        os.environ[mutant_import.CODE] = job.code
    if job.files:
        (folder / "files.json").write_text(json.dumps(job.files))
        (folder / "test").write_bytes(bytes(4))
        os.environ[mutant_import.LINES] = job.folder
    mutant_import.install()


def _run(job: HostJob) -> dict[str, Any]:
    _prepare(job)
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options.append(f"--basetemp={Path(job.folder) / 'temporary'}")
    if job.files:
        noted = _Numbered(job)
        code = int(pytest.main([*job.tests, *options], plugins=[noted]))
        ran = [[name, seconds, noted.passing[name]] for name, seconds in noted.seconds.items()]
        return {"exit": code, "tests": ran, **noted.failure}
    passed = 0
    for tests in (job.tests[:FIRST], job.tests[FIRST:]):
        plugin = _Ordered(job, tests=tests)
        paths = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        code = int(pytest.main([*paths, "-x", *options], plugins=[plugin])) if tests else 0
        passed += plugin.passed
        if code:
            break
    return {"exit": code, "passed": passed, **plugin.failure}


def main(arguments: Sequence[str]) -> int:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(prog="host_runner")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--warm", nargs="*", default=[], help="modules to import first")
    asked = parser.parse_args(list(arguments))
    jobs = [HostJob(**fields) for fields in json.loads(asked.jobs.read_text())]
    for name in asked.warm:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    run_jobs(jobs, asked.parallel, _run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
