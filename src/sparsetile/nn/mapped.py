"""A product with the linear maps around it, as one node of autograd's graph.

    narrow     A·(x·Wᵀ) + b + t·Vᵀ      the map has fewer columns, and the sum commutes with it
    wide       (A·x)·Wᵀ + b + t·Vᵀ

On a small graph the host is slower than the GPU. torch's maps and a product of a plan are four to
six nodes, each with operations of its own; this one keeps what they keep, and runs one operation
after another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.hooks import is_plain_linear
from sparsetile.plan.eager import apply_of
from sparsetile.plan.modes import PLAIN_TYPES, maybe_wrapped, plain_call
from sparsetile.plan.pair import Reduction
from sparsetile.plan.valued import before_epilogue

__all__ = ["mapped_product", "scaled_product"]


# Bytes of a gradient up to which torch sums it for a bias: its host time is half of a launch of
# ours, whose sums need no buffer.
SUMMED_BY_TORCH = 2**23


class _Call(NamedTuple):
    pair: Reduction
    narrow: bool
    own: bool  # whether the second map is of x itself


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class _Mapped(torch.autograd.Function):
    """Arguments that are not tensors come as one tuple: autograd handles each argument."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, targets: Tensor | None, weight: Tensor, bias: Tensor | None,
        second: Tensor | None, call: _Call,
    ) -> Tensor:  # fmt: skip
        ctx.call = pair, narrow, own = call
        dtype = pair.dtype
        wide, W = _cast(x, dtype), _cast(weight, dtype)
        reduced = winners = None
        if narrow:
            out, _ = pair.product(functional.linear(wide, W), bias)
        else:
            reduced, winners = pair.product(wide)
            out = functional.linear(reduced, W, None if bias is None else _cast(bias, dtype))
        if second is not None:
            of = wide if own else _cast(targets, dtype)  # type: ignore[arg-type]
            out.addmm_(of, _cast(second, dtype).t())
        for_x, for_targets, for_weight, _, for_second, _ = ctx.needs_input_grad
        # A cast copy saves the gradient a second cast, unless autograd has to know what it is of.
        kept = x if for_x else wide
        again = for_x and for_weight  # gradients of a wide map's gradient reduce x again
        ctx.save_for_backward(
            kept if (narrow and for_weight) or (own and for_second) or again else None,
            targets if for_second and not own else None,
            weight if for_x else None,
            second if second is not None and (for_targets or (own and for_x)) else None,
            reduced if for_weight else None, winners if for_x else None,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        pair, narrow, own = ctx.call
        x, targets, weight, second, reduced, winners = ctx.saved_tensors
        for_x, for_targets, for_weight, for_bias, for_second, _ = ctx.needs_input_grad
        dtype = pair.dtype
        again = torch.is_grad_enabled()  # gradients of the gradient are wanted
        d_bias: Tensor | None
        if for_bias and grad.nbytes <= SUMMED_BY_TORCH and not grad.is_neg():
            d_bias = grad.sum(0, dtype=torch.float32 if grad.dtype.itemsize == 2 else None)
        else:
            grad, d_bias = before_epilogue(None, grad, for_bias)
        grad = _cast(grad, dtype)
        wide = None if x is None else _cast(x, dtype)
        d_x = d_targets = d_weight = d_second = None
        if second is not None:
            of_second = torch.mm(grad, _cast(second, dtype))
            d_x, d_targets = (of_second, None) if own else (None, of_second)
        if for_second:
            d_second = torch.mm(grad.t(), wide if own else _cast(targets, dtype))  # type: ignore[arg-type]
        if narrow and (for_x or for_weight):
            pulled = pair.gradient(grad, None)
            if for_weight:
                d_weight = torch.mm(pulled.t(), wide)  # type: ignore[arg-type]
            if for_x:
                W = _cast(weight, dtype)
                d_x = torch.mm(pulled, W) if d_x is None else torch.addmm(d_x, pulled, W)
        elif not narrow:
            if for_weight:
                if again and for_x:
                    reduced = pair.tracked(wide)
                d_weight = torch.mm(grad.t(), reduced)
            if for_x:
                of_product = pair.gradient(torch.mm(grad, _cast(weight, dtype)), winners)
                d_x = of_product if d_x is None else d_x.add_(of_product)
        return d_x, d_targets if for_targets else None, d_weight, d_bias, d_second, None


_apply_mapped = apply_of(_Mapped)


def _eager(graph: object) -> bool:
    """Whether a call is one that autograd alone watches, of a graph that has plans."""
    return (
        plain_call()
        and isinstance(graph, Graph)
        and graph.has_pairs
        and torch.is_grad_enabled()
        and not torch.jit.is_tracing()
    )


def _takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a node may stand for torch's own nodes with these operands: plain ones of one type,
    unless autocast brings them to one."""
    device, dtype, alike = x.device, x.dtype, True
    for each in (x, *others):
        if each is None:
            continue
        if (
            type(each) not in PLAIN_TYPES
            or each.layout is not torch.strided
            or each.is_neg()
            or maybe_wrapped(each)
            or each.device != device
        ):
            return False
        alike = alike and each.dtype is dtype
    if torch.is_autocast_enabled(device.type):
        return dtype is not torch.float64
    return alike


def mapped_product(
    graph: Any, reduce: str, name: Hashable, weights: Callable[[], Weights | None], x: Tensor,
    of_neighbours: nn.Module, targets: Tensor | None, of_targets: nn.Module | None,
    bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Return of_neighbours(reduced x) + of_targets(targets) + bias as one node; None if it cannot.

    ``bias`` is added last; a bias of ``of_neighbours`` is to be passed as it. For ``name`` and
    ``weights`` see :meth:`Graph.pair`.
    """
    if not _eager(graph) or x.dim() != 2 or not is_plain_linear(of_neighbours):
        return None
    weight: Tensor = of_neighbours.weight  # type: ignore[assignment]
    second: Tensor | None = None
    if targets is not None and of_targets is not None:
        if targets.dim() != 2 or not is_plain_linear(of_targets) or of_targets.bias is not None:
            return None
        second = of_targets.weight  # type: ignore[assignment]
    else:
        targets = None
    own = targets is x
    others = (None if own else targets, weight, bias, second)
    if not _takes(x, *others):
        return None
    if not (
        weight.requires_grad
        or x.requires_grad
        or any(each is not None and each.requires_grad for each in others)
    ):
        return None
    out, width = weight.shape
    if x.shape[1] != width or (bias is not None and bias.shape != (out,)):
        return None
    narrow = out <= width and reduce in ("sum", "mean")
    pulled = x.requires_grad or (narrow and weight.requires_grad)
    pair = graph.pair(out if narrow else width, x.dtype, reduce, name, weights, pulled)
    if pair is None or not out or not width or not x.shape[0]:
        return None
    call = _Call(pair, narrow, own)
    return _apply_mapped(x, *others, call)  # type: ignore[no-any-return]


class _Scaled(torch.autograd.Function):
    """A·x + factor · x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, pair: Reduction) -> Tensor:  # type: ignore[override]
        ctx.pair = pair
        ctx.save_for_backward(factor)
        out, _ = pair.product(x)
        return out.addcmul_(x, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (factor,) = ctx.saved_tensors
        return torch.addcmul(ctx.pair.gradient(grad, None), grad, factor), None, None


_apply_scaled = apply_of(_Scaled)


def scaled_product(
    graph: Any, name: Hashable, weights: Callable[[], Weights | None], x: Tensor, factor: Tensor
) -> Tensor | None:
    """Return the sums of x's neighbours plus factor · x as one node; None if it cannot.

    ``factor`` [1] has no gradient.
    """
    if not _eager(graph) or x.dim() != 2 or not x.numel():
        return None
    if torch.is_autocast_enabled(x.device.type) or factor.requires_grad:
        return None
    if not _takes(x, factor):
        return None
    pair = graph.pair(x.shape[1], x.dtype, "sum", name, weights, x.requires_grad)
    if pair is None:
        return None
    if x.requires_grad:
        return _apply_scaled(x, factor, pair)  # type: ignore[no-any-return]
    return pair.product(x)[0].addcmul_(x, factor)
