"""Measured figures beside those that a paper published, and the paper's ablation ladders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sparsetile.bench.analysis import geomean
from sparsetile.bench.record import Record
from sparsetile.bench.report.charts import ladder_bars
from sparsetile.bench.suites import Suite
from sparsetile.systems import SYSTEMS

__all__ = ["ladder_steps", "published_rows"]


def _value(record: Record, metric: str) -> float | None:
    if metric == "speedup":
        found: float | None = record.get("speedup")
        return found
    if metric == "tflops":
        return record["gflops"] / 1e3
    if metric == "planning_ms":
        return 1e3 * record["planning"]["total"]
    return None


def published_rows(suite: Suite, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return rows of a table: source, what, published on which GPU, measured here."""
    rows = []
    for item in suite.published:
        metric = item.get("metric", "speedup")
        mine = [
            record
            for record in records
            if record["system"] == item["system"]
            and record["status"] == "ok"
            and not record["config"]
        ]
        cells = [
            (f"N = {key}" if int(key) else "all N", float(published), _at(mine, int(key)))
            for key, published in item.get("values", {}).items()
        ]
        cells += [
            (name, float(published), [r for r in mine if r["matrix"] == name])
            for name, published in item.get("per_matrix", {}).items()
        ]
        for where, published, chosen in cells:
            values = [value for record in chosen if (value := _value(record, metric)) is not None]
            rows.append(
                {
                    "source": item["source"],
                    "what": item["what"],
                    "system": item["system"],
                    "gpu": item["gpu"],
                    "where": where,
                    "published": published,
                    "measured": geomean(values) if values else None,
                    "missing": _why_missing(item["system"]),
                    "count": len(values),
                }
            )
    return rows


def _why_missing(system: str) -> str:
    return "not measured" if system in SYSTEMS else "not built yet"


def _at(records: Sequence[Record], n: int) -> list[Record]:
    """Records of one width; of all widths for 0."""
    return [record for record in records if n in (0, record["n"])]


def ladder_steps(suite: Suite, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the suite's ladders: steps measured (geomean over all matrices), or why not."""
    found = []
    for ladder in suite.ladders:
        steps = []
        for step in ladder["steps"]:
            speedups = [
                record["speedup"]
                for record in records
                if record["system"] == step["system"]
                and record["config"] == dict(step["config"])
                and record.get("speedup")
            ]
            if speedups:
                steps.append((str(step["label"]), geomean(speedups)))
        missing = [s["label"] for s in ladder["steps"] if s["label"] not in dict(steps)]
        found.append(
            {
                "title": ladder["title"],
                "svg": Markup(ladder_bars(steps, ladder["title"])),
                "missing": missing,
                "why": _why_missing(ladder["steps"][0]["system"]),
            }
        )
    return found
