"""Pages of the documentation as the tests see them: fenced blocks, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.examples import ROOT

__all__ = ["DOCS", "Block", "anchors", "blocks", "links", "prose"]

DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?P<fence>```+)(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
_LINK = re.compile(r"!?\[[^\]\n]*(?:\n[^\]\n]*)?\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: the word after the fence, its text, and the line where its text begins."""

    kind: str
    text: str
    line: int


def blocks(path: Path, *kinds: str) -> list[Block]:
    """Return the fenced blocks of a page, in order; all of them, or those of some kinds."""
    page = path.read_text(encoding="utf-8")
    found = [
        Block(match["kind"].strip(), match["text"], page.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(page)
    ]
    return [block for block in found if not kinds or block.kind in kinds]


def prose(path: Path) -> str:
    """Return a page without its fenced blocks and without `code`."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace("[", "(").replace("]", ")"), text)


def links(path: Path) -> list[str]:
    """Return the targets of a page's Markdown links."""
    return [match["target"] for match in _LINK.finditer(prose(path))]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them.

    A page that includes another one has the anchors of that one too.
    """
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    included = [block.kind.split()[1] for block in blocks(path) if "{include}" in block.kind]
    slugs = {slug for name in included for slug in anchors(path.parent / name)}
    for match in _HEADING.finditer(text):
        words = re.sub(r"[^\w\- ]", "", match["text"].replace("`", "").lower())
        slugs.add(words.replace(" ", "-"))
    return slugs
