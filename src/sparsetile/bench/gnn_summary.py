"""Records of training -> one row a graph and network, and geometric means of the ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sparsetile.bench.analysis import geomean
from sparsetile.bench.record import Record

__all__ = ["geometric_means", "gnn_rows"]

_SAME = ("matrix", "setting", "dtype", "device", "epochs", "features")
_RATIOS = ("step_over_sparse", "total_over_sparse", "step_over_edges")


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def gnn_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each record, in their order: it beside PyG's runs of the same.

    Ratios above 1 are faster: ``step`` is that of the median epochs, ``total`` that of all epochs
    with planning. ``memory`` is the peak over that of ``pyg-sparse``. None where either was not
    measured.
    """
    groups: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["status"] == "ok" and record["kind"] == "baseline":
            groups[tuple(record[name] for name in _SAME)][record["path"]] = record
    rows = []
    for record in records:
        held = groups[tuple(record[name] for name in _SAME)] if record["status"] == "ok" else {}
        sparse, edges = held.get("pyg-sparse", {}), held.get("pyg-edges", {})
        step = record.get("time", {}).get("p50")
        kept = ("matrix", "setting", "dtype", "path", "reorder", "status")
        found = ("prepare_seconds", "peak_bytes", "loss_difference")
        rows.append(
            {name: record[name] for name in kept}
            | {name: record.get(name) for name in found}
            | {
                "step_seconds": step,
                "host_seconds": record.get("host", {}).get("p50"),
                "step_over_sparse": _ratio(sparse.get("time", {}).get("p50"), step),
                "total_over_sparse": _ratio(
                    sparse.get("total_seconds"), record.get("total_seconds")
                ),
                "step_over_edges": _ratio(edges.get("time", {}).get("p50"), step),
                "memory_over_sparse": _ratio(record.get("peak_bytes"), sparse.get("peak_bytes")),
                "reason": record.get("reason", ""),
            }
        )
    return rows


def geometric_means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by network, type, path and row order, the means over graphs of the three ratios."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    names = ("setting", "dtype", "path", "reorder")
    for row in rows:
        if row["status"] == "ok" and row["path"].startswith(("sparsetile", "no-product")):
            groups[tuple(row[name] for name in names)].append(row)
    found = []
    for key, members in groups.items():
        mean: dict[str, Any] = {**dict(zip(names, key, strict=True)), "graphs": len(members)}
        for name in _RATIOS:
            values = [row[name] for row in members if row[name] is not None]
            mean[name] = geomean(values) if values else None
            mean[f"least_{name}"] = min(values, default=None)
        found.append(mean)
    return found
