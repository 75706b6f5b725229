"""A suite's own tables: one system's figures by density of the matrix, or matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsetile.bench.analysis import geomean
from sparsetile.bench.record import Record
from sparsetile.bench.report.selection import Metric, note, selected
from sparsetile.bench.suites import Suite

__all__ = ["RatioRow", "RatioTable", "ratio_tables"]


@dataclass(frozen=True)
class RatioRow:
    """Products that are counted together, and the geomean of their figures at each width."""

    label: str
    what: str
    count: int
    figures: tuple[float | None, ...]


@dataclass(frozen=True)
class RatioTable:
    """One table: widths are its columns."""

    title: str
    note: str
    widths: tuple[int, ...]
    rows: tuple[RatioRow, ...]


def ratio_tables(suite: Suite, records: Sequence[Record]) -> list[RatioTable]:
    """Return the tables of a suite of which anything was measured.

    An entry ``[[ratio]]`` selects records as a published figure does. ``by`` lists the densities
    that matrices must exceed, a row each; without it every matrix has a row. ``metrics`` names the
    figures, ``what`` says them in words, ``n`` the widths.
    """
    found = []
    for item in suite.ratios:
        chosen = selected(item, records)
        widths = tuple(item.get("n", sorted({record["n"] for record in chosen})))
        rows = [
            row
            for name, members in _classes(item, chosen)
            for metric, what in zip(item["metrics"], item["what"], strict=True)
            if (row := _row(name, what, members, widths, Metric(metric, records))) is not None
        ]
        if rows:
            found.append(RatioTable(str(item["title"]), note(item, chosen), widths, tuple(rows)))
    return found


def _classes(item: Mapping[str, Any], records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    if "by" not in item:
        names = dict.fromkeys(record["matrix"] for record in records)
        return [(name, [r for r in records if r["matrix"] == name]) for name in names]
    found = []
    for density in item["by"]:
        above = [r for r in records if r["nnz"] > density * max(r["rows"] * r["cols"], 1)]
        name = f"density over {100 * density:g} %" if density else "all"
        found.append((name, above))
    return found


def _row(
    label: str, what: str, members: Sequence[Record], widths: Sequence[int], metric: Metric
) -> RatioRow | None:
    figures: list[float | None] = []
    matrices: set[str] = set()
    for n in widths:
        values = {r["matrix"]: metric(r) for r in members if r["n"] == n}
        known = {name: value for name, value in values.items() if value is not None}
        matrices |= set(known)
        figures.append(geomean(known.values()) if known else None)
    return RatioRow(label, what, len(matrices), tuple(figures)) if matrices else None
