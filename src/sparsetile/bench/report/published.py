"""Measured figures beside those that a paper published, and the paper's ablation ladders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetile.bench.analysis import geomean, over, product_key
from sparsetile.bench.record import Record
from sparsetile.bench.report.charts import ladder_bars
from sparsetile.bench.report.selection import Metric, note, selected
from sparsetile.bench.report.svg import Raw
from sparsetile.bench.suites import Suite, concerns
from sparsetile.systems import SYSTEMS

__all__ = ["ladder_steps", "published_rows"]


def published_rows(suite: Suite, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return rows of a table: source, what, published on which GPU, measured here.

    A suite's ``published`` entry may say for which products it is, see
    :func:`~sparsetile.bench.report.selection.selected`. ``metric`` is one of
    :class:`~sparsetile.bench.report.selection.Metric`.
    """
    rows = []
    for item in suite.published:
        metric = Metric(item.get("metric", "speedup"), records)
        mine = selected(item, records)
        cells = [
            (f"N = {key}" if int(key) else "all N", float(published), _at(mine, int(key)))
            for key, published in item.get("values", {}).items()
        ]
        cells += [
            (
                _matched(names, mine) + (f", N = {item['n']}" if "n" in item else ""),
                float(published),
                [r for r in _at(mine, item.get("n", 0)) if r["matrix"] in names],
            )
            for names, published in (
                (key.split("|"), value) for key, value in item.get("per_matrix", {}).items()
            )
        ]
        for where, published, chosen in cells:
            values = [value for record in chosen if (value := metric(record)) is not None]
            rows.append(
                {
                    "source": item["source"],
                    "what": item["what"],
                    "system": item["system"],
                    "gpu": item["gpu"],
                    "where": where,
                    "published": published,
                    "measured": geomean(values) if values else None,
                    "missing": _why_missing(item["system"], item.get("config", {})),
                    "count": len(values),
                    "standins": len({r["matrix"] for r in chosen if r["source"] == "stand-in"}),
                    "note": note(item, chosen),
                }
            )
    return rows


def _matched(names: Sequence[str], records: Sequence[Record]) -> str:
    """The name under which a published matrix was measured: its own, or its stand-in's."""
    measured = {record["matrix"] for record in records}
    return next((name for name in names if name in measured), names[0])


def _why_missing(system: str, config: Mapping[str, Any]) -> str:
    """Why there is no figure: the system or this step of its ladder is not there, or it is."""
    built = system in SYSTEMS
    if built and "ablation" in config:
        built = config["ablation"] in SYSTEMS[system].ablations
    return "not measured" if built else "not built yet"


def _at(records: Sequence[Record], n: int) -> list[Record]:
    """Records of one width; of all widths for 0."""
    return [record for record in records if n in (0, record["n"])]


def ladder_steps(suite: Suite, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the suite's ladders: the speedup after each step, and why steps are missing.

    Every bar is the geomean over the same products: those on which all measured steps were timed.
    A ladder compares each step with the one before, or with its first where it says so
    (``compare = "first"``: everything, then everything but one part).
    """
    found = []
    for ladder in suite.ladders:
        steps = [
            (str(step["label"]), _step_records(ladder, step, records)) for step in ladder["steps"]
        ]
        timed = {
            label: {product_key(r): r["speedup"] for r in members if r.get("speedup")}
            for label, members in steps
        }
        measured = {label: products for label, products in timed.items() if products}
        common = set.intersection(*(set(p) for p in measured.values())) if measured else set()
        bars = [
            (label, geomean(p[key] for key in common)) for label, p in measured.items() if common
        ]
        missing = [(label, members) for label, members in steps if label not in dict(bars)]
        found.append(
            {
                "title": ladder["title"],
                "bars": bars,
                "gains": _gains(bars, ladder),
                **_WORDS[ladder.get("compare", "before")],
                "over": _over([r for _, members in steps for r in members]),
                "svg": Raw(ladder_bars(bars, ladder["title"])),
                "count": len(common),
                "missing": [label for label, _ in missing],
                "why": _why_steps(ladder, missing),
            }
        )
    return found


def _over(records: Sequence[Record]) -> str:
    """What the steps of a ladder are held against."""
    named = ", ".join(dict.fromkeys(filter(None, map(over, records))))
    return named or "the best baseline"


_WORDS = {
    "before": {"about": "Each step has all before it", "against": "over the step before"},
    "first": {"about": "Each step is held against the first", "against": "over the first"},
}


def _gains(
    bars: Sequence[tuple[str, float]], ladder: Mapping[str, Any]
) -> list[tuple[str, float, float | None]]:
    """(label, speedup, gain): the gain over the step before, or over the ladder's first."""
    found: list[tuple[str, float, float | None]] = []
    for place, (label, speedup) in enumerate(bars):
        held = bars[max(0, place - 1)]
        if ladder.get("compare") == "first":
            held = bars[0]
            if held[0] != ladder["steps"][0]["label"]:  # the whole was not measured
                found.append((label, speedup, None))
                continue
        found.append((label, speedup, speedup / held[1] if place else None))
    return found


def _step_records(
    ladder: Mapping[str, Any], step: Mapping[str, Any], records: Sequence[Record]
) -> list[Record]:
    """The records of one step of a ladder, at the widths and types that the ladder is for."""
    return [
        record
        for record in records
        if record["system"] == step["system"]
        and concerns(ladder, record["matrix"])
        and record["config"] == dict(step["config"])
        and record["n"] in ladder.get("n", (record["n"],))
        and record["dtype"] in ladder.get("dtypes", (record["dtype"],))
    ]


def _why_steps(ladder: Mapping[str, Any], missing: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """Why steps have no bar: what the first that was tried said, else whether it is built."""
    tried = [r["reason"] for _, members in missing for r in members if r["status"] != "ok"]
    if tried:
        return str(tried[0])
    labels = {label for label, _ in missing}
    step = next((s for s in ladder["steps"] if s["label"] in labels), ladder["steps"][0])
    return _why_missing(step["system"], step["config"])
