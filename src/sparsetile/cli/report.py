"""``sparsetile report``: records -> one HTML page, or Markdown for the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.console import note, note_some
from sparsetile.cli.options import check_output, write_output

__all__ = ["report"]


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Records that sparsetile bench wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write; report.html unless --markdown is given.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the summary as Markdown to this file.")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title of the page and of the Markdown.")
    ] = None,
) -> None:
    """Make a self-contained page, or Markdown, from records only."""
    from sparsetile.bench.record import Damage, Record, read_records
    from sparsetile.bench.report import render_markdown, render_page

    check_output("report", "--out", out)
    check_output("report", "--markdown", markdown)
    records: dict[tuple[str, str], Record] = {}
    damaged: list[Damage] = []
    for path in files:
        found, broken = read_records(path)
        # Several machines may have measured the same entry: each keeps its own.
        for record in found:
            machine = str(record["environment"].get("device_name", ""))
            records[machine, record["key"]] = record
        damaged += broken
        note_some([f"skipped {line}" for line in broken])
    text = render_markdown(list(records.values()), title or "Results")
    if markdown is not None:
        write_output(markdown, text)
        note(f"wrote {markdown}")
    if out is not None or markdown is None:
        page = out or Path("report.html")
        write_output(page, render_page(text, tuple(map(str, damaged))))
        note(f"wrote {page}, {len(records)} records")
