"""Figures and tables of the five papers by name: ``voltrix/fig9``, and how to repeat each here.

The registry is ``figures.toml``. ``sparsetile bench paper:voltrix/fig9`` runs a figure; a page of
the documentation lists all, with our figures beside the papers'.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsetile.core.errors import value_error

__all__ = ["PREFIX", "Figure", "Paper", "figure", "papers"]

PREFIX = "paper:"
_FILE = Path(__file__).resolve().parent / "figures.toml"
_DRAWING = "drawing: "


@dataclass(frozen=True)
class Figure:
    """A figure or table: a ``suite`` with options, or a ``tool`` with arguments, or ``not_run``."""

    name: str  # voltrix/fig9
    shows: str
    paper: str = ""
    why: str = ""
    record: str = ""
    suite: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tool: str = ""
    arguments: Sequence[str] = ()
    not_run: str = ""

    @property
    def is_drawing(self) -> bool:
        return self.shows.startswith(_DRAWING)

    def runnable(self) -> Figure:
        """Return itself, or raise for a figure that nothing repeats."""
        if self.suite or self.tool:
            return self
        reason = "it is a drawing" if self.is_drawing else self.not_run
        raise value_error(
            "bench", "SUITE", "a figure that can be repeated here",
            f"{PREFIX}{self.name} ({reason})",
            f"Figures: {', '.join(_names(runnable=True))}",
        )  # fmt: skip


@dataclass(frozen=True)
class Paper:
    """A paper, the GPUs of its figures, and the figures."""

    name: str
    title: str
    gpu: str
    figures: tuple[Figure, ...]


@functools.cache
def papers() -> tuple[Paper, ...]:
    """Return the five papers in the order of the registry."""
    body = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(
        Paper(
            paper, text["title"], text["gpu"],
            tuple(Figure(f"{paper}/{name}", **fields) for name, fields in text["figures"].items()),
        )
        for paper, text in body.items()
    )  # fmt: skip


def _names(*, runnable: bool) -> list[str]:
    found = [each for paper in papers() for each in paper.figures]
    return [each.name for each in found if each.suite or each.tool or not runnable]


def figure(name: str) -> Figure:
    """Return the figure ``voltrix/fig9``, with or without ``paper:``; raise for an unknown one.

    >>> figure("paper:brp/fig8").suite
    'brp'
    """
    wanted = name.removeprefix(PREFIX)
    for paper in papers():
        for each in paper.figures:
            if each.name == wanted:
                return each
    raise value_error(
        "bench", "SUITE", f"{PREFIX} and a figure of a paper", repr(name),
        f"Figures: {', '.join(_names(runnable=True))}",
    )  # fmt: skip
