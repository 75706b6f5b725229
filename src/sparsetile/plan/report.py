"""What a plan says of itself as plain data: sizes, choices, times, and the bytes of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsetile.systems.base import Tensors

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["all_parts", "held_parts", "info"]


def info(plan: Plan) -> dict[str, Any]:
    """See :attr:`sparsetile.Plan.info`."""
    return {
        "shape": list(plan.shape),
        "nnz": plan.nnz,
        "n": plan.n,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
        "weighted": plan._weighted,
        "system": plan.system,
        "reorder": plan.reorder,
        "reorder_columns": plan.column_order is not None,
        "deterministic": plan.deterministic,
        "format_bytes": plan._built.bytes,
        "bytes": _bytes(plan._parts()),
        "choices": dict(plan._built.choices),
        **{key: plan._report[key] for key in plan._report},
    }


def held_parts(plan: Plan) -> dict[str, Tensors]:
    """What products read, by part."""
    held, packed = plan._held.held, plan._held.packed
    return {
        "format": plan._built.tensors,
        "packed values": packed or {},
        "values": {} if held is None else {"values": held},
    }


def all_parts(plan: Plan) -> dict[str, Tensors]:
    """Everything that the plan, its casts and its transpose keep, by part."""
    csr, exact = plan._csr, plan._direction.exact
    matrix = {"indptr": csr.indptr, "indices": csr.indices, "entry_map": csr.entry_map}
    parts = {
        **held_parts(plan),
        "matrix": {name: part for name, part in matrix.items() if part is not None},
        "exact system": exact.tensors,
    }
    if plan._scale is not None:
        parts["row scale"] = {"scale": plan._scale}
    for dtype, cast in plan._casts.items():
        for name, part in held_parts(cast).items():
            parts[f"{str(dtype).removeprefix('torch.')}: {name}"] = part
    other = plan._transposed
    if other is not None and plan._order is not None:
        for name, part in other._parts().items():
            parts[f"transpose: {name}"] = part
        parts["transpose: order"] = {"order": plan._order}
    return parts


def _bytes(parts: dict[str, Tensors]) -> dict[str, int]:
    """Bytes of each part that is held now; memory that parts share counts once."""
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, part in parts.items():
        fresh = {t.untyped_storage().data_ptr(): t.nbytes for t in part.values()}
        found[name] = sum(size for at, size in fresh.items() if at not in seen)
        seen |= set(fresh)
    return {name: size for name, size in found.items() if size}
