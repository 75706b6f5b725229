"""Run the GPU tests of this checkout, or the checkers, and write the record.

    python -m tools.verify [--out DIR] [--all] [-k EXPR] [--checker TOOLS] [--matrices NAMES]
                           [--time-limit SECONDS] [--json]

``sparsetile verify`` is the same command. Only tests whose outcome in the record no longer counts
are run, unless ``--all`` is given; ``-k`` runs what matches and writes nothing. The record is
searched in DIR and in ``results``. Exit code 1 when a test failed, a checker found something or
did not finish, or nothing ran; 2 for bad usage and for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, note_some, print_json, print_table
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from tools.checked_products import matrix_names
from tools.checkers import TOOLS, compile_kernels, find_tool, run_checkers, write_checkers
from tools.record import ROOT, collect, machine_facts, write_record


def _verify(expression: str | None, folder: Path, everything: bool, as_json: bool) -> int:
    """Run the GPU tests whose outcomes do not count, and write the record of all."""
    earlier = () if everything or expression is not None else (folder, ROOT / "results")
    record = collect(ROOT, earlier=earlier, expression=expression)
    counts, gpu = record["counts"], record["gpu"]
    if as_json:
        print_json(record)
    else:
        names = ("total", "passed", "failed", "skipped")
        columns = ("GPU", "tests", *names[1:], "ran now", "seconds")
        row = [gpu["name"], *(str(counts[name]) for name in names)]
        row += [str(record["ran"]), f"{record['seconds']:.1f}"]
        print_table(columns, [row], right=columns[1:])
    if counts["total"] == counts["skipped"]:
        note("sparsetile: error: verify: no test ran, so nothing was written")
        return 1
    if expression is not None:
        note("sparsetile: part of the tests ran: the record was left as it is")
    else:
        note(f"sparsetile: wrote {write_record(record, folder)}")
    return 1 if counts["failed"] else 0


def _check(tools: str, matrices: str, limit: float, folder: Path, as_json: bool) -> int:
    """Run the named checkers; the result of each that finishes is written."""
    names = [one_of("verify", "--checker", name, TOOLS) for name in tools.split(",")]
    for name in filter(None, matrices.split(",")):
        one_of("verify", "--matrices", name, matrix_names())
    machine_facts()  # refuses a machine without a GPU before anything is started
    find_tool()
    entries: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"checkers": {}}
    code = 0
    compile_kernels(ROOT, limit=limit, matrices=matrices)
    for name, found in run_checkers(
        ROOT, list(dict.fromkeys(names)), limit=limit, matrices=matrices, folder=folder
    ):
        if isinstance(found, RuntimeError):
            note(f"sparsetile: error: {found}")
            code = 1
            continue
        entries[name] = found
        # At once, so that the result of one tool survives a failure of the next.
        path, record = write_checkers(entries, folder)
        note(f"sparsetile: wrote {name} to {path}")
        note_some(entries[name]["log"], most=40)
        code = 1 if entries[name]["errors"] else code
    if as_json:
        print_json(record)
    elif entries:
        columns = ("checker", "version", "matrices", "products", "errors", "seconds")
        print_table(
            columns,
            [
                [name, entry["version"], str(len(entry["matrices"]))]
                + [str(entry[column]) for column in ("products", "errors")]
                + [f"{entry['seconds']:.1f}"]
                for name, entry in entries.items()
            ],
            right=columns[2:],
        )
    return code


def main(arguments: Sequence[str]) -> int:
    """Run the tests or checkers and return the exit code."""
    parser = argparse.ArgumentParser(prog="verify", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write DIR/<gpu>/verify.json or checkers.json")
    parser.add_argument("--all", action="store_true", help="run also tests whose outcome counts")
    parser.add_argument("-k", dest="expression", help="run the tests that match, write nothing")
    parser.add_argument("--checker", help=f"products under compute-sanitizer: {', '.join(TOOLS)}")
    parser.add_argument("--matrices", default="", help="of the checkers; all when omitted")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for each checker")
    parser.add_argument("--json", action="store_true", help="print the record")
    asked = parser.parse_args(list(arguments))
    folder = asked.out or ROOT / "results"
    try:
        if asked.checker is None:
            return _verify(asked.expression, folder, asked.all, asked.json)
        if asked.expression is not None:
            raise value_error(
                "verify", "-k", "omitted with --checker", repr(asked.expression), "Omit one of both"
            )
        # Otherwise the checker's child processes would go on and slow the next one down.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return _check(asked.checker, asked.matrices, asked.time_limit, folder, asked.json)
        finally:
            signal.signal(signal.SIGTERM, before)
    except (ValueError, OSError) as error:
        note(f"sparsetile: error: {error}")
        return 2
    except RuntimeError as error:
        note(f"sparsetile: error: {error}")
        return 1
    except KeyboardInterrupt:
        note("sparsetile: stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
