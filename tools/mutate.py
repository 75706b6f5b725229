"""The mutation run: break the device code one token at a time; the GPU tests must fail.

    python -m tools.mutate [--only TEXT] [--rest RECORD] [--seconds N]
                           [--parallel 6] [--out DIR]                   on a machine with a GPU
    python -m tools.mutate --compile                                    anywhere

Each mutation of ``tools/mutations.py`` is applied to a copy of the device tree
(``tools/mutants.py``), and the suite of its kernels runs against that copy. A failed test, a crash
or a hanging test has noticed it. A mutation that does not compile is an error of its data. Every
suite must pass on the unchanged sources: it runs there too, unless ``verify.json`` of this GPU
shows that all its tests pass today. The test that noticed a mutation in an existing record runs
before the others of its suite: it takes seconds, the whole suite a minute. Mutations without such
a test start first, then those that took longest.

The result is ``results/<gpu>/mutations.json``, which CI checks with :func:`check_mutations`. What
``--seconds`` did not leave time for is "not run", the record is called ``mutations.partial.json``,
and ``--rest`` runs what is left of it.
``--compile`` compiles every mutant instead and shows that the change reaches the generated code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, print_table
from sparsetile.core.errors import value_error
from tools.mutant_runner import Job
from tools.mutants import apply, compile_all
from tools.mutations import MUTATIONS, SUITES, Mutation
from tools.parts import changed_parts, part_digests
from tools.record import RECORD_NAME as VERIFY_NAME
from tools.record import ROOT, machine_facts, passed_files, read_proof, write_json

SCHEMA = 2  # 2: a digest for each part of the code
RECORD_NAME = "mutations.json"
PARTIAL_NAME = "mutations.partial.json"  # of a run that had no time for some
LEAST = 150  # mutations that a record must have
TEST_SECONDS = 45.0  # a test takes a second or two, compiling included; longer is a hang
JOB_SECONDS = 240.0
# Outcomes that count as noticed; "survived", "invalid", "unfinished" and "not run" are the others.
NOTICED = ("failed", "hung", "crashed")
NOT_RUN = {"stopped": "time", "seconds": 0.0}  # the result of a job that did not start
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.mutant_runner import main; sys.exit(main(sys.argv[1:]))"
)


def noticed_by(records: Sequence[Path]) -> dict[tuple[str, ...], tuple[str, float]]:
    """Return the test that noticed each mutation in records of this code or of earlier code, and
    how long that took."""
    found: dict[tuple[str, ...], tuple[str, float]] = {}
    for path in records:
        try:
            entries = json.loads(path.read_text())["mutations"]
            found |= {_key(e): (e["test"], e["seconds"]) for e in entries if e["test"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # only a matter of speed
    return found


def proven_suites(folder: Path, facts: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return an entry for each suite whose tests all pass by the record of ``sparsetile verify``
    in ``folder``, which must be of today's code and of a machine with these facts."""
    path = folder / facts["gpu"]["slug"] / VERIFY_NAME
    passed = passed_files(path, facts)
    return {
        name: {"proof": VERIFY_NAME, "date": json.loads(path.read_text())["date"]}
        for name, suite in SUITES.items()
        if passed.issuperset(test.partition("::")[0] for test in suite.tests)
    }


def _settled(
    path: Path | None, facts: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the noticed mutations and the suites of a record of today's code on such a GPU."""
    record, problems = ({}, []) if path is None else read_proof(path, SCHEMA, "")
    if (
        not record
        or problems
        or changed_parts(record)
        or record["gpu"]["slug"] != facts["gpu"]["slug"]
    ):
        return [], {}
    wanted = {_key(_facts(each)) for each in MUTATIONS}
    noticed = [entry for entry in record["mutations"] if entry["outcome"] in NOTICED]
    return [entry for entry in noticed if _key(entry) in wanted], record["suites"]


def _jobs(
    suites: Collection[str], chosen: Sequence[Mutation], folder: Path, known: Sequence[Path]
) -> dict[str | Mutation, Job]:
    """Return a job for each suite on the unchanged sources and one for each mutation, in the order
    to start them: those that take long first. ``known`` are records that name first tests."""
    noticed = noticed_by(known)

    def job(name: str, suite: str, place: Path, tree: str, first: str = "") -> Job:
        place.mkdir(parents=True)
        asked = SUITES[suite]
        return Job(
            name, str(ROOT), [*asked.tests, "-m", "gpu"], str(place), TEST_SECONDS, JOB_SECONDS,
            tree, list(asked.systems), asked.leave_out, first,
        )  # fmt: skip

    found: dict[str | Mutation, Job] = {
        suite: job(f"suite {suite}", suite, folder / f"suite-{suite}", "") for suite in suites
    }
    took: dict[str | Mutation, float] = {}
    for number, mutation in enumerate(chosen):
        first, took[mutation] = noticed.get(_key(_facts(mutation)), ("", math.inf))
        found[mutation] = job(
            f"{number} {mutation.name}", mutation.suite, folder / f"mutant-{number}",
            str(apply(mutation, folder / f"tree-{number}")),
            first or SUITES[mutation.suite].first,
        )  # fmt: skip
    # A job that hangs takes as long as many others: not as the last one.
    return dict(sorted(found.items(), key=lambda each: -took.get(each[0], math.inf)))


def start_jobs(
    jobs: Sequence[Job], folder: Path, parallel: int, until: float = float("inf")
) -> list[dict[str, Any]]:
    """Run jobs in the warm process and return their results; none starts after ``until``."""
    path = folder / "jobs.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, "-c", _CHILD, str(ROOT), str(ROOT / "src")]
    command += [str(path), "--parallel", str(parallel), "--until", str(until)]
    if jobs and time.time() < until:
        subprocess.run(command, cwd=ROOT, stdout=2, check=True)
    paths = [Path(job.folder) / "result.json" for job in jobs]
    return [json.loads(path.read_text()) if path.is_file() else NOT_RUN for path in paths]


def outcome_of(result: dict[str, Any]) -> str:
    """Return the outcome of a mutation from a result of the runner."""
    if result.get("stopped") == "test":
        return "hung"
    if result.get("stopped"):
        return "not run" if result["stopped"] == "time" else "unfinished"
    if "exit" not in result:
        return "crashed"
    if result.get("error") == "CompileError":
        return "invalid"
    if "out of memory" in result.get("text", ""):
        return "unfinished"  # caused by the machine, not by the mutation
    if result["exit"] == 0 and result["passed"]:
        return "survived"
    return "failed" if result["exit"] == 1 and "test" in result else "unfinished"


def _tail(job: Job) -> str:
    try:
        return "\n".join((Path(job.folder) / "log.txt").read_text().splitlines()[-30:])
    except OSError:
        return ""


def _must_pass(job: Job, result: dict[str, Any]) -> None:
    if outcome_of(result) not in ("survived", "not run"):
        raise RuntimeError(
            f"mutate: {job.name} must pass on the sources as they are, got {result}. "
            f"Repair that first. The end of its log:\n{_tail(job)}"
        )


def _entry(mutation: Mutation, job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """Return the record's entry of a mutation that ran; show the log if no test noticed it."""
    outcome = outcome_of(result)
    if outcome not in (*NOTICED, "not run"):
        note(f"mutate: {mutation.name}: {outcome}\n{_tail(job)}")
    return {
        **_facts(mutation),
        "outcome": outcome,
        "test": result.get("test", ""),
        "error": result.get("error", ""),
        "seconds": result["seconds"],
    }


def collect(
    chosen: Sequence[Mutation],
    parallel: int,
    seconds: float = float("inf"),
    rest: Path | None = None,
) -> dict[str, Any]:
    """Run the suites and the mutations that the record ``rest`` does not settle; return the record
    of both. After ``seconds`` no further job starts."""
    begun, until = time.perf_counter(), time.time() + seconds
    facts, digest = machine_facts(), part_digests()
    kept, suites = _settled(rest, facts)
    suites = proven_suites(ROOT / "results", facts) | suites
    settled = {_key(entry) for entry in kept}
    left = [mutation for mutation in chosen if _key(_facts(mutation)) not in settled]
    used = [entry["suite"] for entry in kept] + [mutation.suite for mutation in left]
    suites = {name: suites[name] for name in dict.fromkeys(used) if name in suites}
    known = sorted((ROOT / "results").glob("*/mutations*.json"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        missing = dict.fromkeys(name for name in used if name not in suites)
        jobs = _jobs(missing, left, folder, [*known, *([] if rest is None else [rest])])
        results = dict(
            zip(jobs, start_jobs(list(jobs.values()), folder, parallel, until), strict=True)
        )
        again = [each for each in jobs if outcome_of(results[each]) == "unfinished"]
        for each in again:  # alone, with all memory and time
            for file in ("progress.json", "result.json"):
                Path(jobs[each].folder, file).unlink(missing_ok=True)
            (results[each],) = start_jobs([jobs[each]], folder, 1, until)
        for suite in missing:
            _must_pass(jobs[suite], results[suite])
            if outcome_of(results[suite]) == "survived":
                suites[suite] = {name: results[suite][name] for name in ("passed", "seconds")}
        entries = [*kept, *(_entry(each, jobs[each], results[each]) for each in left)]
    if part_digests() != digest:
        raise RuntimeError(
            "mutate: the code must stay as it is while the tests run, got a change. Run it again."
        )
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "parts": digest,
        "seconds": round(time.perf_counter() - begun, 1),
        "parallel": parallel,
        "kept": len(kept),
        "counts": dict(sorted(Counter(entry["outcome"] for entry in entries).items())),
        "suites": suites,
        "mutations": entries,
    }


_SHOWN = ("file", "before", "after", "breaks", "suite")


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(entry.get(name, "")) for name in _SHOWN)


def _facts(mutation: Mutation) -> dict[str, str]:
    return {name: getattr(mutation, name) for name in _SHOWN}


def suites_not_run(record: dict[str, Any]) -> str:
    """Return the names of suites that did not run on the unchanged sources."""
    used = dict.fromkeys(str(entry.get("suite")) for entry in record["mutations"])
    return ", ".join(name for name in used if name not in record.get("suites", ()))


def check_mutations(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of the mutation run, one sentence each."""
    again = "run `make mutate` on that GPU again"
    record, problems = read_proof(path, SCHEMA, again)
    if not record:
        return problems
    entries = record.get("mutations")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "outcome" in entry for entry in entries
    ):
        return [f"{path}: does not list an outcome per mutation; {again}"]
    if len(entries) < LEAST:
        problems.append(f"{path}: holds {len(entries)} mutations, {LEAST} are the least; {again}")
    found = {_key(entry) for entry in entries}
    wanted = {_key(_facts(each)) for each in MUTATIONS}
    if found != wanted:
        problems.append(f"{path}: tools/mutations.py changed since it was written; {again}")
    if absent := suites_not_run(record):
        problems.append(f"{path}: suites did not run without mutations ({absent}); {again}")
    for entry in entries:
        if entry["outcome"] not in NOTICED:
            problems.append(
                f"{path}: {entry.get('file')}: {entry.get('before')!r} -> {entry.get('after')!r} "
                f"{entry['outcome']}"
            )
    return problems


def main(arguments: Sequence[str]) -> int:
    """Run the selected mutations and return the exit code."""
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations whose file or fragment has this text")
    parser.add_argument(
        "--rest", type=Path, metavar="RECORD",
        help="only what this record of today's code does not settle; the rest is kept",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="N",
        help="start nothing after this time and stop what runs 20 s later",
    )  # fmt: skip
    parser.add_argument("--parallel", type=int, default=6, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write DIR/<gpu>/mutations.json")
    parser.add_argument("--compile", action="store_true", help="compile every mutant; no GPU")
    asked = parser.parse_args(list(arguments))
    chosen = [mutation for mutation in MUTATIONS if asked.only in mutation.name]
    try:
        if not chosen:
            raise value_error(
                "mutate", "--only", "part of the name of a mutation", repr(asked.only),
                "Omit it for all",
            )  # fmt: skip
        if asked.compile:
            return compile_all(chosen, asked.parallel)
        record = collect(chosen, asked.parallel, asked.seconds, asked.rest)
    except ValueError as error:
        note(f"mutate: error: {error}")
        return 2
    except RuntimeError as error:
        note(str(error))
        return 1
    print_table(
        ("file", "change", "outcome", "test", "s"),
        [
            [
                entry["file"],
                f"{entry['before']} -> {entry['after']}",
                entry["outcome"],
                entry["test"].rpartition("::")[2],
                f"{entry['seconds']:.0f}",
            ]
            for entry in record["mutations"]
        ],
        right=("s",),
    )
    note(f"mutate: {record['counts']} in {record['seconds']} s")
    if absent := suites_not_run(record):
        note(f"mutate: suites did not run without mutations: {absent}")
    if asked.only and asked.out is None:
        note("mutate: part of the mutations ran: the record was left as it is")
    else:
        folder = (asked.out or ROOT / "results") / record["gpu"]["slug"]
        left = any(entry["outcome"] == "not run" for entry in record["mutations"])
        note(
            f"mutate: wrote {write_json(record, folder / (PARTIAL_NAME if left else RECORD_NAME))}"
        )
    noticed = all(entry["outcome"] in NOTICED for entry in record["mutations"])
    return int(not noticed or bool(absent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
