"""``Plan.linear``: Y = relu(alpha · X·Aᵀ + bias), a linear layer whose weight is A.

Where the plan's system fuses it (``Runner.fuses_linear``) one kernel reads X and writes Y as they
lie. Elsewhere, and where gradients are needed, it is a product, a transpose, and the rest in torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetile.core.checks import real_number
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import FP8, result_dtype
from sparsetile.plan import operators
from sparsetile.plan.dispatch import plain_call
from sparsetile.plan.flat import flat_packed
from sparsetile.plan.operands import (
    Planned,
    check_bias,
    check_epilogue,
    check_fp8,
    in_plan_dtype,
)
from sparsetile.systems.base import Tensors

__all__ = ["linear"]


class LinearPlan(Planned, Protocol):
    """The part of a plan that a linear layer needs."""

    @property
    def fuses_linear(self) -> bool: ...

    @property
    def flat(self) -> tuple[list[Tensor], str]: ...

    def _note_stream(self) -> None: ...

    def operand_values(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensors | None]: ...

    def run(
        self, B: Tensor, *, alpha: float = ..., out_dtype: torch.dtype | None = ...
    ) -> Tensor: ...


def _check(plan: LinearPlan, X: Any, bias: Any) -> None:
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
    plan: LinearPlan,
    X: Tensor,
    bias: Tensor | None,
    relu: bool,
    alpha: float,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """See :meth:`sparsetile.Plan.linear`."""
    _check(plan, X, bias)
    alpha = real_number("linear", "alpha", alpha)
    X = in_plan_dtype(plan, X, "linear", "X").resolve_neg()
    bias = None if bias is None else bias.resolve_neg()
    dtype = X.dtype
    tokens = X.reshape(X.shape[:-1].numel(), X.shape[-1])
    check_epilogue(tokens.mT, None, "sum", None, relu, out_dtype, "linear")
    values, packed = plan.operand_values(dtype)
    tracked = any(t is not None and t.requires_grad for t in (X, values, bias))
    needs_grad = torch.is_grad_enabled() and tracked
    if dtype is FP8:
        check_fp8("sum", needs_grad, "linear")
    if plan.fuses_linear and not needs_grad and forward_ad._current_level < 0:
        call = operators.linear if plain_call() else torch.ops.sparsetile.linear
        plan._note_stream()
        tensors, recipe = plan.flat
        given = flat_packed(packed)
        Y = call(tensors, values, given, tokens, bias, recipe, alpha, relu, out_dtype)
    else:
        Y = _in_steps(plan, tokens, bias, relu, alpha, out_dtype or result_dtype(dtype))
    return Y.reshape(*X.shape[:-1], plan.shape[0])


def _in_steps(
    plan: LinearPlan,
    X: Tensor,
    bias: Tensor | None,
    relu: bool,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """The general way. Sums are rounded to 16 bits once, after the bias, as in one kernel."""
    wide = bias is not None and out_dtype.itemsize == 2
    Y = plan.run(X.mT, alpha=alpha, out_dtype=torch.float32 if wide else out_dtype).mT
    if bias is not None:
        Y = Y + bias.to(Y.dtype)
    if relu:
        Y = torch.relu(Y)
    return Y.to(out_dtype).contiguous()
