"""The smaller tables of a report: other products, ``auto`` against hindsight, planning by stage.

Each function returns the lines of a Markdown table, none if there are no records for it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sparsetile.bench.analysis import geomean, product_key, setting, system_label, yardstick
from sparsetile.bench.record import Record
from sparsetile.bench.summary import product_title

__all__ = ["hindsight", "other_products", "planning"]

# Sparse systems by name that must be timed on a product before ``auto`` is compared with them.
_FEWEST = 2
# Losses above this are counted one by one.
_MUCH = 1.2
_STAGES = ("reorder", "format", "schedule")


def _what(key: tuple[Any, ...]) -> str:
    """The first cells of a row: product and width of a :func:`setting`."""
    _, device_name, op, reduce, dtype, _, n = key
    return f"{product_title(op, reduce, dtype, device_name)} | {n}"


def _is_sum(record: Record) -> bool:
    return (record["op"], record["reduce"]) == ("spmm", "sum")


def other_products(records: Sequence[Record]) -> list[str]:
    """Compare transposes and other reductions with the plain product of the same operands.

    SDDMM, another computation, is omitted, and so are products without a plain one.
    """
    timed = [record for record in records if record["status"] == "ok"]
    plain = {
        (product_key(record), system_label(record)): record["time"]["p50"]
        for record in timed
        if _is_sum(record)
    }
    ratios: dict[tuple[Any, ...], list[tuple[float, str]]] = defaultdict(list)
    for record in timed:
        label = system_label(record)
        same = product_key({**record, "op": "spmm", "reduce": "sum"}), label
        other = not _is_sum(record) and record["op"] != "sddmm"
        if record["kind"] == "system" and other and same in plain:
            ratio = record["time"]["p50"] / plain[same]
            ratios[*setting(record), label].append((ratio, record["matrix"]))
    rows = []
    for (*key, label), found in sorted(ratios.items()):
        most, matrix = max(found)
        mean = geomean(ratio for ratio, _ in found)
        rows.append(
            f"| {_what(tuple(key))} | {label} | {mean:.2f} | {min(found)[0]:.2f} | "
            f"{most:.2f} {matrix} | {len(found)} |"
        )
    return rows


def _candidate(record: Record) -> bool:
    """Whether the planner could have chosen it."""
    if record["status"] != "ok" or "ablation" in record["config"]:
        return False
    named = record["kind"] == "system" and record["system"] != "auto"
    return named or record["system"] in yardstick(record)


def hindsight(records: Sequence[Record]) -> list[str]:
    """Compare ``auto`` with the fastest of everything in the same file, product by product.

    That is each system by name, also dense, in the orders and configurations of the records, and
    cuSPARSE's algorithms.
    """
    others: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in filter(_candidate, records):
        others[product_key(record)].append(record)
    losses: dict[tuple[Any, ...], list[tuple[float, str, str]]] = defaultdict(list)
    systems: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for record in records:
        if record["system"] != "auto" or record["status"] != "ok":
            continue
        found = others.get(product_key(record), [])
        own = {each["system"] for each in found if each["kind"] == "system"}
        if len(own - {"dense"}) < _FEWEST:
            continue
        best = min(found, key=lambda each: each["time"]["p50"])
        # auto's own time is part of hindsight, too.
        loss = max(1.0, record["time"]["p50"] / best["time"]["p50"])
        losses[setting(record)].append((loss, record["matrix"], system_label(best)))
        systems[setting(record)] |= own
    rows = []
    for key, lost in sorted(losses.items()):
        most, matrix, fastest = max(lost)
        much = sum(loss > _MUCH for loss, _, _ in lost)
        rows.append(
            f"| {_what(key)} | {geomean(loss for loss, _, _ in lost):.3f} | {most:.2f} {matrix} | "
            f"{fastest} | {much} | {len(lost)} | {', '.join(sorted(systems[key]))} |"
        )
    return rows


def planning(records: Sequence[Record]) -> list[str]:
    """Split the planning time of plain sums by stage, without ablations.

    Medians over the matrices. Records of older code, which do not split the build into format and
    schedule, do not count.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        measured = record["status"] == "ok" and record["kind"] == "system" and _is_sum(record)
        parted = {"format", "total"} <= set(record.get("planning") or {})
        if measured and parted and "ablation" not in record["config"]:
            groups[*setting(record), system_label(record)].append(record)
    rows = []
    for (_, device_name, _, _, dtype, _, n, label), members in sorted(groups.items()):
        spent: dict[str, list[float]] = defaultdict(list)
        for split in (record["planning"] for record in members):
            total = split["total"] - split.get("compile", 0.0)
            stages = [split.get(name, 0.0) for name in _STAGES]
            for name, seconds in zip(_STAGES, stages, strict=True):
                spent[name].append(seconds)
            spent["rest"].append(total - sum(stages))
            spent["total"].append(total)
        cells = " | ".join(f"{1e3 * statistics.median(found):.2f}" for found in spent.values())
        paid = [r["break_even"] for r in members if r.get("break_even") is not None]
        after = f"{statistics.median(paid):,.0f}" if paid else "never"
        rows.append(
            f"| {dtype}, {device_name} | {n} | {label} | {cells} | {after} | "
            f"{len(paid)}/{len(members)} |"
        )
    return rows
