"""The command of a tool that generates a page of the documentation from records."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from sparsetile.cli.console import note

__all__ = ["write_page"]


def write_page(
    tool: str, about: str, page: Path, render: Callable[[], str], arguments: Sequence[str]
) -> int:
    """Write the page, or with ``--check`` return 1 if it is not what the records say."""
    parser = argparse.ArgumentParser(prog=tool, description=about.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    asked, text = parser.parse_args(list(arguments)), render()
    if asked.check:
        same = page.is_file() and page.read_text(encoding="utf-8") == text
        note(f"{page.name} is {'current' if same else f'old: run python -m tools.{tool}'}")
        return 0 if same else 1
    page.write_text(text, encoding="utf-8")
    return 0
