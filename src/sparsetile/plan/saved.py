"""Plans in files, pickles and copies: the matrix, its orders, and what was asked for.

Tiles and schedules follow from these. They are built again and never read: to check them takes as
long. What is read is checked: kernels trust a plan, and a file may hold anything.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.checks import dimension, matrix_shape, one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.engines.request import Request
from sparsetile.intake import CSR, as_csr
from sparsetile.intake.csr import FP8, PRODUCT_DTYPES
from sparsetile.plan.build import build_variant
from sparsetile.plan.family import Family, Widths, canonical
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.variant import Variant
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS

__all__ = [
    "SavedPlan", "checked_report", "copied", "named_field", "on_file", "placed", "reduced",
    "restored", "saved_plan",
]  # fmt: skip

_TENSORS = ("indptr", "indices", "entry_map", "values", "perm", "column_order")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRODUCT_DTYPES}


# -- writing ---------------------------------------------------------------------------------------


def _fields(family: Family, variant: Variant) -> dict[str, Any]:
    widths = family.widths
    return {
        "shape": list(variant.shape), "n": variant.n,
        "dtype": str(variant.dtype).removeprefix("torch."), "system": variant.system,
        "reorder": variant.permutation.name, "deterministic": variant.deterministic,
        "ablation": variant.choices.get("ablation"),
        "widths": widths and [widths.system, widths.tune],
    }  # fmt: skip


def _tensors(family: Family, variant: Variant, values: Tensor | None) -> dict[str, Tensor | None]:
    return {
        "indptr": variant.csr.indptr, "indices": variant.csr.indices,
        "entry_map": variant.csr.entry_map, "values": values, "perm": variant.permutation.perm,
        "column_order": None if variant.transposed else family.column_order,
    }  # fmt: skip


def _parts(family: Family, variant: Variant) -> tuple[str, dict[str, Tensor | None]]:
    values = variant.values
    if values is not None and values.dtype is FP8:  # which torch cannot pickle; exact in this type
        values = values.to(torch.bfloat16)
    header = json.dumps(_fields(family, variant), sort_keys=True)
    return header, _tensors(family, variant, values)


def on_file(family: Family, variant: Variant) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """What ``Plan.save`` writes: the header's fields and the tensors, but not what was built."""
    fields = _fields(family, variant)
    report = {name: found for name, found in variant.report.items() if name in _REPORT}
    fields |= {"device": variant.device.type, "report": report}
    return fields, _tensors(family, variant, family.values_now(variant))


def reduced(
    family: Family, variant: Variant
) -> tuple[str, dict[str, Tensor | None], Tensor | None]:
    """What pickle writes: a text, tensors, and the tensor whose values are followed, if any."""
    follow = family.follow
    if follow is None:
        return (*_parts(family, variant), None)
    own = isinstance(follow, functools.partial) and follow.func is canonical
    if not own or variant.transposed:
        raise type_error(
            "pickle", "plan", "one that holds its own values or follows those of update_values",
            "one that follows its matrix", "Call plan.update_values, or use plan.save",
        )  # fmt: skip
    return (*_parts(family, variant), follow.args[0])  # type: ignore[attr-defined]


@outside_modes
def copied(family: Family, variant: Variant, memo: dict[int, Any]) -> Family:
    """Copy a family. The copy follows the copy of the values that it follows, if those are copied
    with it."""
    header, tensors = _parts(family, variant)
    own = {name: None if each is None else each.clone() for name, each in tensors.items()}
    made = restored(header, own)
    made.follow = copy.deepcopy(family.follow, memo)
    return made


# -- reading ---------------------------------------------------------------------------------------


def restored(header: str, tensors: Mapping[str, Tensor | None]) -> Family:
    """Build what :func:`reduced` wrote, on the device of its tensors."""
    return placed("load", saved_plan(json.loads(header), tensors))


def placed(function: str, saved: SavedPlan, report: Mapping[str, Any] | None = None) -> Family:
    """Build a saved plan on the device of its tensors; ``report`` as in :func:`build_variant`."""
    made = build_variant(function, saved.request, saved.system, report=report)
    return Family(made, saved.column_order, saved.widths)


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """What is multiplied and how, and the system that was chosen for it."""

    request: Request
    system: str
    column_order: Tensor | None
    widths: Widths | None


def _fault(argument: str, expected: str, actual: object) -> ValueError:
    return value_error("load", argument, expected, actual, "Make the plan again and save it")


def named_field(fields: object, name: str, *kinds: type) -> Any:
    """Return a field of the header, of one of these types of JSON."""
    if not isinstance(fields, dict) or name not in fields:
        raise _fault("header", "complete", f"no {name}")
    if type(fields[name]) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise _fault(name, f"of type {expected}", type(fields[name]).__name__)
    return fields[name]


def saved_plan(fields: object, tensors: Mapping[str, Tensor | None]) -> SavedPlan:
    """Check header and tensors against each other; ValueError or TypeError say what is wrong."""
    for name in tensors:
        one_of("load", "tensor", name, _TENSORS)
    shape = matrix_shape("load", named_field(fields, "shape", list))
    dtype = _DTYPES[one_of("load", "dtype", named_field(fields, "dtype", str), _DTYPES)]
    csr = _matrix(tensors, shape)
    order = _order("perm", tensors.get("perm"), shape[0])
    system = named_field(fields, "system", str)
    return SavedPlan(
        Request(
            csr, dimension("load", "n", named_field(fields, "n", int)), dtype,
            Permutation(named_field(fields, "reorder", str), order),
            named_field(fields, "deterministic", bool), _ablation(fields, system),
        ),
        system,
        _order("column_order", tensors.get("column_order"), shape[1]),
        _widths(named_field(fields, "widths", list, type(None))),
    )  # fmt: skip


def _matrix(tensors: Mapping[str, Tensor | None], shape: tuple[int, int]) -> CSR:
    indptr, indices, values, entry_map = (
        tensors.get(name) for name in ("indptr", "indices", "values", "entry_map")
    )
    for name, tensor in (("indptr", indptr), ("indices", indices)):
        if tensor is None:
            raise _fault("tensors", "complete", f"no {name}")
    if values is not None and values.dtype is FP8:  # no type of a matrix, and exact in this one
        values = values.to(torch.bfloat16)
    csr = as_csr((indptr, indices, values, shape), function="load")
    if csr.entry_map is not None:
        raise _fault("indices", "in canonical order", "columns out of order or twice")
    if entry_map is not None and not _reaches_all(entry_map, csr.nnz):
        raise _fault("entry_map", f"int64 places among all of {csr.nnz} entries", "others")
    return CSR(csr.indptr, csr.indices, csr.values, shape, entry_map, csr.checked)


def _reaches_all(places: Tensor, count: int) -> bool:
    """Whether these are places from 0 to ``count``, and each of those is among them."""
    if places.dtype is not torch.int64 or places.dim() != 1:
        return False
    if places.numel() and not bool((places.min() >= 0) & (places.max() < count)):
        return False
    return bool((torch.bincount(places, minlength=count) > 0).all())


def _order(name: str, order: Tensor | None, size: int) -> Tensor | None:
    if order is None:
        return None
    # The number of places first: what else is checked takes memory for ``size`` of them.
    whole = order.dtype is torch.int64 and order.shape == (size,) and _reaches_all(order, size)
    if not whole:
        raise _fault(name, f"an int64 permutation of {size} places", "another tensor")
    return order


def _ablation(fields: object, system: str) -> str | None:
    """A part of the system that is off; benchmarks make such plans."""
    name: str | None = named_field(fields, "ablation", str, type(None))
    if name is None:
        return None
    able = SYSTEMS[system].ablations if system in SYSTEMS else ()
    if named_field(fields, "deterministic", bool):
        able = tuple(each for each in able if SYSTEMS[system].repeats(each))
    return one_of("load", "ablation", name, able)


def _widths(pair: list[Any] | None) -> Widths | None:
    if pair is None:
        return None
    if len(pair) != 2:
        raise _fault("widths", "a system and how it is tuned", f"{len(pair)} names")
    system = one_of("load", "widths[0]", pair[0], ["auto", *SYSTEMS])
    return Widths(system, one_of("load", "widths[1]", pair[1], ["model", "measure", "none"]))


# -- what explain prints ---------------------------------------------------------------------------


def _is_text(found: object) -> bool:
    return isinstance(found, str)


def _is_texts(found: object) -> bool:
    return isinstance(found, list) and all(map(_is_text, found))


def _is_times(found: object) -> bool:
    # Whole numbers that no float holds cannot be printed as seconds.
    return isinstance(found, dict) and all(
        type(each) is float or (type(each) is int and abs(each) < 2**63) for each in found.values()
    )


def _is_reasons(found: object) -> bool:
    return isinstance(found, dict) and all(map(_is_texts, found.values()))


_REPORT: dict[str, Callable[[object], bool]] = {
    "seconds": _is_times, "build": _is_times, "considered": _is_times, "considered_by": _is_text,
    "measured": _is_texts, "orders": _is_texts, "rejected": _is_reasons,
    "notes": _is_texts,
}  # fmt: skip
# What older files also have. The system of a plan from a file is settled.
_OF_A_PLAN_THAT_GROWS = ("account", "compared_after")


def checked_report(fields: object, system: str) -> dict[str, Any]:
    """Return how the plan was made, for ``Plan.explain`` and ``Plan.info``."""
    report: dict[str, Any] = named_field(fields, "report", dict)
    named_field(report, "seconds", dict)
    for name in _OF_A_PLAN_THAT_GROWS:
        report.pop(name, None)
    for name, found in report.items():
        if name not in _REPORT or not _REPORT[name](found):
            raise _fault("report", "how a plan was made", f"another {name}")
    considered = report.get("considered")
    if considered and system not in considered:
        raise _fault("report", f"one in which {system} was considered", sorted(considered))
    return report
