"""Records of training -> one row a graph and network, and geometric means of the ratios."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsetile.bench.record import Record

__all__ = ["GnnRow", "geometric_means", "gnn_rows"]

_SPARSE, _EDGES, _BOUND = "pyg-sparse", "pyg-edges", "no-product"


@dataclass(frozen=True)
class GnnRow:
    """One run beside PyG's runs of the same network, graph and type; ratios above 1 are faster.

    ``step`` is that of the median epochs; ``total`` is that of all epochs with planning. ``memory``
    is the peak over that of ``pyg-sparse``. None where either was not measured.
    """

    matrix: str
    setting: str
    dtype: str
    path: str
    reorder: str
    status: str
    step_seconds: float | None
    host_seconds: float | None
    prepare_seconds: float | None
    peak_bytes: int | None
    loss_difference: float | None
    step_over_sparse: float | None
    total_over_sparse: float | None
    step_over_edges: float | None
    memory_over_sparse: float | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def gnn_rows(records: Sequence[Record]) -> list[GnnRow]:
    """Return a row for each record, in their order."""
    groups: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)

    def group(record: Record) -> tuple[Any, ...]:
        return tuple(
            record[name] for name in ("matrix", "setting", "dtype", "device", "epochs", "features")
        )

    for record in records:
        if record["status"] == "ok" and record["kind"] == "baseline":
            groups[group(record)][record["path"]] = record
    rows = []
    for record in records:
        right = record["status"] == "ok"
        sparse = groups[group(record)].get(_SPARSE, {}) if right else {}
        edges = groups[group(record)].get(_EDGES, {}) if right else {}
        step = record["time"]["p50"] if "time" in record else None
        rows.append(
            GnnRow(
                **{name: record[name] for name in ("matrix", "setting", "dtype", "path")},
                reorder=record["reorder"],
                status=record["status"],
                step_seconds=step,
                host_seconds=record["host"]["p50"] if "host" in record else None,
                prepare_seconds=record.get("prepare_seconds"),
                peak_bytes=record.get("peak_bytes"),
                loss_difference=record.get("loss_difference"),
                step_over_sparse=_ratio(sparse.get("time", {}).get("p50"), step),
                total_over_sparse=_ratio(sparse.get("total_seconds"), record.get("total_seconds")),
                step_over_edges=_ratio(edges.get("time", {}).get("p50"), step),
                memory_over_sparse=_ratio(record.get("peak_bytes"), sparse.get("peak_bytes")),
                reason=record.get("reason", ""),
            )
        )
    return rows


def geometric_means(rows: Sequence[GnnRow]) -> list[dict[str, Any]]:
    """Return, by network, type, path and row order, the means over graphs of the three ratios."""
    groups: dict[tuple[str, str, str, str], list[GnnRow]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.path.startswith(("sparsetile", _BOUND)):
            groups[row.setting, row.dtype, row.path, row.reorder].append(row)
    found = []
    for (setting, dtype, path, reorder), members in groups.items():
        mean: dict[str, Any] = {
            "setting": setting, "dtype": dtype, "path": path, "reorder": reorder,
            "graphs": len(members),
        }  # fmt: skip
        for name in ("step_over_sparse", "total_over_sparse", "step_over_edges"):
            values = [value for row in members if (value := getattr(row, name)) is not None]
            mean[name] = math.exp(sum(map(math.log, values)) / len(values)) if values else None
            mean[f"least_{name}"] = min(values, default=None)
        found.append(mean)
    return found
