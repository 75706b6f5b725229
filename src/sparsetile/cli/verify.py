"""``sparsetile verify``: run the GPU tests of a source checkout, or the checkers.

The work is done by ``tools/verify.py`` of the checkout, which is not installed with the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.checkout import run_tool
from sparsetile.cli.options import Json

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
        typer.Option("-k", metavar="EXPR", help="Only tests that match; nothing is written then."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also the tests whose recorded outcome is of today's code."),
    ] = False,
    checker: Annotated[
        str | None,
        typer.Option(
            "--checker",
            metavar="TOOLS",
            help="Instead of the tests, products under compute-sanitizer: memcheck, racecheck, "
            "synccheck, initcheck; comma-separated.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="For each checker.", min=1)
    ] = 120.0,
    as_json: Json = False,
) -> int:
    """Run the tests that need a GPU, or products under a checker, and record the outcome.

    Tests whose recorded outcome is of the current code are not run again. Needs a GPU and a source
    checkout. Exit code 1 when a test failed, a checker found something or did not finish, or
    nothing ran.
    """
    words = [] if out is None else [f"--out={out.resolve()}"]
    words += [] if expression is None else [f"-k{expression}"]
    words += ["--all"] if everything else []
    words += [] if checker is None else [f"--checker={checker}"]
    words += [f"--time-limit={time_limit}", *(["--json"] if as_json else [])]
    return run_tool("verify", words)
