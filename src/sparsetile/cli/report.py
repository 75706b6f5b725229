"""``sparsetile report``: records -> Markdown, by ``tools/report.py`` of a source checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.checkout import run_tool

__all__ = ["report"]


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Records that sparsetile bench wrote.")
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(help="File to write, or a folder for a page a suite; printed when omitted."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title; when omitted, that of a single suite, else Results.")
    ] = None,
) -> int:
    """Make Markdown tables from records only. Needs a source checkout."""
    words = [str(file.resolve()) for file in files]
    words += [] if markdown is None else [f"--markdown={markdown.resolve()}"]
    words += [] if title is None else [f"--title={title}"]
    return run_tool("report", words)
