"""Products with gradients outside torch's operators: what eager training calls.

An operator of ``operators.py`` sees tensors alone, so that torch can trace it; each call then
carries tens of tensors through the dispatcher, and its gradient gathers A's values again. A plan
that runs eagerly knows all of that already. Here autograd is handed the plan itself: the forward
product is the plan's bound one, its gradient that of ``plan.T``, whose values and packed copies are
kept until the plan's change, or of the plan itself where A is symmetric.

Only for a plan's own, fixed values. Trainable values, batches, tracing and transforms of
``torch.func`` take the operators. So do gradients of gradients. Under autocast a plan keeps itself
in autocast's type (``derived.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.core.checks import real_number
from sparsetile.core.streams import capturing, settle
from sparsetile.plan import operator_gradients, operators
from sparsetile.plan.derived import PLANNING, backward_plan
from sparsetile.plan.dispatch import lasting, outlived
from sparsetile.plan.flat import flat_packed
from sparsetile.systems.shared.columns import epilogue_gradient, takes_epilogue_gradient

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["apply_of", "differentiable_product", "plain_product"]

# Plan, its transpose, the version of its values; reduce, alpha, relu; the bias that another node
# differentiates, and whether one does.
_Call: TypeAlias = "tuple[Plan, Plan, int, str, float, bool, Tensor | None, bool]"
# From this size on ReLU and bias have a node of their own in autograd's graph, though one kernel
# computes them: it lets go of C and of C's gradient before the transposed product allocates. Below,
# a second node costs more time on the host than memory is worth.
_APART_BYTES = 2**23


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
    if bound is not None and type(alpha) is float:  # a tensor may require a gradient
        rows = B.is_contiguous() or B.stride(1) == 1  # the first is cheaper to ask
        if rows or not plan._runner.any_strides:
            B = B if rows else B.contiguous()
            if bias is None and not relu and alpha == 1.0 and reduce == "sum":
                return bound(B)
            return bound.fused(B, bias, alpha, reduce == "mean", relu)
    plan._note_stream()
    tensors, recipe = plan.flat
    return operators.spmm(
        tensors, plan._held.held, flat_packed(plan._held.packed), B, bias, recipe,
        reduce, real_number("run", "alpha", alpha), relu, None,
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """relu(alpha · A·B + bias) and its gradients for B and the bias.

    What is no tensor comes as one tuple: autograd handles each argument.
    """

    @staticmethod
    def forward(ctx: Any, B: Tensor, bias: Tensor | None, call: _Call) -> Tensor:  # type: ignore[override]
        plan, _, _, reduce, alpha, relu, added, apart = ctx.call = call
        C = plain_product(plan, B, added if apart else bias, reduce, alpha, relu)
        if apart:  # _Relu marks C as written to, which autograd refuses of a view of padded rows
            return C.data if C._is_view() else C
        if relu:
            ctx.save_for_backward(C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        plan, transposed, version, reduce, alpha, relu, _, apart = ctx.call
        for_B, for_bias, _ = ctx.needs_input_grad
        C = ctx.saved_tensors[0] if relu and not apart else None
        grad, d_bias = _before_epilogue(C, grad, for_bias)
        d_B = None
        if for_B:
            if version != plan._value_version:
                raise RuntimeError(
                    "run: A's values must stay as they are between a product and its gradient, "
                    "got new ones since. Call backward before update_values, or give values= to "
                    "each product."
                )
            if reduce == "mean":
                scale = _mean_scale(plan)
                plan._note_stream()
                grad = operator_gradients.scaled_rows(grad, scale)  # type: ignore[arg-type]
            d_B = _transposed_product(plan, transposed, grad, alpha)
        return d_B, d_bias, None


class _Relu(torch.autograd.Function):
    """The gradients of ReLU and bias for a C that already has both."""

    @staticmethod
    def forward(ctx: Any, C: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(C)
        ctx.save_for_backward(C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (C,) = ctx.saved_tensors
        for_C, for_bias = ctx.needs_input_grad
        grad, d_bias = _before_epilogue(C, grad, for_bias)
        return grad if for_C else None, d_bias


def _before_epilogue(
    C: Tensor | None, grad: Tensor, for_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient before ReLU (``C`` is what it gave; None: there was none) and bias, and
    the bias's: a sum over the rows in float32 at least, as a bias is often wider than C.

    On a GPU one kernel does both: torch's sum would need a buffer of up to twice the gradient.
    """
    again = torch.is_grad_enabled() and grad.requires_grad  # a gradient of the gradient is wanted
    if for_bias and not again and not outlived(grad) and takes_epilogue_gradient(grad, C):
        return epilogue_gradient(grad, C)
    if C is not None:
        grad = operator_gradients.relu_gradient(C, grad)
    if not for_bias:
        return grad, None
    return grad, grad.sum(0, dtype=torch.float32 if grad.dtype.itemsize == 2 else None)


def _mean_scale(plan: Plan, ahead: bool = False) -> Tensor | None:
    """Return 1 / entries of each row; ``ahead``, only keep it where that is possible."""
    return plan._scale if plan._scale is not None else _make_scale(plan, ahead)


@lasting
def _make_scale(plan: Plan, ahead: bool) -> Tensor | None:
    if capturing(plan.device):  # a graph's memory is filled by replays alone
        return None if ahead else operator_gradients.row_scale(plan._csr.indptr, plan.dtype)
    with PLANNING, torch.no_grad():
        if plan._scale is None:
            scale = operator_gradients.row_scale(plan._csr.indptr, plan.dtype)
            settle(plan.device)
            plan._scale = scale
        return plan._scale


def apply_of(function: Any) -> Any:
    """What Function.apply calls when nothing is left of a transform of torch.func, which it looks
    for in all arguments."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


_apply, _apply_relu = apply_of(_Product), apply_of(_Relu)


def _transposed_product(plan: Plan, transposed: Plan, grad: Tensor, alpha: float) -> Tensor:
    """Return alpha · Aᵀ·grad; differentiable where gradients of gradients are asked for."""
    if torch.is_grad_enabled() and grad.requires_grad:
        plan._prepare_gradients()
        plan._note_stream()
        tensors, recipe = plan.flat
        return operator_gradients.gradient_product(tensors, plan._held.held, grad, recipe, alpha)
    operators.refuse_tangents(grad)
    return plain_product(transposed, grad.resolve_neg(), None, "sum", alpha, False)


def differentiable_product(
    plan: Plan, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool
) -> Tensor:
    """Return relu(alpha · A·B + bias) of a matrix B, with gradients for B and the bias.

    The transpose is planned here, where a caller expects planning, and not in the backward pass.
    """
    if type(alpha) is not float:
        alpha = real_number("run", "alpha", alpha)
    transposed = plan._transposed or (plan if plan._mirrors else backward_plan(plan))
    if transposed is plan and not plan._mirror_captured:
        plan._mirror_captured = capturing(plan.device)
    if reduce == "mean":
        _mean_scale(plan, ahead=True)
    wraps = outlived(B) or (bias is not None and outlived(bias))
    apply = _Product.apply if wraps else _apply
    size = plan.shape[0] * B.shape[1] * B.element_size() if relu else 0
    if size < _APART_BYTES:
        call: _Call = (plan, transposed, plan._value_version, reduce, alpha, relu, None, False)
        return apply(B, bias, call)  # type: ignore[no-any-return]
    call = (plan, transposed, plan._value_version, reduce, alpha, relu, bias, True)
    C = apply(B, None, call)
    return (_Relu.apply if wraps else _apply_relu)(C, bias)  # type: ignore[no-any-return]
