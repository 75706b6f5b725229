"""``sparsetile data fetch NAME`` without importing torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from sparsetile_command.matrices import without_package

__all__ = ["download_bar", "fetch_quickly"]

_OPTIONS = {"--data": "directory", "--base-url": "base_url"}


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Draw a bar on stderr, if that is a terminal; yields what `download.fetch` calls."""
    shown = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *shown, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _asked(words: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options in these words; None if the command line has to read them."""
    if [*words[:2]] != ["data", "fetch"]:
        return None
    rest, names, options = [*words[2:]], list[str](), dict[str, Any]()
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word == "--force" and not equals:
            options["force"] = True
        elif word in _OPTIONS and (equals or rest):
            options[_OPTIONS[word]] = value if equals else rest.pop(0)
        elif word.startswith("-") or equals:
            return None
        else:
            names.append(word)
    return (names[0], options) if len(names) == 1 else None


def fetch_quickly(words: Sequence[str]) -> int | None:
    """Fetch a matrix if these words ask for one; return the exit code, or None if they do not."""
    asked = _asked(words)
    if asked is None:
        return None
    name, options = asked
    console = without_package("cli/console.py")
    with _stub_of_the_package(), console.usable_streams():
        from sparsetile.data.download import fetch

        try:
            with download_bar(name) as progress:
                path = fetch(name, progress=progress, **options)
        except (ValueError, OSError) as error:
            console.note(f"sparsetile: error: {' '.join(str(error).split())}")
            return 2
        console.print_text(str(path))
    return 0


@contextmanager
def _stub_of_the_package() -> Iterator[None]:
    """Import modules of the package without the package itself, which imports torch."""
    if "sparsetile" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("sparsetile")
    assert spec is not None
    sys.modules["sparsetile"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in [each for each in sys.modules if f"{each}.".startswith("sparsetile.")]:
            del sys.modules[name]
