"""Graph attention as layers call it: weighted sums of messages, the scores' terms, a whole layer.

When torch traces, it sees the operators of ``attention_operators.py``. Otherwise the same functions
are called without torch's dispatcher, which would take longer than the launches because an operator
has tens of tensors. A layer whose targets are its sources is then one autograd node, so that no
gradients of the messages' size have to be added. In other cases the scores' terms are a node of
their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.layers.attention_operators import (
    attend,
    attend_gradients,
    bias_gradient,
    exact_rows,
    packed,
    transposed_rows,
    widened,
    widened_or_none,
)
from sparsetile.layers.gat import GAT_DTYPES
from sparsetile.layers.gat import node_scores as launch_scores
from sparsetile.layers.gat_layer import (
    Layer,
    attend_layer,
    attend_layer_backward,
    kept_parts,
)
from sparsetile.plan.modes import plain_call
from sparsetile.plan.traced.flat import FlatPlan, parsed
from sparsetile.plan.traced.operators import refuse_tangents

__all__ = ["ATTENTION_DTYPES", "attention_layer", "graph_attention", "node_scores"]

# Types of messages.
ATTENTION_DTYPES = GAT_DTYPES

# tensors, recipe, counts, scales, slope
_Call = tuple[list[Tensor], str, Tensor | None, Tensor | None, float]


class _Attend(torch.autograd.Function):
    """The operator and its gradient, for eager calls."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        messages: Tensor,
        of_source: Tensor,
        of_target: Tensor | None,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        tensors, recipe, counts, scales, slope = ctx.call = call
        keep = any(ctx.needs_input_grad[:3])
        output = attend(
            tensors, messages, of_source, of_target, counts, scales, bias, recipe, slope, keep
        )
        ctx.save_for_backward(messages, of_source, *output[1:])
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors, recipe, counts, scales, slope = ctx.call
        wanted, for_bias = ctx.needs_input_grad[:3], ctx.needs_input_grad[3]
        found = attend_gradients(
            tensors, grad, ctx.saved_tensors, counts, scales, recipe, slope, wanted
        )
        return *found, bias_gradient(grad) if for_bias else None, None


def graph_attention(
    flat: tuple[list[Tensor], str],
    messages: Tensor,
    of_source: Tensor,
    of_target: Tensor | None,
    counts: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    slope: float,
) -> Tensor:
    """Return the messages [sources, heads, width] weighted by attention, [targets, heads · width].

    Parameters
    ----------
    flat
        Of a plan of A[target, source], with its transpose if gradients are needed.
    of_source, of_target : Tensor [nodes, heads]
        The two terms of the scores, differentiable; no targets' term when None.
    counts : Tensor [entries], optional
        Parallel edges that each entry of A stands for.
    scales : Tensor [entries, heads], optional
        Sums of dropout's factors over the edges of each entry.
    """
    tensors, recipe = flat
    messages, of_source = messages.flatten(1), of_source.float()
    of_target = None if of_target is None else of_target.float()
    operands = (messages, of_source, of_target)
    differentiated = torch.is_grad_enabled()
    keep = differentiated and any(t is not None and t.requires_grad for t in operands)
    if not plain_call():
        found = torch.ops.sparsetile.attend(
            tensors, *operands, counts, scales, bias, recipe, slope, keep
        )
        return found[0]  # type: ignore[no-any-return]
    if keep or (differentiated and bias is not None and bias.requires_grad):
        call = (tensors, recipe, counts, scales, slope)
        return _Attend.apply(*operands, bias, call)  # type: ignore[no-any-return]
    return attend(tensors, *operands, counts, scales, bias, recipe, slope, keep)[0]


class _Scores(torch.autograd.Function):
    """Dot products of messages with one or two vectors per head; the messages are read once."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, messages: Tensor, first: Tensor, second: Tensor | None
    ) -> tuple[Tensor, ...]:
        refuse_tangents(messages, first, second)
        ctx.save_for_backward(messages, first, *([] if second is None else [second]))
        return launch_scores(
            messages.contiguous(), first.float().contiguous(), widened_or_none(second)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        messages, *vectors = ctx.saved_tensors
        heads, width = vectors[0].shape
        d_messages = None
        if ctx.needs_input_grad[0]:
            parts = [
                (grad.to(messages.dtype).unsqueeze(-1), vector.to(messages.dtype))
                for grad, vector in zip(grads, vectors, strict=True)
            ]
            d_messages = parts[0][0] * parts[0][1]
            for grad, vector in parts[1:]:
                d_messages.addcmul_(grad, vector)
        d_vectors: list[Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[1:]):
            # One product reads the messages once. Only its diagonal blocks are used.
            side = torch.cat(grads, 1).to(messages.dtype).t()
            blocks = torch.mm(side, messages.flatten(1)).view(len(grads), heads, heads, width)
            for number, block in enumerate(blocks):
                d_vectors[number] = block.diagonal().t()
        return d_messages, *d_vectors


def node_scores(messages: Tensor, first: Tensor, second: Tensor | None = None) -> list[Tensor]:
    """Return the terms of scores, [nodes, heads] in float32, of one or two attention vectors.

    Parameters
    ----------
    messages : Tensor [nodes, heads, width]
        On a GPU, of one of ``ATTENTION_DTYPES``.
    first, second : Tensor [heads, width]
    """
    if not plain_call():
        vectors = (first,) if second is None else (first, second)
        return [(messages * vector).sum(-1).float() for vector in vectors]
    return list(_Scores.apply(messages, first, second))  # type: ignore[no-untyped-call]


# -- a layer of one set of nodes ---------------------------------------------------------------

# tensors, recipe, heads, counts, scales, slope
_LayerCall = tuple[list[Tensor], str, int, Tensor | None, Tensor | None, float]
# Alignment of vectors: bytes of one access.
_ALIGNMENT = 16


def _vector(tensor: Tensor) -> Tensor:
    wide = widened(tensor)
    return wide if wide.data_ptr() % _ALIGNMENT == 0 else wide.clone()


def _layer(
    call: _LayerCall, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> tuple[FlatPlan, Layer]:
    _, recipe, heads, counts, scales, slope = call
    layer = Layer(
        heads, _vector(first), _vector(second), widened_or_none(bias), widened_or_none(counts),
        widened_or_none(scales), slope,
    )  # fmt: skip
    return parsed(recipe), layer


def _layer_forward(
    call: _LayerCall,
    messages: Tensor,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    refuse_tangents(messages, first, second, bias)
    flat, layer = _layer(call, first, second, bias)
    return attend_layer(
        exact_rows(flat), flat.exact_tensors(call[0]), layer, packed(messages), keep
    )


class _AttentionLayer(torch.autograd.Function):
    """Scores, softmax, sum and bias in one step, and all gradients in another."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        messages: Tensor,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        call: _LayerCall,
    ) -> Tensor:
        keep = any(ctx.needs_input_grad[:3])
        out, kept = _layer_forward(call, messages, first, second, bias, keep)
        ctx.call = call
        if keep:
            ctx.save_for_backward(messages, first, second, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        for_messages, for_first, for_second, for_bias, _ = ctx.needs_input_grad
        if not (for_messages or for_first or for_second):
            return None, None, None, bias_gradient(grad) if for_bias else None, None
        messages, first, second, kept = ctx.saved_tensors
        if grad.dtype is not messages.dtype:
            grad = grad.to(messages.dtype)
        # With create_graph=True torch must see the operator, which rejects second derivatives.
        if torch.is_grad_enabled() or not plain_call():
            found = _visible_gradients(ctx.call, messages, first, second, kept, grad)
            return *found, bias_gradient(grad) if for_bias else None, None
        refuse_tangents(grad)
        tensors, vectors = ctx.call[0], for_first or for_second
        flat, layer = _layer(ctx.call, first, second)
        d_messages, d_first, d_second, d_bias = attend_layer_backward(
            exact_rows(flat), transposed_rows(flat, tensors), layer, packed(messages), kept,
            packed(grad), vectors, for_bias,
        )  # fmt: skip
        if for_bias and d_bias is None:
            d_bias = bias_gradient(grad)
        return (
            d_messages if for_messages else None,
            d_first if for_first else None,
            d_second if for_second else None,
            d_bias,
            None,
        )


def _visible_gradients(
    call: _LayerCall, messages: Tensor, first: Tensor, second: Tensor, kept: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of messages and vectors by operators that torch sees."""
    tensors, recipe, heads, counts, scales, slope = call
    nodes, n = messages.shape
    terms, of_source, sums = kept_parts(kept, nodes, heads, n)
    d_messages, d_source, d_target = torch.ops.sparsetile.attend_backward(
        tensors, grad, messages, of_source, terms, sums, counts, scales, recipe, slope, True
    )
    by_head, scores = messages.view(nodes, heads, -1), (d_source, d_target)
    vectors = [(each.view(heads, -1), each.shape) for each in (first, second)]
    for score, (vector, _) in zip(scores, vectors, strict=True):
        brought = score.unsqueeze(-1) * vector
        d_messages = d_messages + brought.flatten(1).to(d_messages.dtype)
    d_first, d_second = (
        (score.unsqueeze(-1) * by_head).sum(0).view(shape)
        for score, (_, shape) in zip(scores, vectors, strict=True)
    )
    return d_messages, d_first, d_second


def attention_layer(
    flat: tuple[list[Tensor], str],
    messages: Tensor,
    first: Tensor,
    second: Tensor,
    counts: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    slope: float,
) -> Tensor:
    """:func:`graph_attention` with the terms of :func:`node_scores`; targets are sources.

    Parameters
    ----------
    messages : Tensor [nodes, heads · width]
    first, second : Tensor [1, heads, width]
        The vectors of the scores' two terms.
    """
    heads = first.shape[1]
    if not plain_call():
        by_head = messages.view(messages.shape[0], heads, -1)
        of_source, of_target = node_scores(by_head, first[0], second[0])
        return graph_attention(flat, by_head, of_source, of_target, counts, scales, bias, slope)
    call = (*flat, heads, counts, scales, slope)
    if torch.is_grad_enabled() and (
        messages.requires_grad
        or first.requires_grad
        or second.requires_grad
        or (bias is not None and bias.requires_grad)
    ):
        return _AttentionLayer.apply(messages, first, second, bias, call)  # type: ignore[no-any-return]
    return _layer_forward(call, messages, first, second, bias, False)[0]
