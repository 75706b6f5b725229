"""Plans that a plan makes of itself and keeps: its transpose, and itself in autocast's types.

They share A's pattern with it and have its values (``updates.py``). The transpose of a cast is a
cast of the transpose, so that one lock guards both. A matrix whose pattern is symmetric, as an
undirected graph's, shares its tiles and schedules with its transpose. Where the values are
symmetric too, gradients need no transpose: the plan is its own (:func:`backward_plan`).
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsetile.core.streams import capturing, refuse_capture, settle
from sparsetile.intake.csr import CSR, FP8
from sparsetile.plan.dispatch import lasting
from sparsetile.plan.flat import Direction
from sparsetile.plan.widths import Widths
from sparsetile.reorder import Permutation, order_of_transpose
from sparsetile.systems import SYSTEMS, BuiltSystem, Request, candidates
from sparsetile.systems.registry import exact_system, unsupported

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = [
    "PLANNING",
    "backward_plan",
    "cast",
    "for_eager",
    "is_mirrored",
    "lower_type",
    "planned_transpose",
]

# Of all plans: two threads that need a transpose at once must share one.
PLANNING = threading.RLock()
_BEFORE_CAPTURE = "Compute a gradient, or read plan.T, once before the capture"
# What autocast casts.
_CAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# -- the transpose ---------------------------------------------------------------------------------


def planned_transpose(plan: Plan) -> Plan:
    """Return the transpose, planned where it was not. The caller holds :data:`PLANNING`."""
    origin = plan._alive_origin()
    if origin is not None:  # two transposes of one another share their values
        if plan._order is None:
            order = origin._entries_of_transpose()
            settle(plan.device)
            plan._order = order
        return origin
    if plan._transposed is not None:
        return plan._transposed
    refuse_capture("plan.T", plan.device, _BEFORE_CAPTURE)
    wider = None if plan._wider is None else plan._wider()
    if wider is None:
        made = _build_transpose(plan)
    else:
        made = cast(wider._transpose(), plan.dtype)
        plan._order = wider._order
    made._origin = weakref.ref(plan)
    plan.__dict__["_transposed"] = made  # no submodule: it follows by itself
    return made


@lasting
def backward_plan(plan: Plan) -> Plan:
    """Return the plan that gradients multiply by: the transpose, or where A is its own transpose
    the plan itself, until its values change."""
    with PLANNING:
        untouched = plan._as_planned and plan._transposed is None and plan._origin is None
        if untouched and not plan._mirrors:
            refuse_capture("run", plan.device, _BEFORE_CAPTURE)
            wider = None if plan._wider is None else plan._wider()
            if wider is None:
                plan._mirrors = _mirrors_itself(plan)
            else:  # equal values are rounded alike
                plan._mirrors = backward_plan(wider) is wider
        return plan if plan._mirrors else plan._transpose()


def is_mirrored(csr: CSR, values: Tensor | None, order: Tensor) -> bool:
    """Whether A equals its transpose; ``order`` is that of :meth:`CSR.transpose_order`."""
    same = torch.equal(csr.transposed(order).indices, csr.indices)
    return same and (values is None or torch.equal(values[order], values))


def _mirrors_itself(plan: Plan) -> bool:
    """Whether the plan's A equals its transpose. The order of the transpose's entries is kept where
    it does not."""
    csr = plan._csr
    if csr.shape[0] != csr.shape[1]:
        return False
    if not torch.equal(torch.bincount(csr.indices, minlength=csr.shape[1]), csr.row_lengths()):
        return False  # directed graphs end here, before anything is sorted
    order = csr.transpose_order()
    if is_mirrored(csr, plan._held.held, order):
        return True
    plan._order = _narrow(order)
    return False


def _narrow(order: Tensor) -> Tensor:
    """Numbers of entries in 32 bits where that is enough: a plan keeps them."""
    return order.to(torch.int32) if order.numel() < 2**31 else order


def _build_transpose(plan: Plan) -> Plan:
    from sparsetile.plan.plan import Plan

    started = time.perf_counter()
    if plan._order is None:
        plan._order = _narrow(plan._csr.transpose_order())
    flipped = plan._csr.transposed(plan._order)
    if (
        plan.shape[0] == plan.shape[1]
        and torch.equal(flipped.indptr, plan._csr.indptr)
        and torch.equal(flipped.indices, plan._csr.indices)
    ):
        # The same pattern has the same tiles and schedules.
        flipped = CSR(plan._csr.indptr, plan._csr.indices, None, plan.shape)
        built, permutation, direction = plan._built, plan._permutation, plan._direction
        rejected: dict[str, list[str]] = {}
    else:
        built, permutation, rejected = _built_transpose(plan, flipped)
        direction = None
    made = Plan(
        flipped.with_values(plan._values_transposed()), plan.n, plan.dtype, built,
        permutation, deterministic=plan.deterministic, direction=direction,
        report={
            "seconds": {"build": time.perf_counter() - started},
            "build": dict(built.seconds),
            "rejected": rejected,
        },
    )  # fmt: skip
    made._held.follow = plan._following_transposed()
    if plan._widths is not None:
        made._keep_widths(Widths(plan._widths.system, plan._widths.tune))
    return made


def _built_transpose(
    plan: Plan, flipped: CSR
) -> tuple[BuiltSystem, Permutation, dict[str, list[str]]]:
    """Build the transpose with the plan's system where that takes it, else with the exact one."""
    request = Request(
        flipped, plan.n, plan.dtype, Permutation("identity", None), plan.deterministic
    )
    able, rejected = candidates(request)
    name = plan.system if plan.system in able else exact_system(plan.device.type).name
    if name not in able:
        raise unsupported("plan.T", rejected, f"the transpose of {plan.shape}")
    if SYSTEMS[name].ordered:
        order = order_of_transpose(plan._permutation, plan._csr, flipped)
        request = replace(request, permutation=order)
    return SYSTEMS[name].build(request), request.permutation, rejected


# -- autocast --------------------------------------------------------------------------------------


def for_eager(plan: Plan, B: Tensor, dtype: torch.dtype, place: str) -> Plan | None:
    """Return the plan whose type B has or, under autocast, is cast to; None where operators
    have to say what is wrong, or cast as well."""
    if not torch.is_autocast_enabled(place):
        return plan if B.dtype is dtype else None
    lower = torch.get_autocast_dtype(place)
    if B.dtype not in _CAST_TYPES or dtype is FP8 or lower is dtype:
        return plan if lower is dtype and B.dtype in _CAST_TYPES else None
    kept = plan._casts.get(lower)
    return cast(plan, lower) if kept is None and _casts_to(plan, lower) else kept


def lower_type(plan: Plan, B: Tensor) -> torch.dtype | None:
    """Autocast's type where B is cast to it and the plan can follow."""
    place = plan.device.type
    if not torch.is_autocast_enabled(place) or B.dtype not in _CAST_TYPES:
        return None
    lower = torch.get_autocast_dtype(place)
    if torch.compiler.is_compiling() or lower is plan.dtype or not _casts_to(plan, lower):
        return None
    return lower


def _casts_to(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether there is a plan in this type, or one may be made now."""
    if not plan._castable:
        return False
    if dtype in plan._casts:
        return True
    system = SYSTEMS[plan.system]
    taken = dtype in system.dtypes or (
        system.casts_to_exact and dtype in exact_system(plan.device.type).dtypes
    )
    return taken and not plan._held.released and not capturing(plan.device)


@lasting
def cast(plan: Plan, dtype: torch.dtype) -> Plan:
    """Return the plan in another type; it shares everything but the values, and is kept.

    Where its system does not take the type, the exact system, whose build it has, does.
    """
    with PLANNING:
        if dtype not in plan._casts:
            from sparsetile.plan.plan import Plan

            built, direction = plan._built, plan._direction
            if dtype not in SYSTEMS[plan.system].dtypes:
                built = direction.exact
                direction = Direction(plan._csr.indptr, built, built)
            made = Plan(
                plan._csr.with_values(plan._held.held), plan.n, dtype, built,
                plan._permutation, deterministic=plan.deterministic, report=plan._report,
                column_order=plan.column_order, direction=direction,
            )  # fmt: skip
            made._wider = weakref.ref(plan)
            plan._casts[dtype] = made
        return plan._casts[dtype]
