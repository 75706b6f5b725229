"""``Plan.linear``: Y = relu(alpha · X·Aᵀ + bias), a linear layer whose weight is A.

If the plan's system fuses it (``Runner.fuses_linear``), one kernel reads X and writes Y in place.
Otherwise, and if gradients are needed, it is a product, a transpose, and the rest in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetile.core.checks import real_number
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import FP8, result_dtype
from sparsetile.launch.epilogue import readable_bias
from sparsetile.plan.eager import general_product, operand_values
from sparsetile.plan.family import Family
from sparsetile.plan.modes import PLAIN_TYPES, any_autocast, plain_call, transforming
from sparsetile.plan.operands import check_bias, check_epilogue, check_fp8, wrong_type
from sparsetile.plan.traced import operators
from sparsetile.plan.traced.flat import flat_packed
from sparsetile.plan.variant import Variant

__all__ = ["linear"]


def _check(plan: Variant, X: Any, bias: Any) -> None:
    rows, cols = plan.shape
    if not isinstance(X, Tensor):
        raise type_error(
            "linear", "X", "a torch tensor", type(X).__name__, "Convert it with torch.as_tensor"
        )
    if X.dim() < 1 or X.shape[-1] != cols:
        raise value_error(
            "linear", "X", f"of shape [..., {cols}]", tuple(X.shape),
            f"A is {rows}x{cols}: X needs one feature per column of A",
        )  # fmt: skip
    if X.device != plan.device:
        raise value_error(
            "linear", "X", f"on {plan.device} like the plan", X.device,
            f"Move it with X.to({str(plan.device)!r}), or plan with A on X's device",
        )  # fmt: skip
    if X.layout is not torch.strided:
        raise type_error("linear", "X", "a dense tensor", X.layout, "Call X.to_dense()")
    if bias is not None:
        check_bias("linear", bias, rows, plan.device, "row of A")


def linear(
    family: Family, variant: Variant, X: Tensor, bias: Tensor | None, relu: bool, alpha: float,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """See :meth:`sparsetile.Plan.linear`."""
    if alpha == 1.0 and out_dtype is None and family.follow is None:
        Y = _bound(variant, X, bias, relu)
        if Y is not None:
            return Y
    _check(variant, X, bias)
    alpha = real_number("linear", "alpha", alpha)
    found = family.for_type(variant, X.dtype)
    if found is None:
        raise wrong_type(variant.dtype, X, "linear", "X")
    variant, X = found, X.to(found.dtype).resolve_neg()
    bias = None if bias is None else bias.resolve_neg()
    dtype = X.dtype
    tokens = X.reshape(X.shape[:-1].numel(), X.shape[-1])
    check_epilogue(tokens.mT, None, "sum", None, relu, out_dtype, "linear")
    values, packed = operand_values(family, variant, None)
    tracked = any(t is not None and t.requires_grad for t in (X, values, bias))
    needs_grad = torch.is_grad_enabled() and tracked
    if dtype is FP8:
        check_fp8("sum", needs_grad, "linear")
    fuses = variant.runner.fuses_linear and not transforming()
    if fuses and not needs_grad and forward_ad._current_level < 0:
        call = operators.linear if plain_call() else torch.ops.sparsetile.linear
        variant.note_stream()
        tensors, recipe = variant.flat
        given = flat_packed(packed)
        Y = call(tensors, values, given, tokens, bias, recipe, alpha, relu, out_dtype)
    else:
        out_dtype = out_dtype or result_dtype(dtype)
        Y = _in_steps(family, variant, tokens, bias, relu, alpha, out_dtype)
    return Y.reshape(*X.shape[:-1], variant.shape[0])


def _bound(variant: Variant, X: Tensor, bias: Tensor | None, relu: bool) -> Tensor | None:
    """Return the layer's result by what is bound to the variant; None if there is more to do."""
    bound = variant.bound_linear
    if (
        bound is None
        or type(X) not in PLAIN_TYPES
        or X.dtype is not variant.dtype
        or X.layout is not torch.strided
        or X.device != variant.device
        or X.is_neg()
        or not plain_call()
        or any_autocast()
        or type(relu) is not bool
    ):
        return None
    tracked = X.requires_grad
    if bias is not None:
        if type(bias) not in PLAIN_TYPES or bias.shape != variant.shape[:1]:
            return None
        if not readable_bias(bias) or bias.device != variant.device:
            return None
        tracked = tracked or bias.requires_grad
    if tracked and torch.is_grad_enabled():
        return None
    return bound(X, bias, relu)


def _in_steps(
    family: Family, variant: Variant, X: Tensor, bias: Tensor | None, relu: bool, alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """A product and torch's operations. Sums are rounded to 16 bits once, after the bias, as in one
    kernel."""
    wide = bias is not None and out_dtype.itemsize == 2
    asked = torch.float32 if wide else out_dtype
    Y = general_product(
        family, family.for_width(variant, X.mT), X.mT, None, alpha, 0.0, "sum", None,
        out_dtype=asked,
    ).mT  # fmt: skip
    if bias is not None:
        Y = Y + bias.to(Y.dtype)
    if relu:
        Y = torch.relu(Y)
    return Y.to(out_dtype).contiguous()
