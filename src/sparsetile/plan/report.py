"""What a plan says of itself as plain data: sizes, choices, times, and the bytes of its parts."""

from __future__ import annotations

from typing import Any

from sparsetile.launch.interface import Tensors
from sparsetile.plan.family import Family
from sparsetile.plan.variant import Variant

__all__ = ["all_parts", "info"]


def info(family: Family, variant: Variant) -> dict[str, Any]:
    """See :attr:`sparsetile.Plan.info`."""
    columns = not variant.transposed and family.column_order is not None
    return {
        "shape": list(variant.shape), "nnz": variant.nnz, "n": variant.n,
        "dtype": str(variant.dtype).removeprefix("torch."), "device": str(variant.device),
        "weighted": variant.weighted, "system": variant.system, "reorder": variant.permutation.name,
        "reorder_columns": columns, "deterministic": variant.deterministic,
        "format_bytes": variant.format_bytes, "bytes": _bytes(all_parts(family, variant)),
        "choices": dict(variant.choices), **variant.report,
    }  # fmt: skip


def all_parts(family: Family, variant: Variant) -> dict[str, Tensors]:
    """Everything that a direction, its casts and its transpose keep, by part."""
    if not family.complete:
        return variant.parts()
    parts = {**variant.parts(), **_pattern(variant)}
    for each in family.variants():
        if each is variant or each.n != variant.n:
            continue
        prefix = "" if each.dtype is variant.dtype else str(each.dtype).removeprefix("torch.")
        if each.transposed is not variant.transposed:
            prefix = f"transpose {prefix}".strip()
        own = {**each.parts(), **_pattern(each)} if each.dtype is variant.dtype else each.parts()
        parts |= {f"{prefix}: {name}": part for name, part in own.items()}
    if family.order is not None:
        parts["transpose: order"] = {"order": family.order}
    return parts


def _pattern(variant: Variant) -> dict[str, Tensors]:
    csr = variant.csr
    matrix = {"indptr": csr.indptr, "indices": csr.indices, "entry_map": csr.entry_map}
    found: dict[str, Tensors] = {
        "matrix": {name: part for name, part in matrix.items() if part is not None},
        "exact system": variant.exact_tensors(),
    }
    if variant.row_scale is not None:
        found["row scale"] = {"scale": variant.row_scale}
    return found


def _bytes(parts: dict[str, Tensors]) -> dict[str, int]:
    """Bytes of each part in memory now; memory that parts share counts once."""
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, part in parts.items():
        fresh = {t.untyped_storage().data_ptr(): t.nbytes for t in part.values()}
        found[name] = sum(size for at, size in fresh.items() if at not in seen)
        seen |= set(fresh)
    return {name: size for name, size in found.items() if size}
