"""Runs test suites against mutated device trees: one warm process forks for each.

    python -m tools.mutant_runner JOBS.json --parallel 6

Importing torch takes longer than the tests that detect a mutation, so it is imported once. CUDA
does not survive a fork: nothing here may initialise it. ``tools/mutate.py`` writes JOBS.json, a
list of objects with the fields of :class:`Job`, and reads the result of each job.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Imported before the first fork if they are installed. Each is slow to import and does not
# initialise CUDA. pytest imports hypothesis when it ends.
PRELOAD = ("torch", "numpy", "scipy.sparse", "hypothesis", "cuda.core", "sparsetile")
POLL_SECONDS = 0.05
# Jobs that run when the time of all is over have this long to end.
LAST_SECONDS = 20.0


@dataclass(frozen=True)
class AnyJob:
    """One run of pytest."""

    name: str  # for messages
    root: str  # folder to run in
    tests: list[str]
    folder: str  # where the job writes its files
    test_limit: float  # seconds of one test
    limit: float  # seconds of the whole job


@dataclass(frozen=True)
class Job(AnyJob):
    """Files of tests and options against a device tree."""

    tree: str  # replaces the package's device tree; empty for its own
    systems: list[str]  # of tests with a parameter ``system`` only these run; all if empty
    leave_out: str  # regular expression of ids of tests that do not run
    first: str  # test to run before all others; empty if none is known


Run = Callable[[Any], dict[str, Any]]  # takes a job, returns what its result says


@dataclass(eq=False)  # pytest puts plugins into sets
class Progress:
    """pytest plugin: says which test runs, keeps the first failure."""

    job: AnyJob
    passed: int = 0
    failure: dict[str, str] = field(default_factory=dict)

    def _progress(self, nodeid: str, begun: float | None) -> None:
        path = Path(self.job.folder) / "progress.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps([nodeid, begun]))
        os.replace(partial, path)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress(nodeid, time.time())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._progress(nodeid, None)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        outcome: Any = yield
        report = outcome.get_result()
        self.passed += report.when == "call" and report.passed
        if report.failed and not self.failure:
            self.failure = {
                "test": item.nodeid,
                "error": call.excinfo.typename,
                "text": " ".join(str(call.excinfo.value).split())[:200],
            }


@dataclass(eq=False)
class _Plugin(Progress):
    """Selects tests too."""

    job: Job

    def _wanted(self, item: Any) -> bool:
        if self.job.leave_out and re.search(self.job.leave_out, item.nodeid):
            return False
        spec = getattr(item, "callspec", None)
        system = None if spec is None else spec.params.get("system")
        name = getattr(system, "name", system)
        return not self.job.systems or name is None or name in self.job.systems

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self._wanted(item)]


def redirect(tree: Path) -> None:
    """Make every module of the package use the device tree ``tree``."""
    from sparsetile.jit import source

    original = source.DEVICE_TREE
    for module in list(sys.modules.values()):
        if getattr(module, "DEVICE_TREE", None) == original:
            module.DEVICE_TREE = tree  # type: ignore[attr-defined]
    source.device_tree_digest.cache_clear()


def _run(job: Job) -> dict[str, Any]:
    os.environ["SPARSETILE_CACHE_DIR"] = str(Path(job.folder) / "kernels")
    os.environ["OMP_NUM_THREADS"] = "2"
    os.chdir(job.root)
    if job.root not in sys.path:
        sys.path.insert(0, job.root)
    if job.tree:
        redirect(Path(job.tree))
    plugin = _Plugin(job)
    # The cache provider would have all jobs write to one folder of the checkout.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    if job.first:  # alone: one file is collected and not all of the suite
        code = int(pytest.main([job.first, *options], plugins=[plugin]))
        if code == pytest.ExitCode.TESTS_FAILED:
            return {"exit": code, "passed": plugin.passed, **plugin.failure}
    code = int(pytest.main([*job.tests, *options], plugins=[plugin]))
    return {"exit": code, "passed": plugin.passed, **plugin.failure}


def _child(job: AnyJob, run: Run) -> None:
    """Run a job in this forked process and end the process."""
    os.setsid()  # what the tests start ends with them
    log = os.open(Path(job.folder) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = run(job)
        (Path(job.folder) / "result.json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass
class _Running:
    job: AnyJob
    pid: int
    begun: float

    def overdue(self) -> str:
        """Return why the job has to be stopped, nothing while it need not be."""
        now = time.time()
        if now - self.begun > self.job.limit:
            return "job"
        try:
            _, started = json.loads((Path(self.job.folder) / "progress.json").read_text())
        except (OSError, ValueError):
            return ""
        return "test" if started is not None and now - started > self.job.test_limit else ""

    def kill(self) -> int:
        """End the job with all it started; return its wait status."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet the leader of its group
            os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]

    def finish(self, status: int, stopped: str) -> None:
        """Complete the job's result with its time and exit status."""
        path = Path(self.job.folder) / "result.json"
        result = json.loads(path.read_text()) if path.is_file() and not stopped else {}
        if "exit" not in result:
            try:
                test = json.loads((path.parent / "progress.json").read_text())[0]
            except (OSError, ValueError):
                test = ""
            result.update(test=test, stopped=stopped, signal=os.waitstatus_to_exitcode(status))
        result["seconds"] = round(time.time() - self.begun, 2)
        path.write_text(json.dumps(result))


def _fork(job: AnyJob, run: Run) -> _Running:
    sys.stdout.flush()
    sys.stderr.flush()
    begun = time.time()
    pid = os.fork()
    if pid == 0:
        _child(job, run)
    return _Running(job, pid, begun)


def run_jobs(jobs: Sequence[AnyJob], parallel: int, run: Run, until: float = float("inf")) -> None:
    """Run jobs in their order, ``parallel`` at a time; say on stderr when one has ended.

    Each runs in a fork of this process; what ``run`` returns goes to ``result.json`` of its folder.
    None starts after ``until``, in seconds since the epoch, and those that run then are stopped
    ``LAST_SECONDS`` later.
    """
    waiting, running = list(jobs), list[_Running]()
    try:
        while running or (waiting and time.time() < until):
            while waiting and len(running) < parallel and time.time() < until:
                running.append(_fork(waiting.pop(0), run))
            time.sleep(POLL_SECONDS)
            for each in list(running):
                pid, status = os.waitpid(each.pid, os.WNOHANG)
                stopped = ""
                if pid == 0:
                    over = time.time() > until + LAST_SECONDS
                    stopped = each.overdue() or ("time" if over else "")
                    if not stopped:
                        continue
                    status = each.kill()
                running.remove(each)
                each.finish(status, stopped)
                print(f"mutate: ended {each.job.name}", file=sys.stderr, flush=True)
    finally:
        for each in running:
            each.kill()


def main(arguments: Sequence[str]) -> int:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(prog="mutant_runner")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since the epoch")
    asked = parser.parse_args(list(arguments))
    jobs = [Job(**fields) for fields in json.loads(asked.jobs.read_text())]
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pytest collects garbage twice: half a second each for all modules
    run_jobs(jobs, asked.parallel, _run, asked.until)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
