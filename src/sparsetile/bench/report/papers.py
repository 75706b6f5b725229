"""A paper's figures beside the measured ones, its ablation ladders, and a suite's own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsetile.bench.analysis import geomean, over, product_key
from sparsetile.bench.record import DTYPES, Record
from sparsetile.bench.suites import Suite, concerns
from sparsetile.systems import SYSTEMS

__all__ = ["RatioRow", "RatioTable", "ladder_steps", "published_rows", "ratio_tables"]

# Metrics that hold a product against one baseline or system rather than the best baseline.
_OVER = "over "
# Row orders of which each matrix gets its fastest.
_BEST = "best"


class _Metric:
    """A figure of one record.

    ``speedup`` over the best baseline, ``tflops``, ``planning_ms``, or ``over NAME``: over the time
    of one baseline or system, as it is without options, on the same product; ``over NAME TYPE``:
    on the same product in another type, ``over NAME TYPE rows`` in row-major layout too.
    """

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self._name = name
        self._changes: dict[str, Any] = {}
        self._seconds: dict[tuple[Any, ...], float] = {}
        if not name.startswith(_OVER):
            return
        held, *options = name.removeprefix(_OVER).split()
        for option in options:
            if option in DTYPES:
                self._changes["dtype"] = option
            else:  # rows
                self._changes["config"] = {}
        self._seconds = {
            product_key(record): record["time"]["p50"]
            for record in records
            if record["system"] == held
            and record["status"] == "ok"
            and not set(record["config"]) - {"layout"}
        }

    def __call__(self, record: Record) -> float | None:
        """The figure; None where there is none."""
        if self._name == "speedup":
            found: float | None = record.get("speedup")
            return found
        if self._name == "tflops":
            return float(record["gflops"]) / 1e3
        if self._name == "planning_ms":
            return 1e3 * float(record["planning"]["total"])
        seconds = self._seconds.get(product_key({**record, **self._changes}))
        return None if seconds is None else seconds / float(record["time"]["p50"])


def _selected(item: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Return the records that an entry of a suite is about.

    ``system``; ``config``, the arguments of plan() and the layout; ``dtypes``; ``density``, which
    their matrices exceed; ``matrices`` and ``without``, patterns of names; ``orders = "best"``:
    each product in the row order in which it is fastest. ``prefer`` lists types of which the first
    that was measured counts: a paper's type may not be built.
    """
    config = dict(item.get("config", {}))
    best = item.get("orders") == _BEST
    found = []
    for record in records:
        mine = dict(record["config"])
        if best:
            mine.pop("reorder", None)
        if (
            record["system"] == item["system"]
            and record["status"] == "ok"
            and mine == config
            and record["dtype"] in item.get("dtypes", item.get("prefer", (record["dtype"],)))
            and record["nnz"] > item.get("density", 0.0) * max(record["rows"] * record["cols"], 1)
            and concerns(item, record["matrix"])
        ):
            found.append(record)
    for dtype in item.get("prefer", ()):
        preferred = [record for record in found if record["dtype"] == dtype]
        if preferred:
            found = preferred
            break
    return _fastest(found) if best else found


def _fastest(records: Sequence[Record]) -> list[Record]:
    """Of each product the record of the row order that took least."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        held = found.setdefault(product_key(record), record)
        if record["time"]["p50"] < held["time"]["p50"]:
            found[product_key(record)] = record
    return list(found.values())


def _note(item: Mapping[str, Any], chosen: Sequence[Record]) -> str:
    """What a reader must know of the measured products: their types, and how orders were chosen."""
    types = ", ".join(dict.fromkeys(record["dtype"] for record in chosen))
    if not chosen or item.get("orders") != _BEST:
        return types
    orders = sorted({str(record["config"].get("reorder", "given")) for record in chosen})
    if len(orders) == 1:
        return f"{types}, row order {orders[0]}"
    return f"{types}, the best row order of each matrix ({' or '.join(orders)})"


def published_rows(suite: Suite, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return rows of a table: source, what, published on which GPU, measured here.

    A suite's ``published`` entry may say for which products it is, see ``_selected``.
    """
    rows = []
    for item in suite.published:
        metric = _Metric(item.get("metric", "speedup"), records)
        mine = _selected(item, records)
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
                    "note": _note(item, chosen),
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
        chosen = _selected(item, records)
        widths = tuple(item.get("n", sorted({record["n"] for record in chosen})))
        rows = [
            row
            for name, members in _classes(item, chosen)
            for metric, what in zip(item["metrics"], item["what"], strict=True)
            if (row := _row(name, what, members, widths, _Metric(metric, records))) is not None
        ]
        if rows:
            found.append(RatioTable(str(item["title"]), _note(item, chosen), widths, tuple(rows)))
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
    label: str, what: str, members: Sequence[Record], widths: Sequence[int], metric: _Metric
) -> RatioRow | None:
    figures: list[float | None] = []
    matrices: set[str] = set()
    for n in widths:
        values = {r["matrix"]: metric(r) for r in members if r["n"] == n}
        known = {name: value for name, value in values.items() if value is not None}
        matrices |= set(known)
        figures.append(geomean(known.values()) if known else None)
    return RatioRow(label, what, len(matrices), tuple(figures)) if matrices else None
