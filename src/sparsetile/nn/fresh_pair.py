"""A reduction over the edges of a fresh graph with its gradient, for nodes of autograd's graph."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.kernels.grouping import MEAN, SYMMETRIC
from sparsetile.launch.grouping import GroupedRows
from sparsetile.layers.grouped_rows import extremum, product, won
from sparsetile.plan.eager import apply_of

__all__ = ["FreshPair"]


class _Graph(Protocol):
    """What a pair needs of :class:`~sparsetile.nn.fresh.FreshGraph`."""

    by_target: GroupedRows

    @property
    def transposed(self) -> GroupedRows: ...

    def values(self, rows: GroupedRows, rule: int, dtype: torch.dtype) -> Tensor: ...

    def spend(self, n: int, dtype: torch.dtype, differentiable: bool) -> None: ...


class FreshPair:
    """A reduction over a fresh graph's edges and its gradient, as :class:`~plan.pair.Pair` is.

    ``symmetric``: entries count 1 over the square roots of the entries of both nodes' rows. Of a
    sum, entries may have ``weights`` instead, which have no gradient here.
    """

    def __init__(
        self, graph: _Graph, reduce: str, dtype: torch.dtype, symmetric: bool,
        differentiable: bool, weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.reduce, self.dtype = graph, reduce, dtype
        self._symmetric, self._differentiable = symmetric, differentiable
        self._weights = weights if weights is None or weights.dtype is dtype else weights.to(dtype)

    def _values(self, rows: GroupedRows, rule: int | None) -> Tensor | None:
        if self._weights is not None:
            turned = rows is not self.graph.by_target
            return self._weights.index_select(0, rows.order) if turned else self._weights
        return None if rule is None else self.graph.values(rows, rule, self.dtype)

    def product(self, B: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the reduction of B and, of maxima and minima, which have no bias, the winners."""
        rows = self.graph.by_target
        self.graph.spend(B.shape[1], B.dtype, self._differentiable)
        if self.reduce in ("max", "min"):
            return extremum(rows, B, self.reduce, self._differentiable)
        values = self._values(rows, SYMMETRIC if self._symmetric else None)
        return product(rows, values, B, mean=self.reduce == "mean", bias=bias), None

    def gradient(self, grad: Tensor, winners: Tensor | None) -> Tensor:
        """Return the gradient of B; differentiable if autograd records it."""
        if torch.is_grad_enabled() and grad.requires_grad:
            return _Gradient.apply(grad, winners, self)  # type: ignore[no-any-return]
        return self.plain_gradient(grad, winners)

    def plain_gradient(self, grad: Tensor, winners: Tensor | None) -> Tensor:
        """Return the gradient of B, not differentiable."""
        rows = self.graph.transposed
        if winners is not None:
            return won(rows, grad, winners)
        rule = SYMMETRIC if self._symmetric else MEAN if self.reduce == "mean" else None
        return product(rows, self._values(rows, rule), grad)

    def tracked(self, B: Tensor) -> Tensor:
        """Return the reduction as a node of its own, which autograd differentiates again."""
        return _apply_reduced(B, self)  # type: ignore[no-any-return]

    def won_by(self, operand: Tensor, winners: Tensor) -> Tensor:
        """Return the elements of a matrix like B at the winners' places; 0 for empty rows."""
        rows = self.graph.by_target
        first = rows.wide_part("indptr", rows.shape[0]).unsqueeze(1)
        entries = (first + winners).clamp(min=0, max=rows.entries - 1)
        columns = rows.part("columns", rows.entries)[entries].long()
        return torch.where(winners < 0, 0, operand.gather(0, columns))


class _Reduced(torch.autograd.Function):
    """The product of a pair."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, pair: FreshPair) -> Tensor:  # type: ignore[override]
        ctx.pair = pair
        out, winners = pair.product(B)
        ctx.save_for_backward(winners)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (winners,) = ctx.saved_tensors
        return ctx.pair.gradient(grad, winners), None


class _Gradient(torch.autograd.Function):
    """The gradient of a pair, which is linear: its own is the product again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, grad: Tensor, winners: Tensor | None, pair: FreshPair
    ) -> Tensor:
        ctx.pair = pair
        ctx.save_for_backward(winners)
        return pair.plain_gradient(grad, winners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (winners,) = ctx.saved_tensors
        if winners is not None:
            return ctx.pair.won_by(grad, winners), None, None
        return ctx.pair.tracked(grad), None, None


_apply_reduced = apply_of(_Reduced)
