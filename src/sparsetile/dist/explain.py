"""A distributed plan as text, made from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["explain", "report"]

_WAYS = {
    "none": "none: no rank lacks a row of B",
    "all_to_all": "all_to_all of the rows that are needed",
    "all_gather": "all_gather of all of B: nearly all of it is needed",
    "replicate": "replicate (1.5-D): rows of B within slices, parts of C summed within row groups",
}


def report(plan: Any) -> dict[str, Any]:
    """Return what ``DistributedPlan.info`` says, as plain data."""
    choice, grid = plan._choice, plan._grid
    return {
        "shape": list(plan.shape),
        "local_shape": list(plan.local_shape),
        "nnz": plan.nnz,
        "local_nnz": plan.local_nnz,
        "n": plan.n,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
        "rank": plan.rank,
        "world_size": plan.world_size,
        "source": plan.source,
        "partition": plan.partition.name,
        "rows": list(plan.partition.rows),
        "columns": list(plan.partition.columns),
        "exchange": plan.exchange,
        "halo_rows": plan.halo_rows,
        "sent_rows": sum(plan._halo.send_rows),
        "row_bytes": plan.n * plan.dtype.itemsize,
        "busiest_bytes": dict(plan._busiest_bytes),
        "replicas": plan.replicas,
        "replicate": {
            "best": choice.best,
            "bytes": {str(copies): count for copies, count in (choice.most or {}).items()},
            "too_large": list(choice.too_large),
            "hidden": choice.hidden,
            "part_rows": plan.local_shape[0] if grid is None else grid.group_rows,
            "part_nnz": plan._local.nnz + plan._remote.nnz,
        },
        "local": plan._local.info,
        "remote": plan._remote.info,
    }


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f} MB"


def _replication(info: Mapping[str, Any]) -> list[str]:
    """Return what was counted of replication; nothing where it was not looked at."""
    found, copies = info["replicate"], info["replicas"]
    lines = []
    if found["bytes"]:
        word = "chosen: " if copies > 1 else "not taken: at least "
        size = _megabytes(info["busiest_bytes"]["replicate"])
        lines.append(f"  replicate {word}{size} for the busiest rank with replicas={found['best']}")
    if copies > 1:
        lines.append(
            f"  replicas  {copies} of {found['part_rows']} rows of C each, "
            f"{found['part_nnz']} entries here"
        )
    if found["hidden"]:
        lines.append("  replicate not taken: the exchange hides behind the local product")
    if found["too_large"] and copies == 1:
        counts = ", ".join(str(c) for c in found["too_large"])
        lines.append(
            f"  replicate not taken with replicas={counts}: parts of C need too much memory"
        )
    return lines


def explain(title: str, info: Mapping[str, Any], local: str, remote: str) -> str:
    """Return the partition, the exchange and both products.

    Parameters
    ----------
    info : mapping
        ``DistributedPlan.info``.
    local, remote : str
        ``Plan.explain()`` of both.
    """
    way, most = info["exchange"], info["busiest_bytes"]
    rows, cols = info["local_shape"]
    outside = info["shape"][1] - cols
    share = 100 * info["halo_rows"] / outside if outside else 0.0
    lines = [
        title,
        f"  A         {info['source']}",
        f"  partition {info['partition']}: {rows} rows of C, {cols} rows of B here",
        f"  halo      {info['halo_rows']} rows of B from others, {share:.1f} % of theirs; "
        f"{info['sent_rows']} sent",
        f"  exchange  {_WAYS[way]}",
    ]
    for name in ("all_to_all", "all_gather"):
        word = "chosen" if name == way else "not taken"
        lines.append(f"  {name} {word}: {_megabytes(most[name])} for the busiest rank")
    lines += _replication(info)
    for name, text in (("local", local), ("halo", remote)):
        lines.append(f"  {name} product:")
        lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)
