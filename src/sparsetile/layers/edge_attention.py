"""Attention whose scores are numbers per entry and head, and the scores that need both nodes.

    scores        edge_scores.cu     per entry: a dot product, or a vector times a leaky ReLU
    weighted sum  gat_softmax.cu, spmm_gat.cu with kEdges: attention in registers, as in gat.py

Both gather one row per entry. Gradients gather one per entry for the messages, one for each side of
the scores (``edge_rows.cu``), and one for the scores themselves (``edge_scores.cu`` again). With
edges' features it is one more for the weights that map them (``edge_columns.cu``), and one for the
features. Only numbers per entry and head are stored. The order of all additions is fixed.

Entries of A are edges here: with features, no two edges may be parallel. Eager calls only; whoever
traces uses torch's operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.kernels.edge_attention import BENT, DOT, FEATURES, GRADIENT, SUMS
from sparsetile.launch.interface import Tensors
from sparsetile.layers.attention_operators import (
    exact_rows,
    packed,
    transposed_rows,
    widened,
    widened_or_none,
)
from sparsetile.layers.gat import TERMS, attend_forward
from sparsetile.layers.gat_launches import address, launch_of
from sparsetile.plan.traced.flat import parsed

__all__ = [
    "Entries", "Mapped", "attend_entries", "bent_scores", "dot_scores", "launch_rows",
    "launch_scores", "wide",
]  # fmt: skip

_ALIGNMENT = 16  # bytes of one access


class Entries(NamedTuple):
    """The rows of A that a call walks, with the transpose if gradients are needed."""

    flat: tuple[list[Tensor], str]
    rows: Tensor  # int64 [entries], the target of each

    def forward(self) -> tuple[RowRunner, Tensors]:
        flat = parsed(self.flat[1])
        return exact_rows(flat), flat.exact_tensors(self.flat[0])

    def backward(self) -> tuple[RowRunner, Tensors, Tensor]:
        return transposed_rows(parsed(self.flat[1]), self.flat[0])


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def wide(tensor: Tensor | None) -> Tensor | None:
    """The tensor in float32, contiguous, at a multiple of 16 bytes."""
    return None if tensor is None else _aligned(widened(tensor))


class Mapped(NamedTuple):
    """Features of entries and the weights that map them, in float32; both None without features."""

    vector: Tensor | None  # [n]
    features: Tensor | None  # [entries, dims]
    weights: Tensor | None  # [dims, n]

    @property
    def dims(self) -> int:
        return 0 if self.features is None else self.features.shape[1]

    @property
    def addresses(self) -> tuple[int, int, int]:
        return address(self.vector), address(self.features), address(self.weights)


def launch_scores(
    entries: Entries, mode: int, left: Tensor, right: Tensor, mapped: Mapped, slope: float,
    out: Tensor, heads: int, sums: int = 1, *, edges: Tensor | None = None, **more: int,
) -> None:  # fmt: skip
    """Launch ``edge_scores.cu``; ``more`` are addresses of its other parameters.

    ``edges``: the row of ``right`` of each entry, which its heads share.
    """
    runner, tensors = entries.forward()
    if not entries.rows.numel():
        return
    device, n = left.device.index, left.shape[1]
    low = (left.data_ptr() | right.data_ptr()) & 15
    with on_device(device):
        ensure_cuda_context(device)
        launch = launch_of(
            runner, "edge_scores", mode, left.dtype, heads, n, mapped.dims, sums,
            edges is not None, low, device,
        )  # fmt: skip
        launch(
            current_stream_handle(device), entries.rows.data_ptr(),
            (tensors["columns"] if edges is None else edges).data_ptr(),
            left.data_ptr(), right.data_ptr(), *mapped.addresses, more.get("chunk", 0),
            more.get("terms", 0), more.get("of_source", 0), more.get("of_edge", 0),
            more.get("counts", 0), more.get("scales", 0),
            more.get("to", out.data_ptr()), slope,
        )  # fmt: skip


def launch_rows(
    runner: RowRunner, tensors: Tensors, order: Tensor | None, weight: Tensor | None, b: Tensor,
    own: Tensor, mapped: Mapped, mode: int, slope: float, more: Tensor | None, *, heads: int,
    direct: Tensor | None = None, shared: bool = False,
) -> Tensor:  # fmt: skip
    """Return the sums of ``edge_rows.cu`` over rows of A, or with ``order`` of its transpose.

    ``shared``: a row of ``b`` is one head's, and all heads use it.
    """
    device, n = b.device.index, b.shape[1] * (heads if shared else 1)
    out = b.new_empty(runner.rows, n)
    if not runner.plain.items:
        return out
    low = (b.data_ptr() | own.data_ptr() | out.data_ptr() | address(direct)) & 15
    with on_device(device):
        ensure_cuda_context(device)
        launch = launch_of(
            runner, "edge_rows", mode, b.dtype, heads, n, mapped.dims, more is not None, shared,
            low, device,
        )  # fmt: skip
        launch(
            current_stream_handle(device), tensors, slope, address(order), address(weight),
            b.data_ptr(), own.data_ptr(), address(direct), *mapped.addresses, out.data_ptr(),
            address(more),
        )  # fmt: skip
    return out


def _chunks(dims: int) -> list[tuple[int, int]]:
    """First feature and number of each launch that computes gradients of some features."""
    found, first = [], 0
    while first < dims:
        count = next(each for each in SUMS if each <= dims - first)
        found.append((first, count))
        first += count
    return found


class _Scores(torch.autograd.Function):
    """Scores of all entries, and the gradients of whatever they are computed from."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, left: Tensor, right: Tensor, vector: Tensor | None, features: Tensor | None,
        weights: Tensor | None, call: tuple[Entries, int, int, float],
    ) -> Tensor:  # fmt: skip
        ctx.call = entries, heads, mode, slope = call
        left, right = packed(left), packed(right)
        mapped = Mapped(wide(vector), wide(features), wide(weights))
        out = torch.empty((entries.rows.numel(), heads), dtype=torch.float32, device=left.device)
        launch_scores(entries, mode, left, right, mapped, slope, out, heads)
        ctx.save_for_backward(left, right, *mapped)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        entries, heads, mode, slope = ctx.call
        left, right, *rest = ctx.saved_tensors
        mapped, weight = Mapped(*rest), widened(grad)
        for_left, for_right, for_vector, for_features, for_weights, _ = ctx.needs_input_grad
        d_left = d_right = d_vector = None
        if for_left or for_vector:
            runner, tensors = entries.forward()
            more = torch.empty(left.shape, device=left.device) if for_vector else None
            d_left = launch_rows(
                runner, tensors, None, weight, right, left, mapped, mode, slope, more, heads=heads
            )
            d_vector = None if more is None else more.sum(0)
        if for_right:
            other, others, order = entries.backward()
            d_right = launch_rows(
                other, others, order, weight, left, right, mapped, mode, slope, None, heads=heads
            )
        d_weights = _d_weights(ctx.call, left, right, mapped, weight) if for_weights else None
        d_features = _d_features(ctx.call, left, right, mapped, weight) if for_features else None
        return d_left if for_left else None, d_right, d_vector, d_features, d_weights, None


def _d_weights(
    call: tuple[Entries, int, int, float], left: Tensor, right: Tensor, mapped: Mapped,
    weight: Tensor,
) -> Tensor:  # fmt: skip
    entries, heads, _, slope = call
    assert mapped.weights is not None and mapped.features is not None
    if not entries.rows.numel():
        return torch.zeros_like(mapped.weights)
    out = torch.empty_like(mapped.weights)
    runner, tensors = entries.forward()
    device, n = left.device.index, left.shape[1]
    low = (left.data_ptr() | right.data_ptr()) & 15
    with on_device(device):
        ensure_cuda_context(device)
        for first, count in _chunks(mapped.dims):
            launch = launch_of(
                runner, "edge_columns", left.dtype, heads, n, mapped.dims, count, low, device
            )
            launch(
                current_stream_handle(device), entries.rows.data_ptr(),
                tensors["columns"].data_ptr(), left.data_ptr(), right.data_ptr(),
                *mapped.addresses, mapped.features.data_ptr() + 4 * first, weight.data_ptr(),
                out.data_ptr() + 4 * first * n, slope,
            )  # fmt: skip
    return out


def _d_features(
    call: tuple[Entries, int, int, float], left: Tensor, right: Tensor, mapped: Mapped,
    weight: Tensor,
) -> Tensor:  # fmt: skip
    entries, heads, _, slope = call
    assert mapped.weights is not None and mapped.features is not None
    out, n = torch.empty_like(mapped.features), left.shape[1]
    for first, count in _chunks(mapped.dims):
        launch_scores(
            entries, FEATURES, left, right, mapped, slope, out, heads, count,
            chunk=mapped.weights.data_ptr() + 4 * first * n, of_edge=weight.data_ptr(),
            to=out.data_ptr() + 4 * first,
        )  # fmt: skip
    return out


def dot_scores(entries: Entries, left: Tensor, right: Tensor, heads: int, scale: float) -> Tensor:
    """Return scale · dot(left[target], right[source]) of each entry and head, in float32.

    ``left`` [targets, n] and ``right`` [sources, n] have one type, of float32, float16, bfloat16.
    """
    call = (entries, heads, DOT, scale)
    return _Scores.apply(left, right, None, None, None, call)  # type: ignore[no-any-return]


def bent_scores(
    entries: Entries, left: Tensor, right: Tensor, vector: Tensor, slope: float,
    features: Tensor | None = None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return vector · leaky(left[target] + right[source] + weights · features) by entry and head.

    ``vector`` is [heads, width], ``weights`` [n, dims] and ``features`` [entries, dims]. The result
    is in float32. Differentiable in all of them.
    """
    call = (entries, vector.shape[0], BENT, slope)
    turned = None if weights is None else weights.t()
    return _Scores.apply(left, right, vector.flatten(), features, turned, call)  # type: ignore[no-any-return]


class _AttendEntries(torch.autograd.Function):
    """Softmax and weighted sum with terms of entries, and all gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, messages: Tensor, of_source: Tensor | None, of_target: Tensor | None,
        of_edge: Tensor, bias: Tensor | None,
        call: tuple[Entries, Tensor | None, Tensor | None, float],
    ) -> Tensor:  # fmt: skip
        entries, counts, scales, slope = call
        runner, tensors = entries.forward()
        messages, of_edge, bias = packed(messages), widened(of_edge), widened_or_none(bias)
        of_source, of_target = widened_or_none(of_source), widened_or_none(of_target)
        rows, n, heads = runner.rows, messages.shape[1], of_edge.shape[1]
        alone = of_source is None and of_target is None
        keep = any(ctx.needs_input_grad[:4])
        out = messages.new_empty(rows, n)
        # Sums with slopes are needed for the gradient of of_target.
        sums = of_edge.new_empty((1 if alone else 2) if keep else 0, rows, n)
        terms = of_edge.new_empty(rows, heads, TERMS)
        if runner.plain.items:
            plain = sums.data_ptr() if keep else 0
            attend_forward(
                runner, tensors, heads, messages, out, bias, address(counts), address(scales),
                slope, address(of_source), address(of_target), terms.data_ptr(), plain,
                of_edge=of_edge.data_ptr(), alone=alone,
            )  # fmt: skip
        if keep:
            ctx.save_for_backward(messages, of_source, of_edge, terms, sums)
        ctx.call, ctx.targets = call, of_target is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        for_messages, for_source, for_target, for_edge, for_bias, _ = ctx.needs_input_grad
        d_bias = grad.sum(0, dtype=torch.float32) if for_bias else None
        if not (for_messages or for_source or for_target or for_edge):
            return None, None, None, None, d_bias, None
        entries, counts, scales, slope = ctx.call
        messages, of_source, of_edge, terms, sums = ctx.saved_tensors
        grad = packed(grad.to(messages.dtype))
        runner, _ = entries.forward()
        rows, heads, n = runner.rows, of_edge.shape[1], messages.shape[1]
        device, dtype = messages.device.index, messages.dtype
        d_target, new_terms = terms.new_empty(rows, heads), torch.empty_like(terms)
        at, plain = grad.data_ptr(), sums.data_ptr()
        bent = plain + (sums.shape[0] - 1) * rows * n * 4
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            if rows:
                launch_of(runner, "terms", dtype, heads, n, (at | plain | bent) & 15, device)(
                    stream, at, plain, bent, terms.data_ptr(), new_terms.data_ptr(),
                    d_target.data_ptr(),
                )  # fmt: skip
            d_messages = d_source = d_edge = None
            if for_messages or for_source:
                other, tensors, order = entries.backward()
                d_messages = torch.empty_like(messages)
                own, to = messages.data_ptr(), d_messages.data_ptr()
                scaled, low = counts is not None or scales is not None, (at | own | to) & 15
                launch = launch_of(
                    other, "gather", "backward", dtype, heads, n, scaled, True, low, device
                )
                parts = terms.new_empty(other.rows, heads, launch.parts)
                if other.plain.items:
                    launch(
                        stream, tensors, slope, address(counts), address(of_source),
                        of_edge.data_ptr(), address(scales), order.data_ptr(),
                        new_terms.data_ptr(), at, to, own, 0, 0, 0, 0, 0, 0, parts.data_ptr(),
                    )  # fmt: skip
                d_source = parts.sum(-1) if for_source else None
        if for_edge:
            d_edge = torch.empty_like(of_edge)
            launch_scores(
                entries, GRADIENT, grad, messages, Mapped(None, None, None), slope, d_edge, heads,
                terms=new_terms.data_ptr(), of_source=address(of_source),
                of_edge=of_edge.data_ptr(), counts=address(counts), scales=address(scales),
            )  # fmt: skip
        return (
            d_messages if for_messages else None, d_source, d_target if for_target else None,
            d_edge, d_bias, None,
        )  # fmt: skip


def attend_entries(
    entries: Entries, messages: Tensor, of_edge: Tensor, *, of_source: Tensor | None = None,
    of_target: Tensor | None = None, counts: Tensor | None = None, scales: Tensor | None = None,
    bias: Tensor | None = None, slope: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the messages [sources, n] weighted by attention, [targets, n].

    Attention is the softmax of leaky(of_source[source] + of_target[target] + of_edge[entry]) over
    each target's entries, with terms [nodes, heads] and [entries, heads]. A ``slope`` of 1 leaves
    them as they are. ``counts`` and ``scales`` are as in ``gat.attend_forward``.
    """
    call = (entries, widened_or_none(counts), widened_or_none(scales), slope)
    return _AttendEntries.apply(messages, of_source, of_target, of_edge, bias, call)  # type: ignore[no-any-return]
