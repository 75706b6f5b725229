"""Products whose values come with the call, as one node of autograd's graph.

torch's operators carry tens of tensors through the dispatcher and flatten them again in Python: a
millisecond for a product and its gradients. Eager calls take this node, whose gradients are the
same functions. So do no batches, maxima or transforms. Gradients of gradients take the operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.launch.columns import epilogue_gradient, takes_epilogue_gradient
from sparsetile.plan.modes import PLAIN_TYPES, maybe_wrapped, plain_call
from sparsetile.plan.traced import gradients, operators
from sparsetile.plan.traced.flat import parsed

__all__ = ["before_epilogue", "takes_valued", "valued_product"]


def before_epilogue(C: Tensor | None, grad: Tensor, for_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient before ReLU (``C`` is its result; None: there was none) and bias, and
    the bias's: a sum over the rows in float32 at least, as a bias is often wider than C.

    On a GPU one kernel does both: torch's sum would need a buffer of up to twice the gradient.
    """
    again = torch.is_grad_enabled() and grad.requires_grad  # a gradient of the gradient is wanted
    if grad.is_neg():
        grad = grad.resolve_neg()
    if for_bias and not again and not maybe_wrapped(grad) and takes_epilogue_gradient(grad, C):
        return epilogue_gradient(grad, C)
    if C is not None:
        grad = gradients.relu_gradient(C, grad)
    if not for_bias:
        return grad, None
    return grad, grad.sum(0, dtype=torch.float32 if grad.dtype.itemsize == 2 else None)


class _Call(NamedTuple):
    tensors: list[Tensor]
    recipe: str
    reduce: str
    alpha: float
    relu: bool


class _Valued(torch.autograd.Function):
    """relu(alpha · A·B + bias) and its gradients for B, A's values and the bias."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, B: Tensor, values: Tensor, bias: Tensor | None, call: _Call
    ) -> Tensor:
        C = operators.spmm(
            call.tensors, values, [], B, bias, call.recipe, call.reduce, call.alpha, call.relu, None
        )
        ctx.call = call
        for_B, for_values = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            B if for_values else None, values if for_B else None, C if call.relu else None
        )
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors, recipe, reduce, alpha, _ = ctx.call
        B, values, C = ctx.saved_tensors
        for_B, for_values, for_bias, _ = ctx.needs_input_grad
        grad, d_bias = before_epilogue(C, grad, for_bias)
        if reduce == "mean":
            grad = gradients.mean_gradient(tensors[0], grad)
        d_B = d_values = None
        again = torch.is_grad_enabled()  # with create_graph=True torch has to see operators
        if for_values:
            product = torch.ops.sparsetile.sddmm if again else operators.sddmm
            d_values = product(tensors, grad, B, recipe, alpha)
        if for_B and again:
            d_B = gradients.gradient_product(tensors, values, grad, recipe, alpha)
        elif for_B:
            flat = parsed(recipe)
            turned = values.index_select(0, tensors[flat.size])
            d_B = operators.spmm(
                flat.mirror(tensors), turned, [], grad, None, flat.mirrored, "sum", alpha, False,
                None,
            )  # fmt: skip
        return d_B, d_values, d_bias, None


def takes_valued(B: Tensor, values: Tensor, bias: Tensor | None, reduce: str) -> bool:
    """Whether :func:`valued_product` computes a product: an eager one of plain matrices."""
    return (
        B.dim() == 2
        and reduce in ("sum", "mean")
        and type(B) in PLAIN_TYPES
        and type(values) in PLAIN_TYPES
        and (bias is None or type(bias) in PLAIN_TYPES)
        and plain_call()
        and not torch.jit.is_tracing()
        and not profiler._is_profiler_enabled  # it names operators
        and not (maybe_wrapped(B) or maybe_wrapped(values) or maybe_wrapped(bias))
        # Kernels read memory, where torch has not negated what it shows as negated.
        and not (B.is_neg() or values.is_neg() or (bias is not None and bias.is_neg()))
    )


def valued_product(
    flat: tuple[list[Tensor], str], values: Tensor, B: Tensor, bias: Tensor | None, reduce: str,
    alpha: float, relu: bool,
) -> Tensor:  # fmt: skip
    """Return relu(alpha · A·B + bias), differentiable; ``flat`` has the planned transpose."""
    tensors, recipe = flat
    call = _Call(tensors, recipe, reduce, alpha, relu)
    return _Valued.apply(B, values, bias, call)  # type: ignore[no-any-return]
