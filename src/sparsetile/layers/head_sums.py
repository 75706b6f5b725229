"""Sums and dot products by head of rows that belong to edges, whose heads share each row.

    head_sums    out[t, h] = sum over t's entries of weight[entry, h] * row of the entry
    head_dots    out[entry, h] = dot(left[t, h], row of the entry)

A row is that of the entry's source, [heads, width], or that of its edge, [width], the same for all
heads: ``edge_rows.cu`` and ``edge_scores.cu`` with ``shared``. Each is the other's gradient. That
of an edge's row is computed by torch for some entries at a time. All heads are one launch, and
nothing of entries × heads × width is stored.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetile.kernels.edge_attention import DOT
from sparsetile.launch.interface import Tensors
from sparsetile.layers.attention_operators import packed, widened
from sparsetile.layers.edge_attention import Entries, Mapped, launch_rows, launch_scores

__all__ = ["head_dots", "head_sums"]

_NONE = Mapped(None, None, None)
# Entries of a chunk: as many as targets, and no fewer than this.
LEAST_CHUNK = 2**14

# Entries, the edge of each (int32) if rows are those of edges, and heads.
_Call: TypeAlias = tuple[Entries, Tensor | None, int]


def _tensors(call: _Call, tensors: Tensors) -> Tensors:
    """Return the rows of A, with edges in place of columns."""
    return tensors if call[1] is None else {**tensors, "columns": call[1]}


def _sums(call: _Call, weight: Tensor, rows: Tensor) -> Tensor:
    entries, edges, heads = call
    runner, tensors = entries.forward()
    return launch_rows(
        runner, _tensors(call, tensors), None, weight, rows, rows, _NONE, DOT, 1.0, None,
        heads=heads, shared=edges is not None,
    )  # fmt: skip


def _dots(call: _Call, left: Tensor, rows: Tensor) -> Tensor:
    entries, edges, heads = call
    out = torch.empty((entries.rows.numel(), heads), dtype=torch.float32, device=left.device)
    launch_scores(entries, DOT, left, rows, _NONE, 1.0, out, heads, edges=edges)
    return out


def _of_rows(call: _Call, weight: Tensor, left: Tensor, rows: Tensor) -> Tensor:
    """Return what each row got: the sums of weight · left over heads, or over entries."""
    entries, edges, heads = call
    if edges is None:
        other, others, order = entries.backward()
        return launch_rows(
            other, others, order, weight, left, left, _NONE, DOT, 1.0, None, heads=heads
        )
    out, by_head = torch.zeros_like(rows), left.view(left.shape[0], heads, -1)
    step = max(LEAST_CHUNK, left.shape[0])
    for begin in range(0, entries.rows.numel(), step):
        chosen = slice(begin, begin + step)
        of_target = by_head.index_select(0, entries.rows[chosen])
        factors = weight[chosen].to(left.dtype).unsqueeze(1)
        out[edges[chosen].long()] = torch.bmm(factors, of_target).squeeze(1)
    return out


class _HeadSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, call: _Call) -> Tensor:  # type: ignore[override]
        ctx.call, weight, rows = call, widened(weight), packed(rows)
        ctx.save_for_backward(weight, rows)
        return _sums(call, weight, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weight, rows = ctx.saved_tensors
        grad = packed(grad.to(rows.dtype))
        for_weight, for_rows, _ = ctx.needs_input_grad
        d_rows = _of_rows(ctx.call, weight, grad, rows) if for_rows else None
        return _dots(ctx.call, grad, rows) if for_weight else None, d_rows, None


class _HeadDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, rows: Tensor, call: _Call) -> Tensor:  # type: ignore[override]
        ctx.call, left, rows = call, packed(left), packed(rows)
        ctx.save_for_backward(left, rows)
        return _dots(call, left, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        left, rows = ctx.saved_tensors
        weight = widened(grad)
        for_left, for_rows, _ = ctx.needs_input_grad
        d_rows = _of_rows(ctx.call, weight, left, rows) if for_rows else None
        return _sums(ctx.call, weight, rows) if for_left else None, d_rows, None


def head_sums(entries: Entries, weight: Tensor, rows: Tensor, edges: Tensor | None) -> Tensor:
    """Return the sums of rows weighted by [entries, heads] numbers, [targets, heads · width].

    ``rows`` are those of sources [sources, heads · width] or, if ``edges`` says which one each
    entry is, of edges [edges, width].
    """
    return _HeadSums.apply(weight, rows, (entries, edges, weight.shape[1]))  # type: ignore[no-any-return]


def head_dots(entries: Entries, left: Tensor, rows: Tensor, edges: Tensor, heads: int) -> Tensor:
    """Return the dot products of left [targets, heads · width] and edges' rows [edges, width].

    The result is [entries, heads] in float32. Both have one type.
    """
    return _HeadDots.apply(left, rows, (entries, edges, heads))  # type: ignore[no-any-return]
