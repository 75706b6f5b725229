"""The gradients of ``operators.py``, which are calls of the same operators.

Operators are called by their names in torch, so that it can differentiate a gradient again. They
are registered beside the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.plan.traced.flat import FlatPlan, parsed

__all__ = [
    "extremum_backward", "extremum_context", "gradient_product", "mean_gradient", "need_transpose",
    "relu_gradient", "row_scale", "scaled_rows", "sddmm_backward", "sddmm_context",
    "spmm_backward", "spmm_context", "winning_entries", "won_backward", "won_context",
]  # fmt: skip


def need_transpose(flat: FlatPlan) -> None:
    """Raise unless the transpose was planned."""
    if not flat.differentiable:
        raise RuntimeError(
            "spmm: tensors must hold the planned transpose to compute gradients, got the forward "
            "half only. Call plan.run, which plans the transpose when gradients are needed."
        )


def relu_gradient(C: Tensor, grad: Tensor) -> Tensor:
    """As torch.relu has it: what is NaN passes its gradient on."""
    return torch.ops.aten.threshold_backward(grad, C, 0)


def row_scale(indptr: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / entries of each row, [M, 1]; in float32, as a length may exceed float16."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    lengths = torch.clamp(indptr[1:] - indptr[:-1], min=1)
    return lengths.to(wide).reciprocal().unsqueeze(-1)


def scaled_rows(grad: Tensor, scale: Tensor) -> Tensor:
    """Multiply in the scale's type and round once."""
    return (grad * scale).to(grad.dtype)


def mean_gradient(indptr: Tensor, grad: Tensor) -> Tensor:
    """Divide each row by its entries."""
    return scaled_rows(grad, row_scale(indptr, grad.dtype))


def reordered(values: Tensor | None, flat: FlatPlan, tensors: Sequence[Tensor]) -> Tensor | None:
    return None if values is None else values[flat.entry_order(tensors)]


def gradient_product(
    tensors: Sequence[Tensor], values: Tensor | None, grad: Tensor, recipe: str, alpha: float
) -> Tensor:
    """Return alpha · Aᵀ·grad through the operator, which torch can differentiate again."""
    flat = parsed(recipe)
    need_transpose(flat)
    return torch.ops.sparsetile.spmm(
        flat.mirror(tensors), reordered(values, flat, tensors), [], grad, None,
        flat.mirrored, "sum", alpha, False, None,
    )  # fmt: skip


def spmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what :func:`spmm_backward` reads."""
    tensors, values, packed, B, _, ctx.recipe, ctx.reduce, ctx.alpha, ctx.relu, _ = inputs
    ctx.weighted, ctx.packed = values is not None, len(packed)
    ctx.count = len(tensors)
    kept = [*([values] if ctx.weighted else []), *([output] if ctx.relu else [])]
    ctx.save_for_backward(*tensors, B, *kept)


def spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of ``spmm`` for A's values, B and the bias."""
    saved = ctx.saved_tensors
    tensors, B = list(saved[: ctx.count]), saved[ctx.count]
    values = saved[ctx.count + 1] if ctx.weighted else None
    flat = parsed(ctx.recipe)
    need_transpose(flat)
    if ctx.relu:
        grad = relu_gradient(saved[-1], grad)
    d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
    grad = grad.to(B.dtype)
    if ctx.reduce == "mean":
        grad = mean_gradient(tensors[0], grad)
    d_values = d_B = None
    if ctx.needs_input_grad[1]:
        d_values = torch.ops.sparsetile.sddmm(tensors, grad, B, ctx.recipe, ctx.alpha)
    if ctx.needs_input_grad[3]:
        d_B = gradient_product(tensors, values, grad, ctx.recipe, ctx.alpha)
    lists = [None] * ctx.count, [None] * ctx.packed
    return lists[0], d_values, lists[1], d_B, d_bias, None, None, None, None, None


def sddmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what :func:`sddmm_backward` reads."""
    tensors, G, B, ctx.recipe, ctx.alpha = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, G, B)


def sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradients of ``sddmm`` for G and B."""
    *tensors, G, B = ctx.saved_tensors
    flat = parsed(ctx.recipe)
    need_transpose(flat)
    d_G = d_B = None
    if ctx.needs_input_grad[1]:
        d_G = torch.ops.sparsetile.spmm(
            tensors, grad, [], B, None, ctx.recipe, "sum", ctx.alpha, False, None
        )
    if ctx.needs_input_grad[2]:
        t_grad = grad[flat.entry_order(tensors)]
        d_B = torch.ops.sparsetile.spmm(
            flat.mirror(tensors), t_grad, [], G, None, flat.mirrored, "sum", ctx.alpha, False, None
        )
    return [None] * ctx.count, d_G, d_B, None, None


def extremum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what :func:`extremum_backward` reads."""
    tensors, values, B, ctx.recipe, _, ctx.winners = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.count, ctx.weighted = len(tensors), values is not None
    ctx.save_for_backward(*tensors, output[1], B, *([values] if ctx.weighted else []))


def winning_entries(indptr: Tensor, args: Tensor) -> Tensor:
    """Return the entry of A at each place in its row, [..., M, N]; the first where it is -1."""
    return torch.where(args < 0, 0, indptr[:-1].unsqueeze(-1) + args)


def _add_at(size: int, index: Tensor, source: Tensor) -> Tensor:
    """Return zeros with ``source`` added at ``index``, in a fixed order: torch sorts."""
    wide = torch.float32 if source.dtype.itemsize == 2 else source.dtype
    zeros = torch.zeros(size, dtype=wide, device=source.device)
    total = zeros.index_put((index.reshape(-1),), source.to(wide).reshape(-1), accumulate=True)
    return total.to(source.dtype)


def extremum_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    """The gradients of ``spmm_extremum`` for A's values and B."""
    saved = ctx.saved_tensors
    tensors, (args, B, *rest) = list(saved[: ctx.count]), saved[ctx.count :]
    values = rest[0] if ctx.weighted else None
    if not ctx.winners:
        raise RuntimeError(
            "spmm_extremum: winners must be True to compute gradients, got False. Call plan.run, "
            "which asks for them when gradients are needed."
        )
    d_values = d_B = None
    if ctx.needs_input_grad[2]:
        d_B = torch.ops.sparsetile.spmm_won(tensors, values, grad, args, ctx.recipe)
    if values is not None and ctx.needs_input_grad[1]:
        d_values = _sums_of_winners(tensors, args, grad, B, ctx.recipe)
    return [None] * ctx.count, d_values, d_B, None, None, None


def won_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what :func:`won_backward` reads."""
    tensors, values, grad, args, ctx.recipe = inputs
    ctx.count, ctx.weighted = len(tensors), values is not None
    ctx.save_for_backward(*tensors, args, grad, *([values] if ctx.weighted else []))


def won_backward(ctx: Any, H: Tensor) -> tuple[Any, ...]:
    """The gradients of ``spmm_won`` for A's values and the gradient that it takes."""
    saved = ctx.saved_tensors
    tensors, (args, grad, *rest) = list(saved[: ctx.count]), saved[ctx.count :]
    values = rest[0] if ctx.weighted else None
    d_values = d_grad = None
    if ctx.needs_input_grad[2]:
        weights, moved, _ = _of_winners(tensors, args, H, values, ctx.recipe)
        d_grad = moved if weights is None else moved * weights
    if values is not None and ctx.needs_input_grad[1]:
        d_values = _sums_of_winners(tensors, args, grad, H, ctx.recipe)
    return [None] * ctx.count, d_values, d_grad, None, None


def _of_winners(
    tensors: Sequence[Tensor], args: Tensor, B: Tensor, values: Tensor | None, recipe: str
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the weight and the element of B that each element of C has won, 0 in empty rows, and
    the entry."""
    columns = parsed(recipe).exact_tensors(tensors)["columns"]
    empty, entry = args < 0, winning_entries(tensors[0], args)
    nothing = torch.zeros(args.shape, dtype=B.dtype, device=B.device)
    if columns.numel() == 0:
        return None, nothing, entry
    moved = torch.gather(B, -2, columns.to(torch.int64)[entry])
    weights = None if values is None else torch.where(empty, nothing, values[entry])
    return weights, torch.where(empty, nothing, moved), entry


def _sums_of_winners(
    tensors: Sequence[Tensor], args: Tensor, grad: Tensor, B: Tensor, recipe: str
) -> Tensor:
    """Return the sum of grad · B over the elements that each entry of A won."""
    if parsed(recipe).nnz == 0:
        return grad.new_empty(0)
    _, moved, entry = _of_winners(tensors, args, B, None, recipe)
    # An empty row has no winner: neither its gradient nor the entry it points at may count.
    products = torch.where(args < 0, torch.zeros_like(grad), grad) * moved
    return _add_at(parsed(recipe).nnz, entry, products)
