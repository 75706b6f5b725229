"""torch operators of graph attention: attend, attend_backward.

They take the flat form of a plan (``plan/traced/flat.py``) and use A's rows of the exact system,
``csr``. The forward operator returns the output and what its gradient needs, so that nothing is
computed twice and torch can trace both. Second derivatives are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.launch.interface import Tensors
from sparsetile.layers.gat import TERMS, attend_forward
from sparsetile.layers.gat import attend_backward as launch_backward
from sparsetile.layers.gat_launches import address
from sparsetile.plan.modes import plain_call
from sparsetile.plan.traced.flat import FlatPlan, parsed
from sparsetile.plan.traced.operators import refuse_tangents

__all__ = [
    "attend", "attend_backward", "attend_gradients", "exact_rows", "packed", "transposed_rows",
    "widened", "widened_or_none",
]  # fmt: skip

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


def exact_rows(flat: FlatPlan) -> RowRunner:
    """Return the runner of A's rows, or raise if a plan has none."""
    if not isinstance(flat.exact, RowRunner):
        raise RuntimeError(
            "attend: tensors must be those of a plan on a CUDA device, got a plan of "
            f"{type(flat.exact).__name__}. Call sparsetile.nn.GATConv, which also runs without one."
        )
    return flat.exact


def widened_or_none(tensor: Tensor | None) -> Tensor | None:
    """As :func:`widened`; None stays None."""
    return None if tensor is None else widened(tensor)


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 and contiguous; the checks are faster than torch's no-ops."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.float().contiguous()


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def attend(
    tensors: Sequence[Tensor], messages: Tensor, of_source: Tensor, of_target: Tensor | None,
    counts: Tensor | None, scales: Tensor | None, bias: Tensor | None, recipe: str, slope: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums of messages weighted by attention, with its terms and (``keep``) sums for gradients."""
    refuse_tangents(messages, of_source, of_target, bias)
    flat = parsed(recipe)
    runner, messages, of_source = exact_rows(flat), packed(messages), widened(of_source)
    of_target, bias = widened_or_none(of_target), widened_or_none(bias)
    counts, scales = widened_or_none(counts), widened_or_none(scales)
    rows, n, heads = runner.rows, messages.shape[1], of_source.shape[1]
    out = messages.new_empty((rows, n))
    # Plain sums and bent ones. The output cannot replace the plain ones: it may be rounded, have a
    # bias, and be changed in place.
    sums = of_source.new_empty((2 if keep else 0, rows, n))
    terms = of_source.new_empty((rows, heads, TERMS))
    if runner.plain.items:
        attend_forward(
            runner, flat.exact_tensors(tensors), heads, messages, out, bias, address(counts),
            address(scales), slope, of_source.data_ptr(), address(of_target), terms.data_ptr(),
            sums.data_ptr() if keep else 0,
        )  # fmt: skip
    return out, terms, sums


def attend_backward(
    tensors: Sequence[Tensor], grad: Tensor, messages: Tensor, of_source: Tensor, terms: Tensor,
    sums: Tensor, counts: Tensor | None, scales: Tensor | None, recipe: str, slope: float,
    sources: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of messages, of_source and of_target; the first two empty without ``sources``."""
    refuse_tangents(grad)
    flat = parsed(recipe)
    counts, scales = widened_or_none(counts), widened_or_none(scales)
    return launch_backward(
        exact_rows(flat), transposed_rows(flat, tensors) if sources else None, widened(of_source),
        terms, packed(sums), packed(messages), packed(grad), address(counts), address(scales),
        slope,
    )  # fmt: skip


def transposed_rows(flat: FlatPlan, tensors: Sequence[Tensor]) -> tuple[RowRunner, Tensors, Tensor]:
    """Return runner and tensors of the transpose, and A's number of each of its entries."""
    if not flat.differentiable:
        raise RuntimeError(
            "attend: tensors must hold the planned transpose to compute gradients, got the "
            "forward half only. Call sparsetile.nn.GATConv, which plans it when needed."
        )
    other = parsed(flat.mirrored)
    return exact_rows(other), other.exact_tensors(flat.mirror(tensors)), tensors[flat.size]


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


def attend_gradients(
    tensors: list[Tensor], grad: Tensor, saved: Sequence[Tensor], counts: Tensor | None,
    scales: Tensor | None, recipe: str, slope: float, wanted: tuple[bool, bool, bool],
) -> Sequence[Tensor | None]:  # fmt: skip
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
    # With create_graph=True torch must see the operator, which rejects second derivatives.
    seen = torch.is_grad_enabled() or not plain_call()
    function = torch.ops.sparsetile.attend_backward if seen else attend_backward
    found = function(
        tensors, grad.to(messages.dtype), messages, of_source, terms, sums, counts, scales, recipe,
        slope, wanted[0] or wanted[1],
    )  # fmt: skip
    return [each if want else None for each, want in zip(found, wanted, strict=True)]


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    tensors, saved = saved[: ctx.count], saved[ctx.count :]
    scales = saved.pop() if ctx.scaled else None
    counts = saved.pop() if ctx.counted else None
    _, for_messages, for_source, for_target, _, _, for_bias, *_ = ctx.needs_input_grad
    wanted = (for_messages, for_source, for_target)
    found = attend_gradients(tensors, grad, saved, counts, scales, ctx.recipe, ctx.slope, wanted)
    d_bias = grad.sum(0, dtype=torch.float32) if for_bias else None
    return [None] * ctx.count, *found, None, None, d_bias, None, None, None


torch.library.register_autograd("sparsetile::attend", _backward, setup_context=_context, lib=_LIB)


def _refuse_second(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "attend: gradients must be of first order, got a gradient of a gradient. Call GATConv with "
        "return_attention_weights=True, which uses torch's operations."
    )


torch.library.register_autograd("sparsetile::attend_backward", _refuse_second, lib=_LIB)
