"""Where output goes: data on stdout, everything else on stderr.

Streams are looked up at each call, so that redirections are obeyed. Progress is drawn on stderr
and only where that is a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

__all__ = [
    "activity",
    "note",
    "note_some",
    "print_json",
    "print_table",
    "print_text",
    "progress_bar",
]

# Tables keep their natural width in a pipe: cut or folded cells are no use to a reader of logs.
_PIPE_WIDTH = 1000


def note(text: str) -> None:
    """Write one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def note_some(lines: Sequence[object], most: int = 10) -> None:
    """Write the first lines to stderr and say how many more there are."""
    for line in lines[:most]:
        note(str(line))
    if len(lines) > most:
        note(f"... and {len(lines) - most} more such lines")


def print_text(text: str) -> None:
    """Write plain text to stdout."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader (`| head`) has left, which is no error. Later output goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(value: Any) -> Any:
    """Replace what JSON has no word for (Infinity, NaN) by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """Write ``value`` to stdout as JSON."""
    print_text(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
) -> None:
    """Write a table to stdout.

    Parameters
    ----------
    columns : sequence of str
        Headings.
    rows : sequence of sequences of str
        Cells; markup is not interpreted.
    right : sequence of str
        Headings of the columns that are aligned to the right.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    unbound = console.options.update(width=_PIPE_WIDTH)
    if console.measure(table, options=unbound).maximum > console.width:
        print_text("\n\n".join(_block(columns, row, console.width) for row in rows))
        return
    # Rendered first, printed after: rich ends the process by itself when a reader leaves early.
    with console.capture() as rendered:
        console.print(table)
    lines = [line.rstrip() for line in rendered.get().splitlines()]
    print_text("\n".join(line for line in lines if line))


def _block(columns: Sequence[str], row: Sequence[str], total: int) -> str:
    """Return one row as lines of heading and cell, for terminals too narrow for the table."""
    width = max(map(len, columns))
    lines = []
    for name, cell in zip(columns, row, strict=True):
        parts = textwrap.wrap(cell, max(total - width - 2, 20)) or [""]
        lines += [
            f"{head:{width}}  {part}".rstrip()
            for head, part in zip([name, *[""] * len(parts)], parts, strict=False)
        ]
    return "\n".join(lines)


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Show a spinner with ``text`` on stderr while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(file=sys.stderr).status(text):
        yield


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Any]:
    """Show a bar on stderr; yields a function that advances it by one."""
    shown = sys.stderr.isatty()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
