"""A distributed plan as text, made from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["explain"]

_WAYS = {
    "none": "none: no rank lacks a row of B",
    "all_to_all": "all_to_all of the rows that are needed",
    "all_gather": "all_gather of all of B: nearly all of it is needed",
}


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f} MB"


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
    for name, text in (("local", local), ("halo", remote)):
        lines.append(f"  {name} product:")
        lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)
