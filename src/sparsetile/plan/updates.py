"""New values for a plan: all that holds A's values takes them, or none of it does.

A plan's other widths, its casts and its transpose have values of their own. Memory may run out
while those are made; so everything is made first, and then taken over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.plan.derived import is_mirrored
from sparsetile.plan.dispatch import lasting
from sparsetile.systems.base import Tensors

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["set_values", "take_values"]

# A plan, its new values, and what its runner made of them.
_Prepared: TypeAlias = "tuple[Plan, Tensor | None, Tensors | None]"


@lasting
def set_values(plan: Plan, values: Tensor | None) -> None:
    """Take over canonical values, and what is made of them."""
    _accept(_prepared(plan, values))


@lasting
def take_values(plan: Plan, canonical: Callable[[], Tensor], values: Tensor) -> None:
    """Follow or copy the caller's ``values``, which ``canonical`` brings into A's order."""
    with torch.no_grad():
        copied = canonical().detach().resolve_neg().to(plan.dtype)
    plan._note_stream()
    kept = copied.data_ptr() == values.data_ptr() or copied.is_inference()
    if plan._held.held is None and kept:
        copied = copied.clone()  # the plan must not change when the caller's tensor does
    mirrored = _still_mirrored(plan, copied)
    prepared = _prepared(plan, copied)
    plan._held.follow = canonical if values.requires_grad else None
    _accept(prepared)
    for each, _, _ in prepared:
        each._as_planned = False
        each._mirrors = each._mirrors and mirrored


def _still_mirrored(plan: Plan, values: Tensor) -> bool:
    """Whether A still equals its transpose; looked at only where a captured graph needs it."""
    others = [] if plan._widths is None else plan._widths.plans()
    if not any(each._mirror_captured for each in (plan, *others, *plan._casts.values())):
        return False
    if is_mirrored(plan._csr, values, plan._csr.transpose_order()):
        return True
    raise value_error(
        "update_values", "values", "symmetric, as those that a CUDA graph was captured with",
        "values that are not",
        "Read plan.T before the capture: gradients then use their own matrix",
    )  # fmt: skip


def _prepared(plan: Plan, values: Tensor | None) -> list[_Prepared]:
    """Make what the plan, its other widths and its transpose hold of canonical values.

    Memory may run out here; all of them still have the values from before then.
    """
    mine, packed = plan._held.prepare(values)
    found: list[_Prepared] = [(plan, mine, packed)]
    others = [] if plan._widths is None else plan._widths.plans()
    for other in (*others, *plan._casts.values()):
        found += _prepared(other, mine)
    # The transpose of a cast is a cast of the transpose, which has its values from there.
    if plan._transposed is not None and plan._wider is None:
        turned = None if mine is None else mine[plan._order]
        found += _prepared(plan._transposed, turned)
    return found


def _accept(prepared: list[_Prepared]) -> None:
    for plan, values, packed in prepared:
        plan._value_version += 1
        held = plan._held
        if held.take(values, packed):
            plan._bound = plan._runner.bind(plan._built.tensors, held.held, held.packed)
        if plan._transposed is not None:
            plan._transposed._held.follow = plan._following_transposed()
