"""Records -> what planning takes, by stage, and after how many products it has paid.

Only records that part the build into format and schedule count; older ones hold one figure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsetile.bench.analysis import attach_baselines, setting, system_label
from sparsetile.bench.record import Record

__all__ = ["PlanningSplit", "planning_split"]

_PARTS = ("reorder", "format", "schedule")


@dataclass(frozen=True)
class PlanningSplit:
    """Medians over the matrices of one suite, in seconds; compilation is left out.

    ``rest`` is what is none of the three: intake, choosing, preparing gradients. ``break_even`` is
    the median over the ``paid`` products, of ``count``, on which planning ever pays.
    """

    suite: str
    device_name: str
    dtype: str
    n: int
    label: str
    count: int
    reorder: float
    format: float
    schedule: float
    rest: float
    total: float
    paid: int
    break_even: float | None


def planning_split(records: Sequence[Record]) -> list[PlanningSplit]:
    """Part the planning of plain sums by suite, type, width and system; ablations are left out."""
    if records and "speedup" not in records[0]:
        records = attach_baselines(records)
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        split = record.get("planning") or {}
        plain = (record["op"], record["reduce"]) == ("spmm", "sum")
        measured = record["status"] == "ok" and record["kind"] == "system" and plain
        if measured and "ablation" not in record["config"] and {"format", "total"} <= set(split):
            key = (*setting(record), system_label(record))
            groups[key].append(record)
    return [_split(key, members) for key, members in sorted(groups.items())]


def _split(key: tuple[Any, ...], members: Sequence[Record]) -> PlanningSplit:
    spent: dict[str, list[float]] = defaultdict(list)
    for record in members:
        planning = record["planning"]
        total = planning["total"] - planning.get("compile", 0.0)
        for name in _PARTS:
            spent[name].append(planning.get(name, 0.0))
        spent["total"].append(total)
        spent["rest"].append(total - sum(planning.get(name, 0.0) for name in _PARTS))
    middle = {name: statistics.median(found) for name, found in spent.items()}
    paid = [r["break_even"] for r in members if r.get("break_even") is not None]
    suite, device_name, _, _, dtype, _, n, label = key  # plain sums all
    return PlanningSplit(
        suite=suite,
        device_name=device_name,
        dtype=dtype,
        n=n,
        label=label,
        count=len(members),
        reorder=middle["reorder"],
        format=middle["format"],
        schedule=middle["schedule"],
        rest=middle["rest"],
        total=middle["total"],
        paid=len(paid),
        break_even=statistics.median(paid) if paid else None,
    )
