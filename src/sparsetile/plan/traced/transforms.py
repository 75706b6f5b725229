"""Products inside of torch.func: vmap, grad, jacrev, jacfwd, hessian and what is made of them.

The operators of ``operators.py`` have no rules for these transforms. Here each is a function that
torch can batch and differentiate in both modes, any number of times: a product is linear in B, in
A's values and in the bias, and so are its derivatives, which are products again.

A batch of B is one launch. A batch of values or biases is a product for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.plan.traced.flat import parsed
from sparsetile.plan.traced.gradients import mean_gradient, relu_gradient, winning_entries

__all__ = ["each_of_batch", "refuse_in_transform", "transformed_product"]


def refuse_in_transform(function: str, argument: str, remedy: str) -> ValueError:
    """Build the error of an argument that is changed in place, which transforms do not see."""
    return value_error(
        function, argument, "omitted inside of torch.func's transforms", "a tensor", remedy
    )


class _Frozen:
    """A flat plan as one object, so that transforms leave its tensors alone."""

    def __init__(self, tensors: list[Tensor], recipe: str) -> None:
        self.tensors, self.recipe = tensors, recipe
        self.parsed = parsed(recipe)

    def transposed(self) -> _Frozen:
        return _Frozen(self.parsed.mirror(self.tensors), self.parsed.mirrored)

    @property
    def order(self) -> Tensor:
        """Brings values from A's order to that of its transpose."""
        return self.parsed.entry_order(self.tensors)

    @property
    def columns(self) -> Tensor:
        return self.parsed.exact_tensors(self.tensors)["columns"]


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor with one batch dimension at most."""
    return tensor.flatten(0, -3) if tensor.dim() > 3 else tensor


def each_of_batch(
    function: Callable[..., Tensor],
    count: int,
    in_dims: Sequence[int | None],
    operands: Sequence[Any],
) -> Tensor:
    """Call the function for each element of a batch and stack the results."""
    results = [
        function(
            *(
                each if dim is None else each.select(dim, index)
                for each, dim in zip(operands, in_dims, strict=True)
            )
        )
        for index in range(count)
    ]
    if results:
        return torch.stack(results)
    # No element: one of zeros says what shape and type a result would have.
    empty = [
        each if dim is None else torch.zeros_like(each.new_empty(_without(each.shape, dim)))
        for each, dim in zip(operands, in_dims, strict=True)
    ]
    return function(*empty).new_empty((0, *function(*empty).shape))


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [size for number, size in enumerate(shape) if number != dim % len(shape)]


class _Product(torch.autograd.Function):
    """relu(alpha · A·B + bias), sum or mean."""

    @staticmethod
    def forward(  # type: ignore[override]
        values: Tensor | None,
        B: Tensor,
        bias: Tensor | None,
        plan: _Frozen,
        reduce: str,
        alpha: float,
        relu: bool,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        C = torch.ops.sparsetile.spmm(
            plan.tensors, values, [], _flat(B), bias, plan.recipe, reduce, alpha, relu, out_dtype
        )
        return C.reshape(*B.shape[:-2], *C.shape[-2:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, B, _, ctx.plan, ctx.reduce, ctx.alpha, ctx.relu, ctx.out_dtype = inputs
        kept = (values, B, output if ctx.relu else None)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        values, B, C = ctx.saved_tensors
        plan: _Frozen = ctx.plan
        if ctx.relu:
            grad = relu_gradient(C, grad)
        d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad = grad.to(B.dtype)
        if ctx.reduce == "mean":
            grad = mean_gradient(plan.tensors[0], grad)
        d_values = d_B = None
        if ctx.needs_input_grad[0]:
            d_values = _entries(grad, B, plan, ctx.alpha)
        if ctx.needs_input_grad[1]:
            there = None if values is None else values[plan.order]
            d_B = _product(there, grad, None, plan.transposed(), "sum", ctx.alpha, False, None)
        return d_values, d_B, d_bias, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:  # type: ignore[override]
        d_values, d_B, d_bias = tangents[:3]
        values, B, C = ctx.saved_tensors
        dtype = ctx.out_dtype or B.dtype
        wide = torch.float32 if dtype.itemsize == 2 else dtype  # rounded once, after adding up
        parts = []
        if d_B is not None:
            parts.append((values, d_B))
        if d_values is not None:
            parts.append((d_values, B))
        sums = [
            _product(weights, dense, None, ctx.plan, ctx.reduce, ctx.alpha, False, wide)
            for weights, dense in parts
        ]
        shape = (*B.shape[:-2], ctx.plan.parsed.rows, B.shape[-1])
        total = sums[0] if sums else B.new_zeros(shape, dtype=wide)
        total = total + sums[1] if len(sums) > 1 else total
        if d_bias is not None:
            total = total + d_bias.to(wide)
        if ctx.relu:
            total = relu_gradient(C, total)
        return total.to(dtype)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple[Any, ...], *operands: Any
    ) -> tuple[Tensor, int]:
        values_dim, dense_dim, bias_dim = in_dims[:3]
        if values_dim is None and bias_dim is None:
            values, B, *rest = operands
            return _product(values, B.movedim(dense_dim, 0), *rest), 0
        return each_of_batch(_product, info.batch_size, in_dims, operands), 0


class _Entries(torch.autograd.Function):
    """alpha · dot(G[row], B[column]) per entry of A, summed over the batch dimensions of G, B."""

    @staticmethod
    def forward(G: Tensor, B: Tensor, plan: _Frozen, alpha: float) -> Tensor:  # type: ignore[override]
        return torch.ops.sparsetile.sddmm(plan.tensors, _flat(G), _flat(B), plan.recipe, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        G, B, ctx.plan, ctx.alpha = inputs
        ctx.save_for_backward(G, B)
        ctx.save_for_forward(G, B)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        G, B = ctx.saved_tensors
        plan: _Frozen = ctx.plan
        d_G = d_B = None
        if ctx.needs_input_grad[0]:
            d_G = _product(grad, B, None, plan, "sum", ctx.alpha, False, None)
        if ctx.needs_input_grad[1]:
            there = grad[plan.order]
            d_B = _product(there, G, None, plan.transposed(), "sum", ctx.alpha, False, None)
        return d_G, d_B, None, None

    @staticmethod
    def jvp(ctx: Any, d_G: Tensor | None, d_B: Tensor | None, *_: Any) -> Tensor:  # type: ignore[override]
        G, B = ctx.saved_tensors
        parts = [
            _entries(g, b, ctx.plan, ctx.alpha)
            for g, b in ((d_G, B), (G, d_B))
            if g is not None and b is not None
        ]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        return each_of_batch(_entries, info.batch_size, in_dims, operands), 0


class _Winners(torch.autograd.Function):
    """The winner's place in its row of each element of a max or min. Not differentiable."""

    @staticmethod
    def forward(values: Tensor | None, B: Tensor, plan: _Frozen, reduce: str) -> Tensor:  # type: ignore[override]
        _, args = torch.ops.sparsetile.spmm_extremum(
            plan.tensors, values, _flat(B), plan.recipe, reduce, True
        )
        return args.reshape(*B.shape[:-2], *args.shape[-2:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:  # type: ignore[override]
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        if in_dims[0] is None:
            values, B, plan, reduce = operands
            return _winners(values, B.movedim(in_dims[1], 0), plan, reduce), 0
        return each_of_batch(_winners, info.batch_size, in_dims, operands), 0


def _product(*operands: Any) -> Tensor:
    return _Product.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]


def _entries(*operands: Any) -> Tensor:
    return _Entries.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]


def _winners(*operands: Any) -> Tensor:
    return _Winners.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]


def _extremum(values: Tensor | None, B: Tensor, plan: _Frozen, reduce: str, alpha: float) -> Tensor:
    """Max or min: which entry wins is found by the kernel, the rest are torch's own functions."""
    dtype = B.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    args = _winners(values, B, plan, reduce)
    nothing = torch.zeros(args.shape, dtype=wide, device=B.device)
    columns = plan.columns.to(torch.int64)
    if columns.numel() == 0:
        return nothing.to(dtype) + 0 * B.sum()
    entry = winning_entries(plan.tensors[0], args)
    # Indexed as one vector: the gradient of that is added up in a fixed order.
    (rows, width), count = B.shape[-2:], B.shape[:-2].numel()
    batch = torch.arange(count, device=B.device).reshape(*B.shape[:-2], 1, 1)
    place = (batch * rows + columns[entry]) * width + torch.arange(width, device=B.device)
    C = B.to(wide).reshape(-1)[place]
    if values is not None:
        C = C * values.to(wide)[entry]
    return (torch.where(args < 0, nothing, C) * alpha).to(dtype)


def transformed_product(
    flat: tuple[list[Tensor], str], values: Tensor | None, B: Tensor, bias: Tensor | None,
    reduce: str, alpha: float, relu: bool, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Multiply inside of a transform; ``flat`` holds the transpose, too."""
    plan = _Frozen(*flat)
    if reduce in ("max", "min"):
        return _extremum(values, B, plan, reduce, alpha)
    return _product(values, B, bias, plan, reduce, alpha, relu, out_dtype)
