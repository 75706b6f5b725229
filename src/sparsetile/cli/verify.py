"""``sparsetile verify``: run the GPU tests of a checkout, or the checkers, and write the record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsetile.checkers import CHECKERS, find_tool, run_checker, write_checkers
from sparsetile.cli.console import note, note_some, print_json, print_table
from sparsetile.cli.options import Json
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.record import checkout_root, collect, machine_facts, write_record

__all__ = ["verify"]


def verify(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write DIR/<gpu>/verify.json or checkers.json; results."
        ),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option(
            "-k",
            metavar="EXPR",
            help="Only tests that match; nothing is written then unless --out is given.",
        ),
    ] = None,
    checker: Annotated[
        str | None,
        typer.Option(
            "--checker",
            metavar="TOOLS",
            help="Instead of the tests, products under compute-sanitizer: memcheck, racecheck, "
            "synccheck; comma-separated.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="For each checker.", min=1)
    ] = 120.0,
    as_json: Json = False,
) -> int:
    """Run the tests that need a GPU, or products under a checker, and record the outcome.

    Needs a GPU and a source checkout. Exit code 1 when a test failed, a checker found something or
    did not come to its end, or nothing ran.
    """
    root = checkout_root()
    if root is None:
        raise value_error(
            "verify", "installation", "a source checkout with its tests", "an installed package",
            "Clone the project and install it with `pip install -e .`",
        )  # fmt: skip
    if checker is not None:
        if expression is not None:
            raise value_error(
                "verify", "-k", "left away with --checker", repr(expression), "Leave one of both"
            )
        return _check(root, checker, time_limit, out or root / "results", as_json)
    record = collect(root, expression=expression)
    counts, gpu = record["counts"], record["gpu"]
    if as_json:
        print_json(record)
    else:
        print_table(
            ("GPU", "tests", "passed", "failed", "skipped", "seconds"),
            [
                [gpu["name"]]
                + [str(counts[name]) for name in ("total", "passed", "failed", "skipped")]
                + [f"{record['seconds']:.1f}"]
            ],
            right=("tests", "passed", "failed", "skipped", "seconds"),
        )
    if counts["total"] == counts["skipped"]:
        note("sparsetile: error: verify: no test ran, so nothing was written")
        return 1
    if expression is not None and out is None:
        note("sparsetile: part of the tests ran: the record was left as it is")
    else:
        note(f"sparsetile: wrote {write_record(record, out or root / 'results')}")
    return 1 if counts["failed"] else 0


def _check(root: Path, tools: str, limit: float, folder: Path, as_json: bool) -> int:
    """Run the checkers named, side by side; what came to its end is written, whatever became of the
    others."""
    names = [one_of("verify", "--checker", name, CHECKERS) for name in tools.split(",")]
    machine_facts()  # refuses a machine without a GPU before anything is started
    find_tool()
    entries: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"checkers": {}}
    code = 0
    chosen = list(dict.fromkeys(names))
    with ThreadPoolExecutor(len(chosen)) as pool:  # a process each, and a tool's own work is most
        started = {name: pool.submit(run_checker, root, name, limit=limit) for name in chosen}
        for name, checker in started.items():
            try:
                entries[name] = checker.result()
            except RuntimeError as error:
                note(f"sparsetile: error: {error}")
                code = 1
                continue
            # At once, so that what one tool found outlives the next one's mishap.
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
