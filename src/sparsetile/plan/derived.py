"""Plans that a plan makes of itself and keeps: its transpose, and itself in autocast's types.

They share A's pattern with it and have its values (``updates.py``). The transpose of a cast is a
cast of the transpose, so that one lock guards both.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsetile.intake.csr import FP8
from sparsetile.plan.dispatch import lasting
from sparsetile.plan.flat import Direction
from sparsetile.plan.widths import Widths
from sparsetile.reorder import Permutation, order_of_transpose
from sparsetile.systems import SYSTEMS, Request, candidates
from sparsetile.systems.registry import exact_system, unsupported

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["PLANNING", "cast", "for_eager", "lower_type", "planned_transpose"]

# Of all plans: two threads that need a transpose at once must share one.
PLANNING = threading.RLock()
# What autocast casts.
_CAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# -- the transpose ---------------------------------------------------------------------------------


def planned_transpose(plan: Plan) -> Plan:
    """Return the transpose, planned where it was not. The caller holds :data:`PLANNING`."""
    origin = plan._alive_origin()
    if origin is not None:  # two transposes of one another share their values
        if plan._order is None:
            plan._order = origin._entries_of_transpose()
        return origin
    if plan._transposed is not None:
        return plan._transposed
    wider = None if plan._wider is None else plan._wider()
    if wider is None:
        made = _build_transpose(plan)
    else:
        made = cast(wider._transpose(), plan.dtype)
        plan._order = wider._order
    made._origin = weakref.ref(plan)
    plan.__dict__["_transposed"] = made  # no submodule: it follows by itself
    return made


def _build_transpose(plan: Plan) -> Plan:
    from sparsetile.plan.plan import Plan

    plan._order = plan._csr.transpose_order()
    flipped = plan._csr.transposed(plan._order)
    request = Request(
        flipped, plan.n, plan.dtype, Permutation("identity", None), plan.deterministic
    )
    able, rejected = candidates(request)
    name = plan.system if plan.system in able else exact_system(plan.device.type).name
    if name not in able:
        raise unsupported("plan.T", rejected, f"the transpose of {plan.shape}")
    started = time.perf_counter()
    if SYSTEMS[name].ordered:
        order = order_of_transpose(plan._permutation, plan._csr, flipped)
        request = replace(request, permutation=order)
    built = SYSTEMS[name].build(request)
    made = Plan(
        flipped.with_values(plan._values_transposed()), plan.n, plan.dtype, built,
        request.permutation, deterministic=plan.deterministic,
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
    capturing = plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return taken and not plan._held.released and not capturing


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
