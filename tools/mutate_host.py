"""The mutation run of host code: break Python code one place at a time; the CPU tests must notice.

    python -m tools.mutate_host [--seed 0] [--count 150] [--only TEXT] [--rest RECORD]
                                [--parallel 1] [--out DIR]

``tools/host_mutations.py`` draws changes of the packages in ``HOST_PACKAGES``. First every file of
their tests runs once on the code as it is, and notes which lines each test runs. Then each mutant
runs tests that reach its line, for ``TESTS_SECONDS`` at most: one for each line of the function
first, then those of its package, of a file with its module's name before others, fast ones before
slow ones. A failed test, a crash or a test that hangs has noticed the change. What no test reaches
is not covered, and counts as not noticed. Last, the tests that noticed a change run on the code as
it is once more: one that fails there notices nothing. The lines are kept in ``build/mutate_host``
for as long as code and tests stay.

The result is ``results/cpu/mutations_host.json``, which CI checks with :func:`check_host`. It is a
proof of a release.
"""

from __future__ import annotations

import argparse
import json
import marshal
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, print_table
from sparsetile.core.errors import value_error
from tools.host_mutations import EQUIVALENT, Place, mutant
from tools.host_reach import (
    FILE_LIMIT,
    LEAST_EACH,
    Checkout,
    Reach,
    log_tail,
    reach_of_tests,
    start,
)
from tools.host_runner import HostJob
from tools.parts import HOST_PACKAGES, host_digests
from tools.record import ROOT, device_facts, read_proof, write_json

SCHEMA = 1
RECORD_NAME = "mutations_host.json"
# What a record must hold: mutations in all, and the share of them that was noticed.
LEAST, SHARE = 120, 0.95
EQUIVALENT_MOST = 12
NOTICED = ("failed", "hung", "crashed")
# A test takes a few seconds; ranks that wait for another give up after 60.
TEST_LIMIT, JOB_LIMIT = 75.0, 300.0


def outcome_of(result: Mapping[str, Any]) -> str:
    """Return what a result of the runner means for the mutant."""
    if result.get("stopped") == "test":
        return "hung"
    if "exit" not in result:
        return "unfinished" if result.get("stopped") else "crashed"
    if result["exit"] == 0:
        return "survived" if result["passed"] else "unfinished"
    # 2 and 4: the files of tests cannot even be imported.
    return "failed" if result["exit"] in (1, 2, 4) else "unfinished"


def _jobs(
    places: Sequence[Place],
    reach: Reach,
    checkout: Checkout,
    folder: Path,
    first: Mapping[Any, str],
) -> dict[Place, HostJob]:
    """Return a job for each place that a test reaches, with the mutant's code in its folder."""
    jobs = {}
    for number, place in enumerate(places):
        tests = reach.chosen(place, first.get(place.key, ""))
        if not tests:
            continue
        words = [checkout.name, *Path(place.file).with_suffix("").parts]
        module = ".".join(words).removesuffix(".__init__")
        code = folder / f"mutant-{number}.code"
        code.write_bytes(module.encode() + b"\n" + marshal.dumps(mutant(place, checkout.package)))
        name = f"{place.file}:{place.line} {place.change}"
        jobs[place] = HostJob(
            name, str(checkout.root), tests, str(folder / f"mutant-{number}"), TEST_LIMIT,
            JOB_LIMIT, str(code),
        )  # fmt: skip
    return jobs


def failing(tests: Iterable[str], checkout: Checkout, folder: Path) -> set[str]:
    """Return which of some tests fail on the code as it is."""
    left, found = sorted(set(tests)), set[str]()
    for turn in range(len(left)):
        place = str(folder / f"again-{turn}")
        job = HostJob("tests again", str(checkout.root), left, place, FILE_LIMIT, FILE_LIMIT)
        (result,) = start([job], checkout, folder, 1)
        if outcome_of(result) == "survived":
            break
        if result.get("test") not in left:
            raise RuntimeError(f"mutate_host: tests must run, got {result}\n{log_tail(job)}")
        found.add(result["test"])
        left.remove(result["test"])
    return found


def _held(path: Path) -> dict[tuple[str, ...], str]:
    """Return which test noticed each mutation of a record: a matter of speed alone."""
    try:
        entries = json.loads(path.read_text())["mutations"]
        return {(e["file"], e["function"], e["change"]): e["test"] for e in entries if e["test"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _settled(path: Path, digests: Mapping[str, str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the entries of a record of today's code that a test noticed or that are equivalent."""
    record, problems = read_proof(path, SCHEMA, "")
    if problems or record["packages"] != digests:
        return {}
    keys = [((e["file"], e["function"], e["change"]), e) for e in record["mutations"]]
    return {
        (*key, e["line"]): e
        for key, e in keys
        if (e["outcome"] in NOTICED and e["test"] and key not in EQUIVALENT)
        or (e["outcome"] == "equivalent" and EQUIVALENT.get(key) == e["reason"])
    }


def collect(
    places: Sequence[Place], checkout: Checkout, kept: Path, parallel: int = 1
) -> list[dict[str, Any]]:
    """Run mutants and return an entry of the record for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reach = reach_of_tests(checkout, folder, kept, parallel)
        first = _held(checkout.root / "results" / "cpu" / RECORD_NAME)
        jobs = _jobs(places, reach, checkout, folder, first)
        results = dict(
            zip(jobs, start(list(jobs.values()), checkout, folder, parallel), strict=True)
        )
        noticing = (r.get("test", "") for r in results.values() if outcome_of(r) == "failed")
        unreliable = failing((test for test in noticing if "::" in test), checkout, folder)
    entries = []
    for place in places:
        result = results.get(place, {})
        outcome = outcome_of(result) if result else "not covered"
        if result.get("test") in unreliable and outcome == "failed":
            outcome = "unreliable"
        reason = EQUIVALENT.get(place.key, "")
        entries.append(
            {
                "file": place.file,
                "function": place.function,
                "line": place.line,
                "kind": place.kind,
                "change": place.change,
                "outcome": "equivalent" if reason and outcome not in NOTICED else outcome,
                "reason": reason,
                "test": result.get("test", ""),
                "error": result.get("error", ""),
                "tests": len(jobs[place].tests) if place in jobs else 0,
                "seconds": result.get("seconds", 0.0),
            }
        )
    return entries


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many there are of each outcome, and the share noticed of those that count."""
    counts = Counter(entry["outcome"] for entry in entries)
    counting = len(entries) - counts["equivalent"]
    noticed = sum(counts[name] for name in NOTICED)
    packages = Counter(entry["file"].partition("/")[0] for entry in entries)
    return {
        "mutations": len(entries),
        "noticed": noticed,
        "share": round(noticed / max(counting, 1), 4),
        "outcomes": dict(sorted(counts.items())),
        "packages": dict(packages),
    }


def check_host(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of this run, one sentence each; empty when it is right."""
    again = "run `python -m tools.mutate_host` again"
    record, problems = read_proof(path, SCHEMA, again)
    if not record:
        return problems
    try:
        entries = record["mutations"]
        found = totals(entries)
        keys = {(e["file"], e["function"], e["change"]) for e in entries if e["reason"]}
    except (KeyError, TypeError):
        return [f"{path}: does not list an outcome per mutation; {again}"]
    if found != record.get("totals"):
        problems.append(f"{path}: its totals are not those of its mutations; {again}")
    if found["mutations"] < LEAST:
        problems.append(
            f"{path}: holds {found['mutations']} mutations, fewer than {LEAST}; {again}"
        )
    for package in HOST_PACKAGES:
        if (count := found["packages"].get(package, 0)) < LEAST_EACH:
            problems.append(f"{path}: holds {count} mutations of {package}; {again}")
    if found["share"] < SHARE:
        problems.append(f"{path}: tests noticed {found['share']:.1%}, fewer than {SHARE:.0%}")
    if keys - EQUIVALENT.keys() or len(keys) > EQUIVALENT_MOST:
        problems.append(f"{path}: calls others equivalent than tools/host_mutations.py; {again}")
    return problems + [
        f"{path}: {e['file']}: {e['change']} is called equivalent, and {e['test']} notices it"
        for e in entries
        if e["reason"] and e["outcome"] in NOTICED
    ]


def _run(asked: argparse.Namespace) -> int:
    checkout, digests, begun = Checkout(), host_digests(), time.perf_counter()
    drawn = checkout.drawn(asked.count, asked.seed)
    places = [each for each in drawn if asked.only in f"{each.file} {each.function} {each.change}"]
    held = {} if asked.rest is None else _settled(asked.rest, digests)
    settled = {key: held[key] for each in drawn if (key := (*each.key, each.line)) in held}
    places = [each for each in places if (*each.key, each.line) not in settled]
    if not places:
        raise value_error(
            "mutate_host", "--only", "part of the file, function or text of a change that is drawn",
            repr(asked.only), "Omit it for all",
        )  # fmt: skip
    entries = collect(places, checkout, ROOT / "build" / "mutate_host", asked.parallel)
    if host_digests() != digests:
        raise RuntimeError("mutate_host: the code must stay as it is meanwhile. Run it again.")
    print_table(
        ("file", "function", "change", "outcome", "test", "s"),
        [
            [f"{e['file']}:{e['line']}", e["function"], e["change"],
             e["reason"] or e["outcome"], e["test"].rpartition("::")[2], f"{e['seconds']:.0f}"]
            for e in entries
            if e["outcome"] not in NOTICED or asked.only
        ],
        right=("s",),
    )  # fmt: skip
    entries = sorted([*settled.values(), *entries], key=lambda e: (e["file"], e["line"]))
    record = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **device_facts("cpu"),
        "packages": digests,
        "seed": asked.seed,
        "seconds": round(time.perf_counter() - begun, 1),
        "parallel": asked.parallel,
        "kept": len(settled),
        "totals": totals(entries),
        "mutations": entries,
    }
    note(f"mutate_host: {record['totals']} in {record['seconds']} s")
    if asked.only and asked.out is None:
        note("mutate_host: part of the mutations ran: the record was left as it is")
    else:
        path = (asked.out or ROOT / "results") / "cpu" / RECORD_NAME
        note(f"mutate_host: wrote {write_json(record, path)}")
    return 0 if record["totals"]["share"] >= SHARE else 1


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments ask for and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mutate_host", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn")
    parser.add_argument("--count", type=int, default=150, help="about how many are drawn")
    parser.add_argument("--only", default="", help="changes whose file, function or code has this")
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time")
    parser.add_argument(
        "--rest", type=Path, metavar="RECORD",
        help="only what this record of today's code does not settle; the rest is kept",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"write DIR/cpu/{RECORD_NAME}")
    try:
        return _run(parser.parse_args(list(arguments)))
    except ValueError as error:
        note(f"mutate_host: error: {error}")
        return 2
    except RuntimeError as error:
        note(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
