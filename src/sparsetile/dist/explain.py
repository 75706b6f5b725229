"""A distributed plan as text, made from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["explain", "report"]

_EXCHANGES = {
    "none": "none: no rank lacks a row of B",
    "all_to_all": "all_to_all of the rows that are needed",
    "all_gather": "all_gather of all of B: nearly all of it is needed",
    "fewest": "fewest: for each pair of ranks, rows of B or partial sums of C",
}


def report(plan: Any) -> dict[str, Any]:
    """Return ``DistributedPlan.info``."""
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
        "local": plan._local.info,
        "remote": plan._remote.info,
    }


def explain(title: str, info: Mapping[str, Any], local: str, remote: str) -> str:
    """Return partition, exchange and both products as text, from ``DistributedPlan.info``."""
    chosen, most = info["exchange"], info["busiest_bytes"]
    rows, cols = info["local_shape"]
    outside = info["shape"][1] - cols
    share = 100 * info["halo_rows"] / outside if outside else 0.0
    lines = [
        title,
        f"  A         {info['source']}",
        f"  partition {info['partition']}: {rows} rows of C, {cols} rows of B here",
        f"  halo      {info['halo_rows']} rows of B from others, {share:.1f} % of theirs; "
        f"{info['sent_rows']} sent",
        f"  exchange  {_EXCHANGES[chosen]}",
    ]
    for name, size in most.items():
        word = "chosen" if name == chosen else "not taken"
        lines.append(f"  {name} {word}: {size / 1e6:.3f} MB for the busiest rank")
    for name, text in (("local", local), ("halo", remote)):
        lines.append(f"  {name} product:")
        lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)
