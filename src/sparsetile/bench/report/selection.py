"""Which records a published figure or a table of ratios is about, and what it says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetile.bench.analysis import product_key
from sparsetile.bench.record import DTYPES, Record
from sparsetile.bench.suites import concerns

__all__ = ["Metric", "note", "selected"]

# Metrics that hold a product against one baseline or system rather than the best baseline.
_OVER = "over "
# Row orders of which each matrix gets its fastest.
_BEST = "best"


class Metric:
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


def selected(item: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
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


def note(item: Mapping[str, Any], chosen: Sequence[Record]) -> str:
    """What a reader must know of the measured products: their types, and how orders were chosen."""
    types = ", ".join(dict.fromkeys(record["dtype"] for record in chosen))
    if not chosen or item.get("orders") != _BEST:
        return types
    orders = sorted({str(record["config"].get("reorder", "given")) for record in chosen})
    if len(orders) == 1:
        return f"{types}, row order {orders[0]}"
    return f"{types}, the best row order of each matrix ({' or '.join(orders)})"
