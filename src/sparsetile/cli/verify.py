"""``sparsetile verify``: run the GPU tests of a source checkout, or the checkers.

The work is done by ``tools/verify.py`` of the checkout, which is not installed with the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.options import Json
from sparsetile.core.errors import value_error

__all__ = ["verify"]

# A fresh interpreter that finds the tools and the package of the checkout.
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.verify import main; sys.exit(main(sys.argv[1:]))"
)


def checkout_root() -> Path | None:
    """Return the root of the source checkout that this package runs from; None if installed."""
    root = Path(__file__).resolve().parents[3]
    whole = (root / "tools" / "verify.py").is_file() and (root / "tests").is_dir()
    return root if whole and (root / "src" / "sparsetile").is_dir() else None


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
    root = checkout_root()
    if root is None:
        raise value_error(
            "verify", "installation", "a source checkout with its tests", "an installed package",
            "Clone the project and install it with `pip install -e .`",
        )  # fmt: skip
    command = [sys.executable, "-c", _CHILD, str(root), str(root / "src")]
    command += [] if out is None else [f"--out={out.resolve()}"]
    command += [] if expression is None else [f"-k{expression}"]
    command += ["--all"] if everything else []
    command += [] if checker is None else [f"--checker={checker}"]
    command += [f"--time-limit={time_limit}", *(["--json"] if as_json else [])]
    sys.stdout.flush()
    return subprocess.run(command, cwd=root, check=False).returncode
