"""``sparsetile report``: records -> Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.console import note, note_some, print_text
from sparsetile.cli.options import check_output, write_output

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
) -> None:
    """Make Markdown tables from records only."""
    from sparsetile.bench.record import Record, read_records
    from sparsetile.bench.report import render_markdown

    folder = markdown is not None and markdown.is_dir()
    if not folder:
        check_output("report", "--markdown", markdown)
    records: dict[tuple[str, str], Record] = {}
    for path in files:
        found, damaged = read_records(path)
        # Several machines may have measured the same entry: each keeps its own.
        for record in found:
            machine = str(record["environment"].get("device_name", ""))
            records[machine, record["key"]] = record
        note_some([f"skipped {line}" for line in damaged])
    pages: dict[Path | None, list[Record]] = {}
    for record in records.values():
        page = markdown / f"{record['suite']}.md" if markdown and folder else markdown
        pages.setdefault(page, []).append(record)
    for page, found in (pages or {markdown: []}).items():
        text = render_markdown(found, title)
        if page is None:
            print_text(text.rstrip())
        else:
            write_output(page, text)
            note(f"wrote {page}, {len(found)} records")
