"""torch operators of graph attention: attend, attend_backward.

They take the flat form of a plan (``operators.py``) and use A's rows of the exact system, ``csr``.
The forward operator returns what its gradient needs beside the output, so that nothing is computed
twice and torch can trace both. Gradients of gradients are refused.

Where nothing is traced, the same functions are called without torch's dispatcher, which would take
longer than the launches: an operator carries tens of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsetile.plan.dispatch import plain_call
from sparsetile.plan.operators import FlatPlan, parsed, refuse_tangents
from sparsetile.systems.csr.gat import GAT_DTYPES, TERMS, Attention
from sparsetile.systems.csr.gat import attend as launch_forward
from sparsetile.systems.csr.gat import attend_backward as launch_backward
from sparsetile.systems.csr.gat import node_scores as launch_scores
from sparsetile.systems.csr.runner import CSRRunner

__all__ = ["ATTENTION_DTYPES", "graph_attention", "node_scores"]

# Types of messages.
ATTENTION_DTYPES = GAT_DTYPES

_LIB = torch.library.Library("sparsetile", "FRAGMENT")
_LIB.define(
    "attend(Tensor[] tensors, Tensor messages, Tensor of_source, Tensor? of_target, "
    "Tensor? counts, Tensor? scales, Tensor? bias, str recipe, float slope, bool keep) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    "attend_backward(Tensor[] tensors, Tensor grad, Tensor messages, Tensor of_source, "
    "Tensor terms, Tensor sums, Tensor? counts, Tensor? scales, str recipe, "
    "float slope, bool sources) -> (Tensor, Tensor, Tensor)"
)


def _rows(flat: FlatPlan) -> CSRRunner:
    if not isinstance(flat.exact, CSRRunner):
        raise RuntimeError(
            "attend: tensors must be those of a plan on a CUDA device, got a plan of "
            f"{type(flat.exact).__name__}. Call sparsetile.nn.GATConv, which takes another way "
            "there."
        )
    return flat.exact


def _in_float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def attend(
    tensors: Sequence[Tensor],
    messages: Tensor,
    of_source: Tensor,
    of_target: Tensor | None,
    counts: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    recipe: str,
    slope: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of messages weighed by attention, with its terms and (``keep``) sums for gradients."""
    refuse_tangents(messages, of_source, of_target, bias)
    flat = parsed(recipe)
    attention = Attention(
        of_source.float().contiguous(), _in_float(counts), _in_float(scales), slope
    )
    return launch_forward(
        _rows(flat), flat.exact_tensors(tensors), attention, _in_float(of_target),
        messages.contiguous(), _in_float(bias), keep,
    )  # fmt: skip


def attend_backward(
    tensors: Sequence[Tensor],
    grad: Tensor,
    messages: Tensor,
    of_source: Tensor,
    terms: Tensor,
    sums: Tensor,
    counts: Tensor | None,
    scales: Tensor | None,
    recipe: str,
    slope: float,
    sources: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of messages, of_source and of_target; the first two empty without ``sources``."""
    refuse_tangents(grad)
    flat = parsed(recipe)
    attention = Attention(
        of_source.float().contiguous(), _in_float(counts), _in_float(scales), slope
    )
    transposed = None
    if sources:
        if not flat.differentiable:
            raise RuntimeError(
                "attend: tensors must hold the planned transpose to compute gradients, got the "
                "forward half only. Call sparsetile.nn.GATConv, which plans it when needed."
            )
        other = parsed(flat.mirrored)
        mirrored = flat.mirror(tensors)
        transposed = (_rows(other), other.exact_tensors(mirrored), tensors[flat.size])
    return launch_backward(
        _rows(flat), transposed, attention, terms, sums.contiguous(), messages.contiguous(),
        grad.contiguous(),
    )  # fmt: skip


for _name, _function in (("attend", attend), ("attend_backward", attend_backward)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _function, _key)


@torch.library.register_fake("sparsetile::attend", lib=_LIB)
def _(tensors, messages, of_source, of_target, counts, scales, bias, recipe, slope, keep):  # type: ignore[no-untyped-def]
    rows, n = parsed(recipe).rows, messages.shape[1]
    numbers = {"dtype": torch.float32}
    return (
        messages.new_empty((rows, n)),
        messages.new_empty((rows, of_source.shape[1], TERMS), **numbers),
        messages.new_empty((2 if keep else 0, rows, n), **numbers),
    )


@torch.library.register_fake("sparsetile::attend_backward", lib=_LIB)
def _(  # type: ignore[no-untyped-def]
    tensors, grad, messages, of_source, terms, sums, counts, scales, recipe, slope, sources
):
    flat = parsed(recipe)
    heads, numbers = of_source.shape[1], {"dtype": torch.float32}
    return (
        messages.new_empty(messages.shape if sources else (0,)),
        messages.new_empty((flat.cols, heads) if sources else (0,), **numbers),
        messages.new_empty((flat.rows, heads), **numbers),
    )


@register_flop_formula(torch.ops.sparsetile.attend)
def _(tensors, messages, *others, out_shape=None, **named):  # type: ignore[no-untyped-def]
    return 2 * parsed(others[5]).nnz * messages[1]


@register_flop_formula(torch.ops.sparsetile.attend_backward)
def _(tensors, grad, *others, out_shape=None, **named):  # type: ignore[no-untyped-def]
    # A product with the transpose, and dot products on A's pattern.
    return (4 if others[8] else 0) * parsed(others[6]).nnz * grad[1]


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, messages, of_source, _, counts, scales, _, ctx.recipe, ctx.slope, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.count, ctx.counted, ctx.scaled = len(tensors), counts is not None, scales is not None
    more = [each for each in (counts, scales) if each is not None]
    ctx.save_for_backward(*tensors, messages, of_source, *output[1:], *more)


def _gradients(
    tensors: list[Tensor],
    grad: Tensor,
    saved: Sequence[Tensor],
    counts: Tensor | None,
    scales: Tensor | None,
    recipe: str,
    slope: float,
    wanted: tuple[bool, bool, bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of messages, of_source and of_target that are wanted.

    ``saved``: messages, of_source, terms and sums.
    """
    if not any(wanted):
        return None, None, None
    messages, of_source, terms, sums = saved
    if not sums.shape[0]:
        raise RuntimeError(
            "attend: keep must be True to compute gradients, got False. Call "
            "sparsetile.nn.GATConv, which asks for it when gradients are needed."
        )
    # With create_graph=True torch must see the operator, to refuse the second gradient.
    seen = torch.is_grad_enabled() or not plain_call()
    function = torch.ops.sparsetile.attend_backward if seen else attend_backward
    found = function(
        tensors, grad.to(messages.dtype), messages, of_source, terms, sums, counts, scales, recipe,
        slope, wanted[0] or wanted[1],
    )  # fmt: skip
    return [each if want else None for each, want in zip(found, wanted, strict=True)]


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum(0, dtype=torch.float32)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    tensors, saved = saved[: ctx.count], saved[ctx.count :]
    scales = saved.pop() if ctx.scaled else None
    counts = saved.pop() if ctx.counted else None
    _, for_messages, for_source, for_target, _, _, for_bias, *_ = ctx.needs_input_grad
    wanted = (for_messages, for_source, for_target)
    found = _gradients(tensors, grad, saved, counts, scales, ctx.recipe, ctx.slope, wanted)
    d_bias = _bias_gradient(grad) if for_bias else None
    return [None] * ctx.count, *found, None, None, d_bias, None, None, None


torch.library.register_autograd("sparsetile::attend", _backward, setup_context=_context, lib=_LIB)


def _refuse_second(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "attend: gradients must be of first order, got a gradient of a gradient. Call GATConv with "
        "return_attention_weights=True, which takes torch's operations."
    )


torch.library.register_autograd("sparsetile::attend_backward", _refuse_second, lib=_LIB)


# tensors, recipe, counts, scales, slope
_Call = tuple[list[Tensor], str, Tensor | None, Tensor | None, float]


class _Attend(torch.autograd.Function):
    """What the operator and its gradient do, for eager calls."""

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
        found = _gradients(tensors, grad, ctx.saved_tensors, counts, scales, recipe, slope, wanted)
        return *found, _bias_gradient(grad) if for_bias else None, None


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
    """Return the messages [sources, heads, width] weighed by attention, [targets, heads · width].

    Parameters
    ----------
    flat
        Of a plan of A[target, source] with its transpose, where gradients are needed.
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
        return launch_scores(messages.contiguous(), first.float().contiguous(), _in_float(second))

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
            # One product reads the messages once. Of its blocks the diagonal ones are wanted.
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
