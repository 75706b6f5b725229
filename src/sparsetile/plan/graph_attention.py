"""torch operators of graph attention: attend, attend_backward.

They take the flat form of a plan (``operators.py``) and use A's rows of the exact system, ``csr``.
The forward operator returns what its gradient needs beside the output, so that nothing is computed
twice and torch can trace both. Gradients of gradients are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsetile.plan.operators import FlatPlan, parsed, refuse_tangents
from sparsetile.systems.csr.gat import GAT_DTYPES, TERMS, Attention
from sparsetile.systems.csr.gat import attend as launch_forward
from sparsetile.systems.csr.gat import attend_backward as launch_backward
from sparsetile.systems.csr.runner import CSRRunner

__all__ = ["ATTENTION_DTYPES", "graph_attention"]

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
    "Tensor terms, Tensor plain, Tensor bent, Tensor? counts, Tensor? scales, str recipe, "
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
    plain: Tensor,
    bent: Tensor,
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
        _rows(flat), transposed, attention, terms, plain.contiguous(), bent.contiguous(),
        messages.contiguous(), grad.contiguous(),
    )  # fmt: skip


for _name, _function in (("attend", attend), ("attend_backward", attend_backward)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _function, _key)


@torch.library.register_fake("sparsetile::attend", lib=_LIB)
def _(tensors, messages, of_source, of_target, counts, scales, bias, recipe, slope, keep):  # type: ignore[no-untyped-def]
    rows, n = parsed(recipe).rows, messages.shape[1]
    rounded = bias is not None or messages.dtype is not torch.float32
    planes = 0 if not keep else 2 if rounded else 1
    numbers = {"dtype": torch.float32}
    return (
        messages.new_empty((rows, n)),
        messages.new_empty((rows, of_source.shape[1], TERMS), **numbers),
        messages.new_empty((planes, rows, n), **numbers),
    )


@torch.library.register_fake("sparsetile::attend_backward", lib=_LIB)
def _(  # type: ignore[no-untyped-def]
    tensors, grad, messages, of_source, terms, plain, bent, counts, scales, recipe, slope, sources
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
    return (4 if others[9] else 0) * parsed(others[7]).nnz * grad[1]


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, messages, of_source, _, counts, scales, _, ctx.recipe, ctx.slope, ctx.keep = inputs
    out, terms, sums = output
    ctx.mark_non_differentiable(terms, sums)
    ctx.count, ctx.counted, ctx.scaled = len(tensors), counts is not None, scales is not None
    more = [each for each in (counts, scales) if each is not None]
    # One plane of sums: the output itself is the other.
    plain = [out] if sums.shape[0] == 1 else []
    ctx.save_for_backward(*tensors, messages, of_source, terms, sums, *more, *plain)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors = list(saved[: ctx.count])
    messages, of_source, terms, sums, *more = saved[ctx.count :]
    counts = more.pop(0) if ctx.counted else None
    scales = more.pop(0) if ctx.scaled else None
    _, for_messages, for_source, for_target, _, _, for_bias, *_ = ctx.needs_input_grad
    d_bias = grad.sum(0, dtype=torch.float32) if for_bias else None
    found: tuple[Any, ...] = (None, None, None)
    if for_messages or for_source or for_target:
        if not ctx.keep:
            raise RuntimeError(
                "attend: keep must be True to compute gradients, got False. Call "
                "sparsetile.nn.GATConv, which asks for it when gradients are needed."
            )
        plain = more.pop() if more else sums[1]
        sources = for_messages or for_source
        found = torch.ops.sparsetile.attend_backward(
            tensors, grad.to(messages.dtype), messages, of_source, terms, plain, sums[0], counts,
            scales, ctx.recipe, ctx.slope, sources,
        )  # fmt: skip
    wanted = (for_messages, for_source, for_target)
    d_messages, d_source, d_target = (
        each if want else None for each, want in zip(found, wanted, strict=True)
    )
    lists = [None] * ctx.count
    return lists, d_messages, d_source, d_target, None, None, d_bias, None, None, None


torch.library.register_autograd("sparsetile::attend", _backward, setup_context=_context, lib=_LIB)


def _refuse_second(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "attend: gradients must be of first order, got a gradient of a gradient. Call GATConv with "
        "return_attention_weights=True, which takes torch's operations."
    )


torch.library.register_autograd("sparsetile::attend_backward", _refuse_second, lib=_LIB)


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
    tracked = any(t is not None and t.requires_grad for t in (messages, of_source, of_target))
    out, _, _ = torch.ops.sparsetile.attend(
        tensors, messages.flatten(1), of_source.float(),
        None if of_target is None else of_target.float(), counts, scales, bias, recipe, slope,
        torch.is_grad_enabled() and tracked,
    )  # fmt: skip
    return out  # type: ignore[no-any-return]
