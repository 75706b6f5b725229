"""Collectives of tensor parallelism in pairs: each is the other's gradient.

    copied     the same x on every rank -> itself; gradients are summed over the ranks
    reduced    parts of a sum -> the sum on every rank; the gradient is every rank's own
    gathered   features of every rank -> all of them; a rank takes its own part of the gradient
    split      all features -> a rank's own; gradients are gathered

A sum has the order of additions of the group's backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.dist.group import Ranks

__all__ = ["copied", "gathered", "nothing", "reduced", "split"]


def _gather(x: Tensor, ranks: Ranks, bounds: tuple[int, ...], function: str) -> Tensor:
    """Features of every rank; shares are padded to the widest for the exchange."""
    widths = [bounds[part + 1] - bounds[part] for part in range(ranks.size)]
    lead, most = x.shape[:-1], max(widths)
    mine = x.new_zeros((*lead, most))
    mine[..., : x.shape[-1]] = x.detach()
    found = x.new_empty((ranks.size, *lead, most))
    ranks.start_all_gather(found, mine, function).wait()
    return torch.cat([found[part, ..., :width] for part, width in enumerate(widths)], -1)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Reduced.apply(grad, ctx.ranks, "backward"), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, function: str) -> Tensor:
        ctx.ranks = ranks
        summed = x.detach().clone(memory_format=torch.contiguous_format)
        ranks.all_reduce(summed, function)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Copied.apply(grad, ctx.ranks), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, bounds: tuple[int, ...], function: str
    ) -> Tensor:
        ctx.ranks, ctx.bounds = ranks, bounds
        return _gather(x, ranks, bounds, function)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _Split.apply(grad, ctx.ranks, ctx.bounds), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, bounds: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.bounds = ranks, bounds
        return x[..., bounds[ranks.rank] : bounds[ranks.rank + 1]].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Gathered.apply(grad, ctx.ranks, ctx.bounds, "backward"), None, None


class _Nothing(torch.autograd.Function):
    """Zeros that depend on tensors. So do their gradients, for gradients of any order."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *given: Tensor) -> Tensor:
        ctx.given = [(tensor.shape, tensor.dtype) for tensor in given]
        return given[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = zip(ctx.given, ctx.needs_input_grad[2:], strict=True)
        found = (_Nothing.apply(*like, grad) if needs else None for like, needs in needed)
        return None, None, *found


# With one rank there is nothing to exchange: the functions below return x itself.


def copied(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x, whose gradient is the sum of every rank's."""
    if ranks.size == 1:
        return x
    return _Copied.apply(x, ranks)


def reduced(x: Tensor, ranks: Ranks, function: str) -> Tensor:
    """Return the sum of every rank's x."""
    if ranks.size == 1:
        return x
    return _Reduced.apply(x, ranks, function)


def gathered(x: Tensor, ranks: Ranks, bounds: tuple[int, ...], function: str) -> Tensor:
    """Return the features of all ranks, [..., bounds[-1]]."""
    if ranks.size == 1:
        return x
    return _Gathered.apply(x, ranks, bounds, function)


def split(x: Tensor, ranks: Ranks, bounds: tuple[int, ...]) -> Tensor:
    """Return this rank's features of x."""
    if ranks.size == 1:
        return x
    return _Split.apply(x, ranks, bounds)


def nothing(x: Tensor, weight: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [..., features] for x: a product without any block.

    They depend on x and on the empty weight, so the result requires grad on every rank, and a rank
    without blocks takes part in the backward pass.
    """
    return _Nothing.apply((*x.shape[:-1], features), dtype, x, weight)
