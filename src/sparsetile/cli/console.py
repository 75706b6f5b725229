"""Output: data on stdout, everything else on stderr.

Streams are looked up at each call, so that redirections work. Progress is drawn on stderr, and only
if that is a terminal. A closed pipe (``| head``) or stream is not an error: the command continues,
and its output is dropped.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

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

from sparsetile_command.systems import block

__all__ = [
    "activity", "duration", "note", "note_some", "print_json", "print_table", "print_text",
    "printable", "progress_bar", "usable_streams",
]  # fmt: skip

# Tables keep their natural width in a pipe: readers of logs need whole cells.
_PIPE_WIDTH = 1000


class _BrokenPipeSafe(io.FileIO):
    """A stream that drops its output when its reader has closed the pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _as_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write file names as their bytes, and ? for characters that a terminal lacks."""
    assert isinstance(error, UnicodeEncodeError)
    code = ord(error.object[error.start])
    escaped = 0xDC80 <= code <= 0xDCFF  # Python's code for an undecodable byte
    return bytes([code - 0xDC00]) if escaped else "?", error.start + 1


codecs.register_error("sparsetile", _as_bytes)


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)  # itself, if Python does not buffer
    if not isinstance(raw, io.FileIO):
        stream.reconfigure(errors="sparsetile")
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_BrokenPipeSafe(raw.fileno(), "wb", closefd=False)),
        encoding=stream.encoding, errors="sparsetile", line_buffering=stream.line_buffering,
    )  # fmt: skip


@contextmanager
def usable_streams() -> Iterator[None]:
    """Make stdout and stderr accept any text, also if they are closed."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_usable(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk, which the command has already reported
                stream.flush()
        sys.stdout, sys.stderr = before


def printable(text: str) -> str:
    """Return text for pages and pictures: undecodable bytes of file names become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
    print(text, flush=True)


def _finite(value: Any) -> Any:
    """Replace values that JSON lacks (Infinity, NaN) by None."""
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


def duration(seconds: float) -> str:
    """Return a time for a table, in milliseconds or microseconds."""
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Write a table to stdout; columns named in ``right`` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    unbound = console.options.update(width=_PIPE_WIDTH)
    if console.measure(table, options=unbound).maximum > console.width:
        print_text("\n\n".join(block(columns, row, console.width) for row in rows))
        return
    with console.capture() as rendered:
        console.print(table)
    lines = [line.rstrip() for line in rendered.get().splitlines()]
    print_text("\n".join(line for line in lines if line))


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
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
