"""What the planner's choice loses against hindsight: the fastest of everything that was measured.

Everything is each system by name, dense among them, in the orders and configurations that a record
has, and cuSPARSE's algorithms. Products are those that have a time of ``auto`` and of at least two
of the library's sparse systems in the same file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsetile.bench.analysis import Row, geomean, product_key, setting, system_label, yardstick
from sparsetile.bench.record import Record

__all__ = ["AUTO", "Hindsight", "against_hindsight"]

AUTO = "auto"
# Sparse systems by name that a product must have a time of.
FEWEST = 2
# Losses above this are counted one by one.
MUCH = 1.2


@dataclass(frozen=True)
class Hindsight(Row):
    """Time of ``auto`` over the least one, over the products of one width and type.

    ``much`` counts products that lose over 20 %. ``systems`` are those that had a time.
    """

    count: int
    geomean: float
    most: float
    most_matrix: str
    fastest: str
    much: int
    systems: tuple[str, ...]


def _candidate(record: Record) -> bool:
    """Whether the planner could have taken it."""
    if record["status"] != "ok" or "ablation" in record["config"]:
        return False
    named = record["kind"] == "system" and record["system"] != AUTO
    return named or record["system"] in yardstick(record)


def against_hindsight(records: Sequence[Record]) -> list[Hindsight]:
    """Hold ``auto`` against the fastest of the same file, product by product."""
    others: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if _candidate(record):
            others[product_key(record)].append(record)
    losses: dict[tuple[Any, ...], list[tuple[float, str, str]]] = defaultdict(list)
    systems: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for record in records:
        if record["system"] != AUTO or record["status"] != "ok":
            continue
        found = others.get(product_key(record), [])
        own = {each["system"] for each in found if each["kind"] == "system"}
        if len(own - {"dense"}) < FEWEST:
            continue
        best = min(found, key=lambda each: each["time"]["p50"])
        # What auto itself reached is part of hindsight, too.
        loss = max(1.0, record["time"]["p50"] / best["time"]["p50"])
        losses[setting(record)].append((loss, record["matrix"], system_label(best)))
        systems[setting(record)] |= own
    rows = []
    for key, lost in sorted(losses.items()):
        suite, device_name, op, reduce, dtype, _, n = key
        most, most_matrix, fastest = max(lost)
        rows.append(
            Hindsight(
                suite, device_name, op, reduce, dtype, n, len(lost),
                geomean(loss for loss, _, _ in lost), most, most_matrix, fastest,
                sum(loss > MUCH for loss, _, _ in lost), tuple(sorted(systems[key])),
            )
        )  # fmt: skip
    return rows
