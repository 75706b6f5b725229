"""The checkers' record: proof that the current kernels ran clean under compute-sanitizer.

``sparsetile verify --checker memcheck,racecheck,synccheck,initcheck`` runs the products of
``tools.checked_products`` under each tool and writes ``results/<gpu>/checkers.json`` with the
digests of the GPU record. A tool that is missing, was stopped, or saw nothing run leaves no entry.
Systems and kernels come from the registries: a new system is checked without an edit here.

Each type of each system runs under a tool in its own process, several at once: a tool slows the
host down more than the GPU, and spends most of its time on kernels that are new to it, which differ
by type. Clean parts are stored in ``checkers.partial.json`` beside the record until their tool is
done, so that a run that was stopped can be continued.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsetile.core import settings
from sparsetile.core.errors import value_error
from sparsetile.jit import device_arch
from sparsetile.kernels import KERNELS
from sparsetile.systems import SYSTEMS
from tools.as_capability import runs_as
from tools.checked_products import BLOCK_SYSTEM, matrix_names, type_names
from tools.child_processes import run_within, stop_all
from tools.parts import part_digests
from tools.record import ROOT, machine_facts, read_proof, write_json

SCHEMA = 3  # 3: a digest for each part of the code
RECORD_NAME = "checkers.json"
PARTIAL_NAME = "checkers.partial.json"
PROGRAM = "compute-sanitizer"
# Exit code when the tool found something; the products end with 0, 1 or a signal.
FOUND = 86
# Processes at a time: they share the GPU in turns.
PROCESSES = 14
# Lines of a tool's log that are shown if it found something.
SHOWN_LINES = 40
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# initcheck instruments torch's and cuBLAS's kernels too, which takes minutes in 16 bits.
SLOWEST_FIRST = ("initcheck", "racecheck", "memcheck", "synccheck")
# System and type that a tool cannot run. cuBLAS's kernels in 16 bits end with a hardware exception
# under racecheck (2025.3.1), also in torch.mm alone. The repair kernel of `dense` is checked in the
# other types and with `csr`.
LEFT_OUT = {"racecheck": frozenset({("dense", "float16"), ("dense", "bfloat16")})}
_SUMMARIES = (
    re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"),
    re.compile(r"ERROR SUMMARY: (\d+) errors?"),
)
# initcheck must see all writes to memory, so it checks torch's kernels too. A report names the
# kernel below its first line; reports of other kernels are counted separately.
#
# It seems not to see TMA stores to global memory (2025.3.1): it reported two million reads of C
# that `bcsr` or cuBLAS had stored in 16 bits, in correct products. For these parts new memory is
# filled with NaN, so that the tool reports nothing, and reading unwritten memory gives NaN.
STORED_UNSEEN = frozenset(
    (system, kind) for system in ("bcsr", "dense") for kind in ("float16", "bfloat16")
)
_UNWRITTEN = re.compile(r"=+ +Uninitialized __global__ memory read[^\n]*\n(=[^\n]*)")
MOST_REPORTS = 100_000  # reports beyond these name no kernel and count as ours
# A fresh interpreter that finds the tools and the package of this checkout.
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.checked_products import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True)
class Checker:
    """One tool of compute-sanitizer: the kernels it checks, and the systems that launch them."""

    tool: str
    kernels: tuple[str, ...]
    systems: tuple[str, ...]


def checker(tool: str) -> Checker:
    """Return what a tool checks, from the registries.

    racecheck checks only shared memory, so it gets the kernels that use it. Kernels that build a
    format belong to no system; the products launch them too. With ``SPARSETILE_CAPABILITY`` there
    are only those of that capability.
    """
    watched = {name for name, spec in KERNELS.items() if spec.shared_memory or tool != "racecheck"}
    systems = [name for name, system in sorted(SYSTEMS.items()) if watched & set(system.kernels)]
    if (chosen := settings.chosen_gpu()) is not None:
        watched = {name for name in watched if KERNELS[name].runs_on(device_arch(0))}
        able = {name for name in systems if runs_as(name, chosen.capability)} | {BLOCK_SYSTEM}
        systems = [name for name in systems if name in able]
    return Checker(tool, tuple(name for name in KERNELS if name in watched), tuple(systems))


def find_tool() -> tuple[str, str]:
    """Return the path of compute-sanitizer and its version."""
    path = shutil.which(PROGRAM)
    got = "nothing of that name on PATH"
    if path is not None:
        try:
            asked = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=60, check=True
            )
            lines = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
            versions = [line for line in lines if line.startswith("Version")]
            return path, (versions or lines or ["unknown"])[-1].removeprefix("Version ").strip()
        except (OSError, subprocess.SubprocessError) as error:
            got = f"one that does not start ({error})"
    raise value_error(
        "verify", PROGRAM, "installed to run a checker", got,
        "It comes with the CUDA toolkit; put its folder on PATH",
    )  # fmt: skip


def _command(
    program: str, chosen: Checker, log: Path, report: Path, device: str, matrices: str, types: str
) -> list[str]:
    command = [program, "--tool", chosen.tool, "--error-exitcode", str(FOUND)]
    # API errors do not count: torch probes for features that a driver may lack.
    command += ["--log-file", str(log), "--report-api-errors", "no"]
    command += ["--target-processes", "application-only"]
    if chosen.tool == "initcheck":
        # Stack traces of that many reports take minutes.
        command += ["--print-limit", str(MOST_REPORTS), "--show-backtrace", "no"]
    else:
        for kernel in chosen.kernels:
            command += ["--kernel-name", f"kernel_substring={kernel}"]
    command += _products(report, device, ",".join(chosen.systems), matrices, types)
    filled = chosen.tool == "initcheck" and {(s, types) for s in chosen.systems} & STORED_UNSEEN
    return [*command, *(["--fill"] if filled else [])]


def _products(report: Path, device: str, systems: str, matrices: str, types: str) -> list[str]:
    """Return the command that runs the products themselves."""
    command = [sys.executable, "-c", _CHILD, str(ROOT), str(ROOT / "src"), str(report)]
    command += ["--device", device, "--systems", systems]
    return [*command, "--matrices", matrices, "--types", types]


def _tasks(systems: Iterable[str], tool: str = "") -> list[tuple[str, str]]:
    """Return (system, type) pairs that the tool supports, one for each process."""
    tasks = [(system, kind) for system in systems for kind in type_names(system)]
    return [task for task in tasks if task not in LEFT_OUT.get(tool, ())]


def _errors(log: str) -> int | None:
    """Errors and warnings in the summary of a log; None if it has no summary."""
    for summary in _SUMMARIES:
        found = summary.findall(log)
        if found:
            last = found[-1]
            return sum(map(int, last)) if isinstance(last, tuple) else int(last)
    return None


def _elsewhere(log: str, kernels: tuple[str, ...]) -> int:
    """Reads of unwritten memory by kernels of other libraries."""
    places = _UNWRITTEN.findall(log)
    return sum(not any(kernel in place for kernel in kernels) for place in places)


def _unfinished(tool: str, got: str, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"verify: {tool} must see all products run, got {got}. Nothing was written for it. "
        f"{remedy}."
    )


@dataclass(frozen=True)
class Watched:
    """The results of a tool and of the products that it checked."""

    errors: int
    elsewhere: int
    status: int
    matrices: list[str]
    products: int
    failure: str
    log: list[str]
    seconds: float = 0.0


def watch_part(
    program: str, chosen: Checker, root: Path, until: float, device: str, matrices: str, types: str
) -> Watched | None:
    """Run the products of ``chosen.systems`` under the tool; None if time was up first."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder) / "log.txt", Path(folder) / "report.json"
        left = until - time.perf_counter()
        command = _command(program, chosen, log, report, device, matrices, types)
        status = run_within(command, root, left) if left > 0 else None
        if status is None:
            return None
        text = log.read_text(errors="replace") if log.is_file() else ""
        ran: dict[str, Any] = {"matrices": [], "products": 0, "failure": "no report of what ran"}
        if report.is_file():
            ran = json.loads(report.read_text())
    errors = _errors(text)
    if errors is None:
        raise _unfinished(
            chosen.tool, f"exit status {status} without a summary", "See its output above"
        )
    elsewhere = _elsewhere(text, tuple(KERNELS)) if chosen.tool == "initcheck" else 0
    errors -= elsewhere
    status = 0 if elsewhere and not errors and status == FOUND else status
    return Watched(
        errors, elsewhere, status, list(ran["matrices"]), int(ran["products"]),
        str(ran["failure"] or ""), text.splitlines()[:SHOWN_LINES],
    )  # fmt: skip


class Kept:
    """The clean parts of a tool's run, in a file, for the run that continues it.

    A file of other code or another machine, or a damaged one, is ignored and replaced.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._facts: dict[str, Any] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self.lasts = folder is not None
        if folder is None:
            return
        self._facts = {"schema": SCHEMA, **machine_facts(), "parts": part_digests()}
        self._path = Path(folder) / self._facts["gpu"]["slug"] / PARTIAL_NAME
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            stored = json.loads(self._path.read_text())
            parts = stored.pop("clean")
            self._parts = parts if stored == self._facts and isinstance(parts, dict) else {}

    def get(self, name: str) -> Watched | None:
        """Return the result of a part; None if it has not run."""
        try:
            return Watched(**self._parts[name])
        except (KeyError, TypeError):
            return None

    def put(self, name: str, found: Watched) -> None:
        """Keep a part that was clean."""
        if self._path is None or found.errors or found.status or found.failure:
            return
        with self._lock:
            self._parts[name] = asdict(found)
            write_json({**self._facts, "clean": self._parts}, self._path)

    def drop(self, tool: str) -> None:
        """Forget the parts of a tool that is done."""
        with self._lock:
            self._parts = {n: p for n, p in self._parts.items() if not n.startswith(f"{tool} ")}
            if self._path is not None and self._parts:
                write_json({**self._facts, "clean": self._parts}, self._path)
            elif self._path is not None:
                self._path.unlink(missing_ok=True)


def compile_kernels(root: Path, *, limit: float, device: str = "cuda", matrices: str = "") -> None:
    """Run the products of every checker once without one, so that their kernels are compiled.

    NVRTC takes 0.93 s for a kernel under memcheck, most of a part's time, and 0.25 s without it.
    Errors are ignored here: the checkers will see them.
    """
    systems = sorted({name for tool in TOOLS for name in checker(tool).systems})
    until, named = time.perf_counter() + limit, matrices or ",".join(matrix_names())

    def compile_part(task: tuple[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = _products(Path(folder) / "report.json", device, task[0], named, task[1])
            if (left := until - time.perf_counter()) > 0:
                run_within(command, root, left)

    with ThreadPoolExecutor(PROCESSES) as pool:
        try:
            list(pool.map(compile_part, _tasks(systems)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


@dataclass(frozen=True)
class _Run:
    """State shared by the parts of one call."""

    root: Path
    program: str
    version: str
    device: str
    matrices: str
    until: float
    digests: dict[str, str]
    kept: Kept

    def watch(self, chosen: Checker, task: tuple[str, str]) -> Watched | None:
        """Run one type of one system under a tool, unless it is kept; None if time was up."""
        name = f"{chosen.tool} {task[0]} {task[1]} {self.matrices}"
        found = self.kept.get(name)
        if found is not None:
            return found
        only, begun = replace(chosen, systems=task[:1]), time.perf_counter()
        found = watch_part(
            self.program, only, self.root, self.until, self.device, self.matrices, task[1]
        )
        if found is not None:
            found = replace(found, seconds=round(time.perf_counter() - begun, 3))
            self.kept.put(name, found)
        return found

    def entry(self, chosen: Checker, ended: Sequence[Watched | None], limit: str) -> dict[str, Any]:
        """Return a tool's entry of the record, from the results of its parts."""
        tool, watched = chosen.tool, [each for each in ended if each is not None]
        if len(watched) < len(ended):
            raise _unfinished(
                tool, f"{len(watched)} of {len(ended)} parts within {limit} s",
                "Run it again: parts that ended are kept" if self.kept.lasts else "Give it longer",
            )  # fmt: skip
        errors = sum(each.errors for each in watched)
        status = next((each.status for each in watched if each.status), 0)
        failure = "; ".join(each.failure for each in watched if each.failure)
        if not errors and (status != 0 or failure):
            raise _unfinished(
                tool, f"exit status {status}: {failure or 'no failure was reported'}",
                "See the output above; `sparsetile verify` shows which product is at fault",
            )  # fmt: skip
        if not errors and not any(each.products for each in watched):
            raise _unfinished(tool, "no product", "Check that a GPU system can run here")
        if part_digests() != self.digests:
            raise _unfinished(tool, "a change of the code meanwhile", "Run it again")
        if not errors:
            self.kept.drop(tool)
        log = [line for each in watched if each.errors for line in each.log]
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": self.version,
            "kernels": list(chosen.kernels),
            "systems": list(chosen.systems),
            "left_out": sorted(f"{system} {kind}" for system, kind in LEFT_OUT.get(tool, ())),
            "matrices": list(dict.fromkeys(name for each in watched for name in each.matrices)),
            "products": sum(each.products for each in watched),
            "errors": errors,
            "elsewhere": sum(each.elsewhere for each in watched),
            "log": log[:SHOWN_LINES],
            "seconds": round(sum(each.seconds for each in watched), 3),
            "exit": status,
        }


def run_checkers(
    root: Path,
    tools: Sequence[str],
    *,
    limit: float,
    device: str = "cuda",
    matrices: str = "",
    folder: Path | None = None,
) -> Iterator[tuple[str, dict[str, Any] | RuntimeError]]:
    """Run tools over the products, their parts in parallel; yield the result of each tool.

    ``limit`` is the seconds for each tool, after which all of them together are stopped.
    ``matrices`` are names from the contract suites, all when empty. In ``folder``, that of the
    record, parts that end before the limit are stored and not run again. A result is the tool's
    entry of the record, or why there is none: it was stopped at the limit, it gave no summary, or
    the products failed or did not run.
    """
    program, version = find_tool()
    seconds = limit * len(tools)
    run = _Run(
        root, program, version, device,
        ",".join([name for name in matrices.split(",") if name] or matrix_names()),
        time.perf_counter() + seconds, part_digests(), Kept(folder),
    )  # fmt: skip
    with ThreadPoolExecutor(PROCESSES) as pool:
        try:
            # Tools with the longest parts come first, so that all end at about the same time.
            parts = {
                tool: [
                    pool.submit(run.watch, checker(tool), task)
                    for task in _tasks(checker(tool).systems, tool)
                ]
                for tool in sorted(tools, key=SLOWEST_FIRST.index)
            }
            for tool in tools:
                try:
                    ended = [part.result() for part in parts[tool]]
                    yield tool, run.entry(checker(tool), ended, f"{seconds:g}")
                except RuntimeError as error:
                    yield tool, error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def write_checkers(entries: dict[str, dict[str, Any]], folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write entries by tool to ``folder/<gpu>/checkers.json``; return its path and content.

    Entries of other tools stay if they are of the same code on the same machine.
    """
    if not entries:
        raise value_error(
            "write_checkers", "entries", "of at least one tool", "none", "Run a checker first"
        )
    facts = {"schema": SCHEMA, **machine_facts(), "parts": part_digests()}
    path = Path(folder) / facts["gpu"]["slug"] / RECORD_NAME
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_text())
        if isinstance(before, dict):
            known = before.pop("checkers", {})
            known = known if isinstance(known, dict) and before == facts else {}
    record = {**facts, "checkers": {**known, **entries}}
    return write_json(record, path), record


def check_checkers(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a checkers' record, one sentence each; empty when it is clean."""
    again = "run `sparsetile verify --checker` on that GPU again"
    record, problems = read_proof(path, SCHEMA, again)
    if not record:
        return problems
    entries = record.get("checkers")
    if not isinstance(entries, dict) or not entries:
        return [f"{path}: holds no checker; {again}"]
    for tool, entry in entries.items():
        if tool not in TOOLS or not isinstance(entry, dict) or "errors" not in entry:
            problems.append(f"{path}: {tool} is no entry of a checker; {again}")
        elif entry["errors"] or entry.get("exit"):
            problems.append(
                f"{path}: {tool} found {entry['errors']} errors (exit {entry.get('exit')})"
            )
        elif not entry.get("products"):
            problems.append(f"{path}: {tool} saw no product; {again}")
    return problems
