"""Renew every proof of the current code in one command. Needs a GPU, except for --release.

    python -m tools.prove [--out DIR] [--only verify,fuzz,stress,soak,checkers] [--fuzz-seconds S]
                          [--stress-seconds S] [--checker-seconds S] [--list]
    python -m tools.prove --release

    verify     the tests marked ``gpu`` of parts that changed   about 140 s on an H200 for all
    fuzz       random products and layers, a process a core     120 s by default, 25,000 cases
    stress     threads and streams on 20,000 cold plans         330 s by default, 8 processes
    soak       streams, threads, 10,000 plans                   about 240 s beside the checkers
    checkers   the tools of compute-sanitizer that lack here    about 450 s for all

Soak and checkers run in parallel: the checkers are bound by the host, not the GPU. The fuzzer's
processes share the GPU through NVIDIA's MPS if its daemon is installed, which makes them about four
times as fast. Those of the stress do not, because the GPU has to switch between them. A fresh proof
is not renewed, and checkers that were stopped continue from ``checkers.partial.json``; both are
searched in DIR and in ``results``. Exit code: 0 if all selected proofs are fresh, 1 if one is not.

CI requires only ``verify``. The others are proofs of a release: ``--release`` shows how old each
is, and exits with 1 if one is missing, has errors, or is not of the current code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsetile.cli.console import note, print_table
from sparsetile.core.checks import one_of
from tools.checkers import PARTIAL_NAME, SCHEMA, TOOLS, check_checkers
from tools.checkers import RECORD_NAME as CHECKERS_NAME
from tools.fuzz import check_fuzz
from tools.mutate import check_mutations
from tools.mutate_host import check_host
from tools.parts import changed_parts
from tools.proofs import ages
from tools.record import ROOT, check_record, machine_facts, read_proof
from tools.soak import check_soak
from tools.stress import check_stress

PROOFS = ("verify", "fuzz", "stress", "soak", "checkers")
# Processes of the stress: more of them make a missing wait more visible, and each plan slower.
STRESS_PROCESSES = 8
CHECKS: Mapping[str, Callable[[Path], list[str]]] = {
    "verify": check_record,
    "fuzz": check_fuzz,
    "stress": check_stress,
    "soak": check_soak,
    "checkers": check_checkers,
    "mutations": check_mutations,
    "mutations_host": check_host,
}


@dataclass(frozen=True)
class Asked:
    """What is made: into which folder, which proofs, and for how long."""

    out: Path
    only: tuple[str, ...] = PROOFS
    fuzz_seconds: float = 120.0
    stress_seconds: float = 330.0
    checker_seconds: float = 450.0


def lacking(path: Path) -> list[str]:
    """Return the tools without a clean entry of the current code in a checkers' record."""
    record, problems = read_proof(path, SCHEMA, "")
    entries = {} if problems or changed_parts(record) else record.get("checkers", {})
    return [tool for tool in TOOLS if tool not in entries or entries[tool].get("errors")]


def fresh(proof: str, folder: Path) -> bool:
    """Whether a folder of one GPU has this proof of the current code, without errors."""
    path = folder / f"{proof}.json"
    if not path.is_file() or CHECKS[proof](path) or changed_parts(json.loads(path.read_text())):
        return False
    return proof != "checkers" or not lacking(path)


def release() -> int:
    """Print the age and the errors of every committed proof; 0 if all are of the current code."""
    found = ages(ROOT)
    print_table(("proof", "of"), [[age.name, age.text] for age in found])
    faults = []
    for age in found:
        path = ROOT / "results" / f"{age.name}.json"
        faults += CHECKS[path.stem](path) if path.is_file() else []
    for fault in faults:
        note(f"prove: {fault}")
    return 0 if all(age.today for age in found) and not faults else 1


def commands(asked: Asked, folder: Path) -> dict[str, list[str]]:
    """Return the command of each proof that is not fresh, by its name."""
    out = ["--out", str(asked.out)]
    processes = max((os.cpu_count() or 2) - 1, 1)
    tools = lacking(folder / CHECKERS_NAME)
    each = asked.checker_seconds / max(len(tools), 1)
    made = {
        "verify": ["tools.verify", *out],
        "fuzz": [
            "tools.fuzz", "--device", "cuda", "--seconds", f"{asked.fuzz_seconds:.0f}",
            "--processes", str(processes), *out,
        ],
        "stress": [
            "tools.stress", "--device", "cuda", "--seconds", f"{asked.stress_seconds:.0f}",
            "--processes", str(STRESS_PROCESSES), *out,
        ],
        "soak": [
            "tools.soak", "--device", "cuda", "--seconds", "60", "--streams", "4",
            "--threads", "8", "--plans", "10000", *out,
        ],
        "checkers": [
            "tools.verify", "--checker", ",".join(tools), "--time-limit", f"{each:.0f}", *out,
        ],
    }  # fmt: skip
    return {
        name: [sys.executable, "-m", *words]
        for name, words in made.items()
        if name in asked.only and not fresh(name, folder)
    }


def _bring(folder: Path, source: Path) -> None:
    """Copy the proofs that the folder lacks from ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{proof}.json" for proof in PROOFS), PARTIAL_NAME):
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)


def make_proofs(asked: Asked, folder: Path) -> None:
    wanted = commands(asked, folder)
    for name in ("verify", "fuzz", "stress"):
        if name not in wanted:
            continue
        note(f"prove: {name}")
        subprocess.run(wanted[name], cwd=ROOT, check=False)
    beside = {name: wanted[name] for name in ("soak", "checkers") if name in wanted}
    if beside:
        note(f"prove: {' and '.join(beside)}")
    started = [subprocess.Popen(words, cwd=ROOT) for words in beside.values()]
    try:
        for one in started:
            one.wait()
    finally:
        for one in started:
            if one.poll() is None:
                one.terminate()  # the checkers end what they started


def main(arguments: Sequence[str]) -> int:
    """Make what is not fresh, and return the exit code."""
    parser = argparse.ArgumentParser(prog="prove", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="write DIR/<gpu>/*.json")
    parser.add_argument("--only", default=",".join(PROOFS), help="proofs, comma-separated")
    parser.add_argument("--fuzz-seconds", type=float, default=Asked.fuzz_seconds)
    parser.add_argument("--stress-seconds", type=float, default=Asked.stress_seconds)
    parser.add_argument("--checker-seconds", type=float, default=Asked.checker_seconds)
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--release", action="store_true", help="show how old each proof is")
    given = parser.parse_args(list(arguments))
    if given.release:
        return release()
    try:
        only = tuple(one_of("prove", "--only", name, PROOFS) for name in given.only.split(","))
        slug = machine_facts()["gpu"]["slug"]
    except (ValueError, RuntimeError) as error:
        note(f"prove: error: {error}")
        return 2
    limits = (given.fuzz_seconds, given.stress_seconds, given.checker_seconds)
    asked = Asked(given.out.resolve(), only, *limits)
    folder = asked.out / slug
    _bring(folder, ROOT / "results" / slug)
    if given.list:
        for words in commands(asked, folder).values():
            print(" ".join(words[1:]))
        return 0
    make_proofs(asked, folder)
    stale = [name for name in only if not fresh(name, folder)]
    for name in only:
        note(f"prove: {name} is {'not ' if name in stale else ''}fresh in {folder}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
