"""The Markdown of a report -> one self-contained HTML page: no network, light and dark."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby

__all__ = ["render_page"]

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow-x: auto }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #8884; text-align: left }
.right { text-align: right; font-variant-numeric: tabular-nums }
summary { font-size: 1.4rem; cursor: pointer; margin: 1rem 0 }
"""


def render_page(markdown: str, damaged: tuple[str, ...] = ()) -> str:
    """Return the page as text.

    Parameters
    ----------
    markdown : str
        Of :func:`sparsetile.bench.report.render_markdown`. Only its forms are supported: headings,
        paragraphs, lists, tables and blocks of commands.
    damaged : tuple of str
        Lines of records that could not be read; the page names them.
    """
    body, fenced, open_suite = [], False, False
    lines = [*markdown.splitlines(), *(["## Damaged lines", ""] if damaged else [])]
    lines += [f"- {line}" for line in damaged]
    for kind, grouped in groupby(lines, _Kind()):
        group = list(grouped)
        if kind == "fence":
            for _ in group:
                body.append("</pre>" if fenced else "<pre>")
                fenced = not fenced
        elif kind == "code":
            body += [escape(line) for line in group]
        elif kind == "table":
            body.append(_table(group))
        elif kind == "list":
            items = "".join(f"<li>{_inline(line[2:])}</li>" for line in group)
            body.append(f"<ul>{items}</ul>")
        elif kind == "heading":
            for line in group:
                level, _, text = line.partition(" ")
                if level == "##":  # a suite: folded, since a page has many
                    body.append("</details>" * open_suite + "<details open>")
                    open_suite = True
                    body.append(f"<summary>{_inline(text)}</summary>")
                else:
                    body.append(f"<h{len(level)}>{_inline(text)}</h{len(level)}>")
        elif kind == "text":
            body += [f"<p>{_inline(line)}</p>" for line in group]
    title = escape(markdown.partition("\n")[0].lstrip("# "))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n"
        + "\n".join([*body, "</details>" * open_suite])
        + "\n</body></html>\n"
    )


class _Kind:
    """The kind of a line; tracks whether it is within a block of commands."""

    def __init__(self) -> None:
        self._code = False

    def __call__(self, line: str) -> str:
        if line == "```":
            self._code = not self._code
            return "fence"
        if self._code:
            return "code"
        for start, kind in (("#", "heading"), ("|", "table"), ("- ", "list")):
            if line.startswith(start):
                return kind
        return "text" if line else "space"


def _inline(text: str) -> str:
    """Code, bold and emphasis of a line; everything else is escaped."""
    shown = escape(text, quote=False)
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", shown)
    shown = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", shown)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", shown)


def _table(lines: list[str]) -> str:
    head, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    right = [' class="right"' if mark.endswith(":") else "" for mark in rule]

    def row(cells: list[str], tag: str) -> str:
        shown = zip(cells, right, strict=False)  # a name may hold a bar
        return "".join(f"<{tag}{side}>{_inline(cell)}</{tag}>" for cell, side in shown)

    body = "".join(f"<tr>{row(cells, 'td')}</tr>\n" for cells in rows)
    return f"<table><thead><tr>{row(head, 'th')}</tr></thead>\n<tbody>{body}</tbody></table>"
