"""A paper's ablation ladders, and its figures next to the measured ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsetile.bench.analysis import geomean, over, product_key
from sparsetile.bench.record import Record
from sparsetile.bench.suites import Suite, concerns
from sparsetile.systems import SYSTEMS

__all__ = ["ladder_lines", "published_rows"]

# Metrics that compare a product with one baseline or system rather than the best baseline.
_OVER = "over "
# Row orders of which each matrix gets its fastest.
_BEST = "best"
_WORDS = {
    "before": ("Each step has all before it", "over the step before"),
    "first": ("Each step is compared with the first", "over the first"),
}


def _metric(name: str, records: Sequence[Record]) -> Callable[[Record], float | None]:
    """Return the function that gives a record's figure, or None if there is none.

    ``speedup`` over the best baseline, ``tflops``, ``planning_ms``, or ``over NAME``: over the time
    of one baseline or system, as it is without options, on the same product.
    """
    if name == "tflops":
        return lambda record: float(record["gflops"]) / 1e3
    if name == "planning_ms":
        return lambda record: 1e3 * float(record["planning"]["total"])
    if not name.startswith(_OVER):
        return lambda record: record.get("speedup")
    seconds = {
        product_key(record): record["time"]["p50"]
        for record in records
        if record["system"] == name.removeprefix(_OVER)
        and record["status"] == "ok"
        and not set(record["config"]) - {"layout"}
    }

    def ratio(record: Record) -> float | None:
        other = seconds.get(product_key(record))
        return None if other is None else other / float(record["time"]["p50"])

    return ratio


def _selected(item: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    """Return the records that a published figure is about.

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
    measured = {record["dtype"] for record in found}
    preferred = next((dtype for dtype in item.get("prefer", ()) if dtype in measured), None)
    found = [record for record in found if preferred in (None, record["dtype"])]
    if not best:
        return found
    fastest: dict[tuple[Any, ...], Record] = {}
    for record in found:
        best = fastest.setdefault(product_key(record), record)
        if record["time"]["p50"] < best["time"]["p50"]:
            fastest[product_key(record)] = record
    return list(fastest.values())


def _note(item: Mapping[str, Any], chosen: Sequence[Record]) -> str:
    """A note on the measured products: their types, and how row orders were chosen."""
    types = ", ".join(dict.fromkeys(record["dtype"] for record in chosen))
    if not chosen or item.get("orders") != _BEST:
        return types
    orders = sorted({str(record["config"].get("reorder", "given")) for record in chosen})
    if len(orders) == 1:
        return f"{types}, row order {orders[0]}"
    return f"{types}, the best row order of each matrix ({' or '.join(orders)})"


def _why_missing(system: str, config: Mapping[str, Any]) -> str:
    """Why there is no figure: no such system, no such step of its ladder, or not measured."""
    built = system in SYSTEMS
    if built and "ablation" in config:
        built = config["ablation"] in SYSTEMS[system].ablations
    return "not measured" if built else "not built yet"


def published_rows(suite: Suite, records: Sequence[Record]) -> list[str]:
    """Return the rows of the table with the papers' and the measured figures."""
    rows = []
    for item in suite.published:
        metric, mine = _metric(item.get("metric", "speedup"), records), _selected(item, records)
        cells = [
            (f"N = {n}" if int(n) else "all N", value, [r for r in mine if int(n) in (0, r["n"])])
            for n, value in item.get("values", {}).items()
        ]
        for key, value in item.get("per_matrix", {}).items():
            names, n = key.split("|"), item.get("n", 0)  # a graph, or its stand-in
            measured = {record["matrix"] for record in mine}
            name = next((name for name in names if name in measured), names[0])
            chosen = [r for r in mine if r["matrix"] in names and n in (0, r["n"])]
            cells.append((f"{name}, N = {n}" if n else name, value, chosen))
        for where, published, chosen in cells:
            values = [value for record in chosen if (value := metric(record)) is not None]
            shown = f"{geomean(values):.2f}" if values else _why_missing(
                item["system"], item.get("config", {})
            )  # fmt: skip
            standins = len({r["matrix"] for r in chosen if r["source"] == "stand-in"})
            rows.append(
                f"| {item['source']} | {item['what']} | {item['system']} | {where} | "
                f"{float(published):g} | {item['gpu']} | {shown} | {len(values)} | {standins} | "
                f"{_note(item, chosen)} |"
            )
    return rows


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


def ladder_lines(suite: Suite, records: Sequence[Record]) -> list[str]:
    """Return a table for each ladder of which anything was measured, and why steps are missing.

    Every figure is the geomean over the same products: those on which all measured steps were
    timed. A ladder compares each step with the one before, or with its first if it says so
    (``compare = "first"``: everything, then everything but one part).
    """
    lines: list[str] = []
    for ladder in suite.ladders:
        steps = {step["label"]: _step_records(ladder, step, records) for step in ladder["steps"]}
        timed = {
            label: {product_key(r): r["speedup"] for r in members if r.get("speedup")}
            for label, members in steps.items()
        }
        timed = {label: products for label, products in timed.items() if products}
        common = set.intersection(*map(set, timed.values())) if timed else set()
        if not common:
            continue  # the published table says why
        compare = ladder.get("compare", "before")
        about, against = _WORDS[compare]
        named = dict.fromkeys(filter(None, (over(r) for found in steps.values() for r in found)))
        lines += [
            "", f"### {ladder['title']}", "",
            f"{about}; geomeans over the same {len(common)} products.", "",
            f"| step | over {', '.join(named) or 'the best baseline'} | {against} |",
            "| --- | ---: | ---: |",
        ]  # fmt: skip
        earlier: float | None = None
        for label, products in timed.items():
            speedup = geomean(products[key] for key in common)
            gain = "" if earlier is None else f"{speedup / earlier:.2f}"
            lines.append(f"| {label} | {speedup:.2f} | {gain} |")
            if compare == "before" or label == ladder["steps"][0]["label"]:
                earlier = speedup
        missing = [step for step in ladder["steps"] if step["label"] not in timed]
        if missing:
            tried = [r["reason"] for s in missing for r in steps[s["label"]] if r["status"] != "ok"]
            why = tried[0] if tried else _why_missing(missing[0]["system"], missing[0]["config"])
            labels = ", ".join(step["label"] for step in missing)
            lines += ["", f"{why.capitalize()}: {labels}."]
    return lines
