"""The mutation run: break the device code one token at a time; the GPU tests must fail.

    python -m tools.mutate [--only TEXT] [--parallel 6] [--out DIR]     on a machine with a GPU
    python -m tools.mutate --compile                                    anywhere

Each mutation of ``tools/mutations.py`` is applied to a copy of the device tree, and the suite of
its kernels runs against that copy. A failed test, a crash or a hanging test has noticed it. A
mutation that does not compile is an error of its data. First every suite must pass on the unchanged
sources. The test that noticed a mutation in the existing record runs before the others of its
suite: it takes seconds, the whole suite a minute.

The result is ``results/<gpu>/mutations.json``, which CI checks with :func:`check_mutations`.
``--compile`` compiles every mutant instead and shows that the change reaches the generated code.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, print_table
from sparsetile.core.errors import value_error
from sparsetile.jit.source import DEVICE_TREE, KernelSource
from sparsetile.kernels import KERNELS
from tools.digest import strip_cuda
from tools.mutant_runner import Job
from tools.mutations import MUTATIONS, SUITES, Mutation
from tools.parts import part_digests
from tools.record import ROOT, machine_facts, read_proof, write_json

SCHEMA = 2  # 2: a digest for each part of the code
RECORD_NAME = "mutations.json"
LEAST = 150  # mutations that a record must have
TEST_SECONDS = 45.0  # a test takes a second or two, compiling included; longer is a hang
JOB_SECONDS = 240.0
# Outcomes that count as noticed; "survived" and "invalid" are the others.
NOTICED = ("failed", "hung", "crashed")
# Configurations of a kernel that --compile tries until one differs.
TRIED = 30
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.mutant_runner import main; sys.exit(main(sys.argv[1:]))"
)
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def mutated(mutation: Mutation, tree: Path = DEVICE_TREE) -> str:
    """Return the text of the mutation's file with the mutation applied."""
    path = tree / mutation.file
    text = path.read_text() if path.is_file() else ""
    count = text.count(mutation.before)
    if count != 1:
        raise value_error(
            "mutate", f"fragment {mutation.before!r}", f"in {mutation.file} exactly once",
            f"{count} times", "Choose a fragment of today's source in tools/mutations.py",
        )  # fmt: skip
    changed = text.replace(mutation.before, mutation.after)
    if strip_cuda(changed) == strip_cuda(text):
        raise value_error(
            "mutate", f"fragment {mutation.before!r}", "code", "a comment or white space",
            "Choose a fragment of code in tools/mutations.py",
        )  # fmt: skip
    return changed


def apply(mutation: Mutation, folder: Path, tree: Path = DEVICE_TREE) -> Path:
    """Copy the device tree to ``folder`` with the mutation applied; return the copy."""
    changed = mutated(mutation, tree)
    shutil.copytree(tree, folder)
    (folder / mutation.file).write_text(changed)
    return folder


def kernels_with(file: str) -> list[str]:
    """Return the kernels whose source is ``file`` or includes it, directly or not."""

    def included(name: str, seen: set[str]) -> set[str]:
        if name not in seen:
            seen.add(name)
            for other in _INCLUDE.findall((DEVICE_TREE / name).read_text()):
                included(other, seen)
        return seen

    return [name for name, spec in KERNELS.items() if file in included(spec.file, set())]


def _compiled(text: str, entry: str, tree: Path) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name=entry, arch="sm_90a", std="c++17", include_path=str(tree))
    return bytes(Program(text, "c++", options=options).compile("cubin").code)


@functools.lru_cache(maxsize=256)
def _original(source: KernelSource) -> bytes:
    return _compiled(source.text(), source.entry, DEVICE_TREE)


def compile_mutant(mutation: Mutation) -> str:
    """Compile kernels that include the mutated file until the code of one differs.

    Return the label of that configuration; empty if none of those tried differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = apply(mutation, Path(folder) / "cuda")
        suite = SUITES[mutation.suite]
        names = sorted(kernels_with(mutation.file), key=lambda name: name != suite.kernel)
        for spec in map(KERNELS.__getitem__, names):
            wanted = suite.constant
            configs = [each for each in spec.configs() if not wanted or each.get(wanted)]
            for config in random.Random(0).sample(configs, min(TRIED, len(configs))):
                source = spec.source(config)
                header = source.text().removesuffix(source.path.read_text())
                text = header + (tree / source.file).read_text()
                if _compiled(text, spec.name, tree) != _original(source):
                    return source.label
    return ""


def noticed_by(records: Sequence[Path]) -> dict[tuple[str, ...], str]:
    """Return the test that noticed each mutation in records of this code or of earlier code."""
    found: dict[tuple[str, ...], str] = {}
    for path in records:
        try:
            entries = json.loads(path.read_text())["mutations"]
            found |= {_key(entry): entry["test"] for entry in entries if entry["test"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # only a matter of speed
    return found


def _jobs(chosen: Sequence[Mutation], folder: Path) -> list[Job]:
    """Return a job for each suite on the unchanged sources, then one for each mutation."""
    known = noticed_by(sorted((ROOT / "results").glob(f"*/{RECORD_NAME}")))

    def job(name: str, suite: str, place: Path, tree: str, first: str = "") -> Job:
        place.mkdir(parents=True)
        asked = SUITES[suite]
        return Job(
            name, str(ROOT), [*asked.tests, "-m", "gpu"], str(place), TEST_SECONDS, JOB_SECONDS,
            tree, list(asked.systems), asked.leave_out, first,
        )  # fmt: skip

    found = [
        job(f"suite {suite}", suite, folder / f"suite-{suite}", "")
        for suite in dict.fromkeys(mutation.suite for mutation in chosen)
    ]
    for number, mutation in enumerate(chosen):
        place = folder / f"mutant-{number}"
        tree = apply(mutation, folder / f"tree-{number}")
        first = known.get(_key(_facts(mutation)), "")
        found.append(job(f"{number} {mutation.name}", mutation.suite, place, str(tree), first))
    return found


def start_jobs(jobs: Sequence[Job], folder: Path, parallel: int) -> list[dict[str, Any]]:
    """Run jobs in the warm process and return their results."""
    path = folder / "jobs.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, "-c", _CHILD, str(ROOT), str(ROOT / "src")]
    command += [str(path), "--parallel", str(parallel)]
    subprocess.run(command, cwd=ROOT, stdout=2, check=True)
    return [json.loads((Path(job.folder) / "result.json").read_text()) for job in jobs]


def outcome_of(result: dict[str, Any]) -> str:
    """Return the outcome of a mutation from a result of the runner."""
    if result.get("stopped") == "test":
        return "hung"
    if result.get("stopped"):
        return "unfinished"
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


def _must_pass(jobs: Sequence[Job], results: Sequence[dict[str, Any]]) -> None:
    for job, result in zip(jobs, results, strict=True):
        if outcome_of(result) != "survived":
            raise RuntimeError(
                f"mutate: {job.name} must pass on the sources as they are, got {result}. "
                f"Repair that first. The end of its log:\n{_tail(job)}"
            )


def collect(chosen: Sequence[Mutation], parallel: int) -> dict[str, Any]:
    """Run the suites, then the mutations, and return the record."""
    facts, digest, begun = machine_facts(), part_digests(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = _jobs(chosen, folder)
        suites = len(jobs) - len(chosen)
        results = start_jobs(jobs, folder, parallel)
        _must_pass(jobs[:suites], results[:suites])
        again = [n for n, result in enumerate(results) if outcome_of(result) == "unfinished"]
        for place in again:  # alone, with all memory and time
            for left in ("progress.json", "result.json"):
                Path(jobs[place].folder, left).unlink(missing_ok=True)
            (results[place],) = start_jobs([jobs[place]], folder, 1)
        logs = [_tail(job) for job in jobs]
    if part_digests() != digest:
        raise RuntimeError(
            "mutate: the code must stay as it is while the tests run, got a change. Run it again."
        )
    entries = []
    for mutation, result, log in zip(chosen, results[suites:], logs[suites:], strict=True):
        outcome = outcome_of(result)
        if outcome not in NOTICED:
            note(f"mutate: {mutation.name}: {outcome}\n{log}")
        entries.append(
            {
                **_facts(mutation),
                "outcome": outcome,
                "test": result.get("test", ""),
                "error": result.get("error", ""),
                "seconds": result["seconds"],
            }
        )
    counts = Counter(entry["outcome"] for entry in entries)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "parts": digest,
        "seconds": round(time.perf_counter() - begun, 1),
        "parallel": parallel,
        "counts": dict(sorted(counts.items())),
        "suites": {
            job.name.removeprefix("suite "): {name: result[name] for name in ("passed", "seconds")}
            for job, result in zip(jobs[:suites], results[:suites], strict=True)
        },
        "mutations": entries,
    }


_SHOWN = ("file", "before", "after", "breaks", "suite")


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(entry.get(name, "")) for name in _SHOWN)


def _facts(mutation: Mutation) -> dict[str, str]:
    return {name: getattr(mutation, name) for name in _SHOWN}


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
    for entry in entries:
        if entry["outcome"] not in NOTICED:
            problems.append(
                f"{path}: {entry.get('file')}: {entry.get('before')!r} -> {entry.get('after')!r} "
                f"{entry['outcome']}"
            )
    return problems


def _compile_all(chosen: Sequence[Mutation], parallel: int) -> int:
    """Compile every mutant; say which do not compile or change nothing."""

    def one(mutation: Mutation) -> str:
        try:
            return "" if compile_mutant(mutation) else "changes no code of the kernels compiled"
        except Exception as error:  # cuda.core's own
            return f"does not compile: {error}"

    bad = 0
    importlib.import_module("cuda.core")  # its first import must not meet another's
    with ThreadPoolExecutor(parallel) as pool:
        for mutation, problem in zip(chosen, pool.map(one, chosen), strict=True):
            bad += bool(problem)
            note(f"mutate: {mutation.name}: {problem or 'compiles'}")
    return 1 if bad else 0


def main(arguments: Sequence[str]) -> int:
    """Run the selected mutations and return the exit code."""
    parser = argparse.ArgumentParser(prog="mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations whose file or fragment has this text")
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
            return _compile_all(chosen, asked.parallel)
        record = collect(chosen, asked.parallel)
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
    if asked.only and asked.out is None:
        note("mutate: part of the mutations ran: the record was left as it is")
    else:
        folder = asked.out or ROOT / "results"
        note(f"mutate: wrote {write_json(record, folder / record['gpu']['slug'] / RECORD_NAME)}")
    return int(any(entry["outcome"] not in NOTICED for entry in record["mutations"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
