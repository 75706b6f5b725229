"""The compile record: registers and spills of every kernel's configurations.

    python -m tools.compile_all [--jobs N] [--out DIR] [--kernel NAME ...] [--again]

Compiling everything takes about 90 minutes of one core, too long for CI. This writes
``results/compile/<nvrtc>.json`` with a digest of each kernel, and the assembler's figures of each
configuration. CI checks the digests, rejects spills that ``allowed_spills`` does not list, and
compiles a sample again. No GPU is needed.

Every configuration is compiled for the architectures that machine code is kept for, and for
``OTHERS`` enough of them that each value of each constant occurs. Spills of the latter are printed
and are no error: nobody has run these kernels there.

A kernel's digest covers its file and those it includes, its generated header and its
configurations. A kernel with an unchanged digest is compiled again only with ``--again``. Comments,
white space, the folders of files and the order of neighbouring includes do not count: a file that
moves needs no compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, progress_bar
from sparsetile.core.checks import one_of
from sparsetile.core.errors import CompileError, value_error
from sparsetile.jit import ARCHITECTURES, KernelSource, compile_source, nvrtc_version
from sparsetile.jit.source import DEVICE_TREE, ConfigValue
from sparsetile.kernels import KERNELS, KernelSpec
from tools.digest import strip_cuda
from tools.record import ROOT, write_text

SCHEMA = 1
FOLDER = ROOT / "results" / "compile"
# Further GPUs that kernels compile for. Their record is a sample: all would take twice the time.
OTHERS = ("sm_86", "sm_100a", "sm_120a")
# Recorded figures of each cubin, in this order.
FIELDS = ("registers", "spill_store_bytes", "spill_load_bytes", "static_shared_bytes")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_INCLUDES = re.compile(r'(?:^#include "[^"]+"\n)+', re.MULTILINE)
_FOLDER = re.compile(r'(?<=^#include ")(?:[^"/]+/)+|(?<=^#line 1 ")(?:[^"/]+/)+', re.MULTILINE)
_AGAIN = "run `make compile-all` and commit the result"


@dataclass(frozen=True)
class Job:
    """One configuration of one kernel for one architecture."""

    spec: KernelSpec
    source: KernelSource
    arch: str


def jobs(kernels: Iterable[str] | None = None) -> list[Job]:
    """Return every job of the kernels named; of all when None."""
    return [
        Job(spec, spec.source(config), arch)
        for spec in (KERNELS[name] for name in (KERNELS if kernels is None else kernels))
        for config, sampled in _sampled(spec)
        for arch in (*ARCHITECTURES, *(OTHERS if sampled else ()))
        if spec.runs_on(arch)
    ]


def _sampled(spec: KernelSpec) -> Iterator[tuple[Mapping[str, ConfigValue], bool]]:
    """Each configuration, and whether a value of a constant occurs in it for the first time."""
    seen: set[tuple[str, ConfigValue]] = set()
    for config in spec.configs():
        fresh = not seen.issuperset(config.items()) or not seen
        seen.update(config.items())
        yield config, fresh


def _included(name: str, seen: dict[str, str]) -> dict[str, str]:
    """Return the text of a device file and of all that it includes, by path in the device tree."""
    if name not in seen:
        seen[name] = (DEVICE_TREE / name).read_text()
        for other in _INCLUDE.findall(seen[name]):
            _included(other, seen)
    return seen


def _code(text: str) -> str:
    """Return device code for the digest: no comments, no folders, neighbouring includes sorted."""
    bare = _FOLDER.sub("", text)
    return strip_cuda(
        _INCLUDES.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), bare)
    )


def kernel_digest(spec: KernelSpec, recorded: Collection[str] | None = None) -> str:
    """Return SHA-256 over all inputs of one kernel's cubins; if labels were ``recorded``, of these
    configurations in place of today's. It is empty if today's code cannot make the first of them.
    """
    sources = {source.label: source for source in map(spec.source, spec.configs())}
    labels = sorted(sources if recorded is None else recorded)
    if not labels or labels[0] not in sources:
        return ""
    digest = hashlib.sha256()
    files = {Path(name).name: text for name, text in _included(spec.file, {}).items()}
    for name, text in sorted(files.items()):
        digest.update(f"{name} {_code(text)}\n".encode())
    digest.update(_code(sources[labels[0]].text()).encode())
    archs = " ".join(arch for arch in ARCHITECTURES if spec.runs_on(arch))
    for label in labels:
        digest.update(f"{label} {archs}\n".encode())
    return digest.hexdigest()


def kernel_digests() -> dict[str, str]:
    """Return the digest of every kernel by its name."""
    return {name: kernel_digest(KERNELS[name]) for name in sorted(KERNELS)}


def unchanged(record: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return the configurations of a record whose code has not changed.

    A kernel that has more or fewer configurations since compiles only the new ones.
    """
    digests, labels = record.get("kernels", {}), dict[str, list[str]]()
    for label in record.get("configurations", {}):
        labels.setdefault(label.partition("[")[0], []).append(label)
    wanted = {job.source.label for job in jobs()}
    return {
        label: record["configurations"][label]
        for name, mine in labels.items()
        if name in KERNELS and digests.get(name) == kernel_digest(KERNELS[name], mine)
        for label in mine
        if label in wanted
    }


def compile_job(job: Job) -> list[int]:
    """Compile one job past the cache and return the numbers that ``FIELDS`` names."""
    resources = compile_source(job.source, job.arch, use_cache=False).resources
    return [int(getattr(resources, name)) for name in FIELDS]


def record_path(folder: Path = FOLDER) -> Path:
    """Return the path of the record for this machine's NVRTC."""
    return folder / ("{}.{}.json".format(*nvrtc_version()))


def collect(
    work: Sequence[Job],
    threads: int,
    step: Callable[[], None],
    known: Mapping[str, dict[str, list[int]]] | None = None,
) -> dict[str, Any]:
    """Compile jobs on several threads and return the record.

    Configurations in ``known``, from :func:`unchanged`, are not compiled again.
    """
    digests, begun = kernel_digests(), time.perf_counter()
    found: dict[str, dict[str, list[int]]] = dict(known or {})
    refused: list[str] = []

    def one(job: Job) -> list[int] | str:
        try:
            return compile_job(job)
        except CompileError as error:
            return str(error)

    # NVRTC releases the interpreter lock. The longest kernels come first, to end together.
    ordered = sorted(work, key=lambda job: -job.source.path.stat().st_size)
    with ThreadPoolExecutor(threads) as pool:
        for job, outcome in zip(ordered, pool.map(one, ordered), strict=True):
            step()
            if isinstance(outcome, str):
                refused.append(outcome)
            else:
                found.setdefault(job.source.label, {})[job.arch] = outcome
    if refused:
        raise RuntimeError(
            f"compile_all: every configuration must compile, got {len(refused)} refused. "
            f"The first:\n{refused[0]}"
        )
    if kernel_digests() != digests:
        raise RuntimeError(
            "compile_all: the device code must stay as it is meanwhile, got a change. Run it again."
        )
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "threads": threads,
        "seconds": round(time.perf_counter() - begun, 1),
        "compiled": len(work),
        "fields": list(FIELDS),
        "kernels": digests,
        "configurations": {
            label: {arch: found[label][arch] for arch in sorted(found[label])}
            for label in sorted(found)
        },
    }


def as_text(record: dict[str, Any]) -> str:
    """Return the record as JSON with one line per configuration."""
    facts = {name: value for name, value in record.items() if name != "configurations"}
    rows = ",\n".join(
        f"  {json.dumps(label)}: {json.dumps(archs)}"
        for label, archs in record["configurations"].items()
    )
    head = json.dumps(facts, indent=1).removesuffix("\n}")
    return f'{head},\n "configurations": {{\n{rows}\n }}\n}}\n'


def unlisted_spills(
    record: dict[str, Any], architectures: Collection[str] = ARCHITECTURES
) -> list[str]:
    """Return a sentence for each configuration that spills more than its kernel allows."""
    allowed = {
        label: KERNELS[name].allowed_spills if name in KERNELS else 0
        for label in record["configurations"]
        for name in (label.partition("[")[0],)
    }
    stores, loads = FIELDS.index("spill_store_bytes"), FIELDS.index("spill_load_bytes")
    return [
        f"{label} spills {max(numbers[stores], numbers[loads])} bytes on {arch}, "
        f"{allowed[label]} are allowed"
        for label, archs in record["configurations"].items()
        for arch, numbers in archs.items()
        if arch in architectures and max(numbers[stores], numbers[loads]) > allowed[label]
    ]


def check_compiled(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a compile record, one sentence each; empty when it is current."""
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        return [f"{path}: cannot be read ({error}); {_AGAIN}"]
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return [f"{path}: is no compile record of schema {SCHEMA}; {_AGAIN}"]
    today = kernel_digests()
    digests = record.get("kernels", {})
    changed = ", ".join(name for name in today if digests.get(name) != today[name])
    if changed:
        return [f"{path}: device code or configurations of {changed} changed since; {_AGAIN}"]
    recorded, wanted = record["configurations"], {(job.source.label, job.arch) for job in jobs()}
    found = {(label, arch) for label, archs in recorded.items() for arch in archs}
    problems = [f"{path}: {label} for {arch} is missing" for label, arch in wanted - found]
    problems += [f"{path}: {label} for {arch} is unknown" for label, arch in found - wanted]
    problems += [
        f"{path}: {label} has no registers on {arch}"
        for label, archs in recorded.items()
        for arch, numbers in archs.items()
        if len(numbers) != len(FIELDS) or numbers[0] <= 0
    ]
    return problems or [f"{path}: {text}" for text in unlisted_spills(record)]


def _known(path: Path) -> dict[str, dict[str, list[int]]]:
    """Return the entries of unchanged kernels in the record; nothing without a record."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict) or (record.get("schema"), record.get("fields")) != (
        SCHEMA, list(FIELDS),
    ):  # fmt: skip
        return {}
    return unchanged(record)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores this process may use, not those there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(arguments: Sequence[str]) -> int:
    """Compile what the arguments name, write the record, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="compile_all", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=0, help="threads; one per core when 0")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the record")
    parser.add_argument("--kernel", action="append", help="only this kernel; writes nothing")
    parser.add_argument("--again", action="store_true", help="compile what has not changed, too")
    asked = parser.parse_args(list(arguments))
    try:
        for name in asked.kernel or ():
            one_of("compile_all", "--kernel", name, KERNELS)
        if asked.jobs < 0:
            raise value_error(
                "compile_all", "--jobs", "0 or a number of threads", asked.jobs, "Omit it"
            )
        known = {} if asked.again or asked.kernel else _known(record_path(asked.out))
        work = [
            job for job in jobs(asked.kernel) if job.arch not in known.get(job.source.label, ())
        ]
        with progress_bar("compiling", len(work)) as step:
            record = collect(work, asked.jobs or _cores(), step, known)
    except ValueError as error:
        note(f"compile_all: error: {error}")
        return 2
    except RuntimeError as error:
        note(str(error))
        return 1
    note(f"compile_all: {len(work)} cubins in {record['seconds']} s")
    spills = unlisted_spills(record)
    for text in spills:
        note(f"compile_all: error: {text}")
    for text in unlisted_spills(record, OTHERS):
        note(f"compile_all: {text}")
    if asked.kernel:
        note("compile_all: part of the kernels was compiled: the record was left as it is")
    else:
        note(f"compile_all: wrote {write_text(as_text(record), record_path(asked.out))}")
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
