"""``sparsetile verify``: run the GPU tests of a checkout and write the GPU record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.console import note, print_json, print_table
from sparsetile.cli.options import Json
from sparsetile.errors import value_error
from sparsetile.record import checkout_root, collect, write_record

__all__ = ["verify"]


def verify(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write DIR/<gpu>/verify.json; default results."),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option(
            "-k",
            metavar="EXPR",
            help="Only tests that match; nothing is written then unless --out is given.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Run the tests that need a GPU and record their outcome.

    Needs a GPU and a source checkout. Exit code 1 when a test failed or none ran.
    """
    root = checkout_root()
    if root is None:
        raise value_error(
            "verify", "installation", "a source checkout with its tests", "an installed package",
            "Clone the project and install it with `pip install -e .`",
        )  # fmt: skip
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
