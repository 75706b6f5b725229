"""The general way of ``Plan.run``: any option, checked, through torch's operators.

What eager code calls nearly always does not come here; see ``Plan.run`` and ``gradients.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsetile.core.checks import real_number, reduce_name
from sparsetile.core.errors import value_error
from sparsetile.intake.csr import FP8
from sparsetile.plan import operators
from sparsetile.plan.derived import cast, lower_type
from sparsetile.plan.dispatch import transforming
from sparsetile.plan.flat import flat_packed
from sparsetile.plan.forward_mode import duals, product_of_duals, refuse_out
from sparsetile.plan.operands import (
    check_epilogue,
    check_fp8,
    check_operand,
    check_out,
    in_plan_dtype,
)
from sparsetile.plan.transforms import refuse_in_transform, transformed_product
from sparsetile.systems import SYSTEMS

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["general_product"]


def general_product(
    plan: Plan,
    B: Tensor,
    out: Tensor | None,
    alpha: float,
    beta: float,
    reduce: str,
    given: Tensor | None,
    bias: Tensor | None = None,
    relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See :meth:`sparsetile.Plan.run`; ``given`` are canonical values."""
    check_operand(plan, B)
    if SYSTEMS[plan.system].casts_to_exact and (lower := lower_type(plan, B)) is not None:
        if given is None and plan._held.follow is not None:
            given = plan._held.follow()
        return general_product(
            cast(plan, lower), B, out, alpha, beta, reduce, given, bias, relu, out_dtype
        )
    reduce = reduce_name("run", reduce)
    alpha, beta = real_number("run", "alpha", alpha), real_number("run", "beta", beta)
    B = in_plan_dtype(plan, B, "run", "B")
    values, named = plan.operand_values(B.dtype, given)
    plan._note_stream()
    packed = flat_packed(named)
    if beta != 0.0 and out is None:
        raise value_error("run", "beta", "0 when out is not given", beta, "Pass out=")
    check_epilogue(B, out, reduce, bias, relu, out_dtype)
    tracked = any(t is not None and t.requires_grad for t in (B, values, bias))
    needs_grad = torch.is_grad_enabled() and tracked
    if B.dtype is FP8:
        check_fp8(reduce, needs_grad)
    if transforming():
        if out is not None:
            raise refuse_in_transform("run", "out", "Omit out=")
        if B.dtype is not FP8:
            plan._prepare_gradients()
        return transformed_product(plan._flat, values, B, bias, reduce, alpha, relu, out_dtype)
    dual = duals(B, values, bias)
    if dual is not None:
        refuse_out(out)
    if out is not None:
        lead = B.shape[:-2]
        flat = B if len(lead) in (0, 1) else B.flatten(0, -3)
        check_out(plan.shape[0], B, out, reduce, needs_grad)
        apart = len(lead) > 1  # many batch dimensions cannot be seen as one in place
        target = out.flatten(0, -3).clone() if apart else out
        tensors, recipe = plan._flat
        torch.ops.sparsetile.spmm_out(
            tensors, values, packed, flat, target, recipe, reduce, alpha, beta
        )
        return out.copy_(target.reshape(out.shape)) if apart else out
    # A tracer reads the flat plan once, whether or not the first product needs a gradient.
    if needs_grad or (torch.is_grad_enabled() and torch.compiler.is_compiling()):
        plan._prepare_gradients()
        plan._note_stream()
    if dual is not None:
        return product_of_duals(plan._flat, dual, reduce, alpha, relu, out_dtype)
    return operators.product(
        plan._flat, values, packed, B, bias, reduce, alpha, relu, out_dtype, needs_grad
    )
