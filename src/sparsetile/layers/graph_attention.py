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

from sparsetile.layers import attention_operators as operators
from sparsetile.layers.gat import GAT_DTYPES as ATTENTION_DTYPES
from sparsetile.layers.gat import node_scores as launch_scores
from sparsetile.layers.gat_layer import Layer, attend_layer, attend_layer_backward, kept_parts
from sparsetile.plan.modes import plain_call
from sparsetile.plan.traced.flat import FlatPlan, parsed
from sparsetile.plan.traced.operators import refuse_tangents

__all__ = ["ATTENTION_DTYPES", "attention_layer", "graph_attention", "node_scores"]

# tensors, recipe, counts, scales, slope
_Call = tuple[list[Tensor], str, Tensor | None, Tensor | None, float]


class _Attend(torch.autograd.Function):
    """The operator and its gradient, for eager calls."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, messages: Tensor, of_source: Tensor, of_target: Tensor | None,
        bias: Tensor | None, call: _Call,
    ) -> Tensor:  # fmt: skip
        tensors, recipe, counts, scales, slope = ctx.call = call
        keep = any(ctx.needs_input_grad[:3])
        output = operators.attend(
            tensors, messages, of_source, of_target, counts, scales, bias, recipe, slope, keep
        )
        ctx.save_for_backward(messages, of_source, *output[1:])
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors, recipe, counts, scales, slope = ctx.call
        wanted, for_bias = ctx.needs_input_grad[:3], ctx.needs_input_grad[3]
        found = operators.attend_gradients(
            tensors, grad, ctx.saved_tensors, counts, scales, recipe, slope, wanted
        )
        return *found, grad.sum(0, dtype=torch.float32) if for_bias else None, None


def graph_attention(
    flat: tuple[list[Tensor], str], messages: Tensor, of_source: Tensor, of_target: Tensor | None,
    counts: Tensor | None, scales: Tensor | None, bias: Tensor | None, slope: float,
) -> Tensor:  # fmt: skip
    """Return the messages [sources, heads, width] weighted by attention, [targets, heads · width].

    ``flat`` is a plan of A[target, source], with its transpose if gradients are needed.
    ``of_source`` and ``of_target``, [nodes, heads], are the terms of the scores, both
    differentiable. ``counts`` and ``scales`` are as in ``gat.attend_forward``.
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
    return operators.attend(tensors, *operands, counts, scales, bias, recipe, slope, keep)[0]


class _Scores(torch.autograd.Function):
    """Dot products of messages with one or two vectors per head; the messages are read once."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, messages: Tensor, first: Tensor, second: Tensor | None
    ) -> tuple[Tensor, ...]:
        refuse_tangents(messages, first, second)
        ctx.save_for_backward(messages, first, *([] if second is None else [second]))
        return launch_scores(
            messages.contiguous(), first.float().contiguous(), operators.widened_or_none(second)
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

    Messages are [nodes, heads, width], on a GPU of one of ``ATTENTION_DTYPES``.
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
    wide = operators.widened(tensor)
    return wide if wide.data_ptr() % _ALIGNMENT == 0 else wide.clone()


def _layer(
    call: _LayerCall, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> tuple[FlatPlan, Layer]:
    _, recipe, heads, counts, scales, slope = call
    bias, counts = operators.widened_or_none(bias), operators.widened_or_none(counts)
    scales = operators.widened_or_none(scales)
    layer = Layer(heads, _vector(first), _vector(second), bias, counts, scales, slope)
    return parsed(recipe), layer


def _layer_forward(
    call: _LayerCall, messages: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_tangents(messages, first, second, bias)
    flat, layer = _layer(call, first, second, bias)
    runner, tensors = operators.exact_rows(flat), flat.exact_tensors(call[0])
    return attend_layer(runner, tensors, layer, operators.packed(messages), keep)


class _AttentionLayer(torch.autograd.Function):
    """Scores, softmax, sum and bias in one step, and all gradients in another."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, messages: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
        call: _LayerCall,
    ) -> Tensor:  # fmt: skip
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
            return None, None, None, grad.sum(0, dtype=torch.float32) if for_bias else None, None
        messages, first, second, kept = ctx.saved_tensors
        if grad.dtype is not messages.dtype:
            grad = grad.to(messages.dtype)
        # With create_graph=True torch must see the operator, which rejects second derivatives.
        if torch.is_grad_enabled() or not plain_call():
            found = _visible_gradients(ctx.call, messages, first, second, kept, grad)
            return *found, grad.sum(0, dtype=torch.float32) if for_bias else None, None
        refuse_tangents(grad)
        tensors, vectors = ctx.call[0], for_first or for_second
        flat, layer = _layer(ctx.call, first, second)
        runner, transposed = operators.exact_rows(flat), operators.transposed_rows(flat, tensors)
        messages, grad = operators.packed(messages), operators.packed(grad)
        d_messages, d_first, d_second, d_bias = attend_layer_backward(
            runner, transposed, layer, messages, kept, grad, vectors, for_bias
        )
        if for_bias and d_bias is None:
            d_bias = grad.sum(0, dtype=torch.float32)
        return (
            d_messages if for_messages else None, d_first if for_first else None,
            d_second if for_second else None, d_bias, None,
        )  # fmt: skip


def _visible_gradients(
    call: _LayerCall, messages: Tensor, first: Tensor, second: Tensor, kept: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of messages and vectors by operators that torch sees."""
    tensors, recipe, heads, counts, scales, slope = call
    nodes, n = messages.shape
    terms, of_source, sums = kept_parts(kept, nodes, heads, n)
    d_messages, d_source, d_target = torch.ops.sparsetile.attend_backward(
        tensors, grad, messages, of_source, terms, sums, counts, scales, recipe, slope, True
    )
    by_head, d_vectors = messages.view(nodes, heads, -1), []
    for score, vector in ((d_source.unsqueeze(-1), first), (d_target.unsqueeze(-1), second)):
        brought = score * vector.view(heads, -1)
        d_messages = d_messages + brought.flatten(1).to(d_messages.dtype)
        d_vectors.append((score * by_head).sum(0).view(vector.shape))
    return d_messages, *d_vectors


def attention_layer(
    flat: tuple[list[Tensor], str], messages: Tensor, first: Tensor, second: Tensor,
    counts: Tensor | None, scales: Tensor | None, bias: Tensor | None, slope: float,
) -> Tensor:  # fmt: skip
    """:func:`graph_attention` with the terms of :func:`node_scores`; targets are sources.

    Messages are [nodes, heads · width], the vectors of the scores' two terms [1, heads, width].
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
