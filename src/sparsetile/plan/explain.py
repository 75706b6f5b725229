"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["explain_plan"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def explain_plan(plan: Plan) -> str:
    """Return each stage's choice and cost, every rejected system with its reason, and the floor."""
    info = plan.info
    spent = info["seconds"]
    lines = [
        repr(plan),
        f"  intake    {plan.nnz} entries in canonical CSR"
        + (f", {_milliseconds(spent['intake'])}" if "intake" in spent else ""),
        f"  reorder   {plan.reorder}"
        + (f", {_milliseconds(spent['reorder'])}" if "reorder" in spent else ""),
    ]
    if plan.column_order is not None:
        lines.append("  columns   as first used in that order: run takes plan.permute(B), not B")
    for name, choice in info["choices"].items():
        lines.append(f"  {name:9s} {choice}")
    split = ", ".join(f"{name} {_milliseconds(s)}" for name, s in info.get("build", {}).items())
    lines.append(
        f"  build     {_milliseconds(spent.get('build', 0.0))}"
        + (f" ({split})" if split else "")
        + f", {info['format_bytes']} bytes beside the values"
    )
    if "compile" in spent:
        lines.append(f"  compile   {_milliseconds(spent['compile'])}")
    considered = info.get("considered", {})
    if info.get("considered_by") in ("model", "measure"):
        word = "measured" if info["considered_by"] == "measure" else "predicted"
        for name, seconds in sorted(considered.items(), key=lambda pair: pair[1]):
            mark = "chosen" if name == plan.system else "passed by"
            lines.append(f"  {name:9s} {mark}: {word} {_milliseconds(seconds)} a product")
    elif considered:
        lines.append(f"  {plan.system:9s} asked for by name")
    for name, reasons in info.get("rejected", {}).items():
        lines.append(f"  {name:9s} rejected: {'; '.join(reasons)}")
    floor, term = plan.floor()
    lines.append(f"  floor     {_milliseconds(floor)} a product ({term})")
    chosen = considered.get(plan.system)
    if chosen:
        lines.append(f"  share     {100 * floor / chosen:.0f} % of the floor's speed")
    return "\n".join(lines)
