"""Products with gradients outside torch's operators: what eager training calls.

An operator of ``operators.py`` sees tensors alone, so that torch can trace it; each call then
carries tens of tensors through the dispatcher, and its gradient gathers A's values again. A plan
that runs eagerly knows all of that already. Here autograd is handed the plan itself: the forward
product is the plan's bound one, its gradient that of ``plan.T``, whose values and packed copies are
kept until the plan's change.

Only for a plan's own, fixed values. Trainable values, batches, autocast, tracing and transforms of
``torch.func`` take the operators. So do gradients of gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.core.checks import real_number
from sparsetile.plan import operators

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["differentiable_product", "plain_product"]


def plain_product(
    plan: Plan, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool
) -> Tensor:
    """Return relu(alpha · A·B + bias) of a matrix B, without gradients."""
    if profiler._is_profiler_enabled:  # no operator is called that torch would name
        with profiler.record_function("sparsetile::spmm"):
            return _product(plan, B, bias, reduce, alpha, relu)
    return _product(plan, B, bias, reduce, alpha, relu)


def _product(
    plan: Plan, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool
) -> Tensor:
    bound = plan._bound
    if (
        bound is not None
        and bias is None
        and not relu
        and type(alpha) is float  # a tensor may require a gradient
        and alpha == 1.0
        and reduce == "sum"
        and (B.is_contiguous() or B.stride(1) == 1)  # the first is cheaper to ask
    ):
        return bound(B)
    tensors, recipe = plan.flat
    return operators.spmm(
        tensors, plan._held.held, operators.flat_packed(plan._held.packed), B, bias, recipe,
        reduce, real_number("run", "alpha", alpha), relu, None,
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """relu(alpha · A·B + bias) and its gradients for B and the bias."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        B: Tensor,
        bias: Tensor | None,
        plan: Plan,
        transposed: Plan,
        reduce: str,
        alpha: float,
        relu: bool,
    ) -> Tensor:
        C = plain_product(plan, B, bias, reduce, alpha, relu)
        ctx.plan, ctx.transposed = plan, transposed
        ctx.reduce, ctx.alpha, ctx.relu = reduce, alpha, relu
        ctx.version = plan._value_version
        if relu:
            ctx.save_for_backward(C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        plan: Plan = ctx.plan
        if ctx.relu:
            (C,) = ctx.saved_tensors
            grad = operators.relu_gradient(C, grad)
        d_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        d_B = None
        if ctx.needs_input_grad[0]:
            if ctx.version != plan._value_version:
                raise RuntimeError(
                    "run: A's values must stay as they are between a product and its gradient, "
                    "got new ones since. Call backward before update_values, or give values= to "
                    "each product."
                )
            if ctx.reduce == "mean":
                grad = operators.mean_gradient(plan.flat[0][0], grad)
            d_B = _transposed_product(plan, ctx.transposed, grad, ctx.alpha)
        return d_B, d_bias, None, None, None, None, None


def _transposed_product(plan: Plan, transposed: Plan, grad: Tensor, alpha: float) -> Tensor:
    """Return alpha · Aᵀ·grad; differentiable where gradients of gradients are asked for."""
    if torch.is_grad_enabled() and grad.requires_grad:
        plan._prepare_gradients()
        tensors, recipe = plan.flat
        return operators.gradient_product(tensors, plan._held.held, grad, recipe, alpha)
    return plain_product(transposed, grad.resolve_neg(), None, "sum", alpha, False)


def differentiable_product(
    plan: Plan, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool
) -> Tensor:
    """Return relu(alpha · A·B + bias) of a matrix B, with gradients for B and the bias.

    The transpose is planned here, where a caller expects planning, and not in the backward pass.
    """
    alpha = real_number("run", "alpha", alpha)
    return _Product.apply(B, bias, plan, plan.T, reduce, alpha, relu)  # type: ignore[no-untyped-call]
