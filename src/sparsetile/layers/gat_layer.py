"""Graph attention of one set of nodes: a layer's scores, softmax, sum and bias in one step.

Temporaries share one allocation, and so does what the backward pass needs: on small graphs host
time dominates. ``gat.py`` counts the bytes that a step moves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.launch.interface import Tensors
from sparsetile.layers.gat import TERMS, attend_forward
from sparsetile.layers.gat_launches import address, launch_of

__all__ = ["Layer", "attend_layer", "attend_layer_backward", "kept_parts"]


class Layer(NamedTuple):
    """The inputs of a layer other than messages, in float32 and contiguous."""

    heads: int
    # Vectors of the scores, of a node as a source and as a target, at multiples of 16 bytes.
    first: Tensor
    second: Tensor
    bias: Tensor | None
    counts: Tensor | None  # this and what follows as in ``gat.attend_forward``
    scales: Tensor | None
    slope: float


def _places(nodes: int, heads: int, n: int, keep: bool) -> tuple[int, int, int]:
    """Return the offsets of terms and scores in a layer's kept tensor, and its length, in floats.

    Both sums come first. Terms are read with 16-byte accesses.
    """
    terms = -(-2 * nodes * n // 4) * 4 if keep else 0
    scores = terms + TERMS * nodes * heads
    return terms, scores, scores + 2 * nodes * heads


def kept_parts(kept: Tensor, nodes: int, heads: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return terms, ``of_source`` and sums as ``gat.attend_backward`` takes them."""
    terms, scores, _ = _places(nodes, heads, n, True)
    return (
        kept[terms:scores].view(nodes, heads, TERMS),
        kept[scores : scores + nodes * heads].view(nodes, heads),
        kept[: 2 * nodes * n].view(2, nodes, n),
    )


def attend_layer(
    runner: RowRunner, tensors: Tensors, layer: Layer, messages: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and in one tensor all that its backward pass needs (``keep``)."""
    (nodes, n), heads = messages.shape, layer.heads
    terms, scores, size = _places(nodes, heads, n, keep)
    out = messages.new_empty(nodes, n)
    kept = layer.first.new_empty(size)
    if nodes:
        base = kept.data_ptr()
        of_source = base + 4 * scores
        attend_forward(
            runner, tensors, heads, messages, out, layer.bias, address(layer.counts),
            address(layer.scales), layer.slope, of_source, of_source + 4 * nodes * heads,
            base + 4 * terms, base if keep else 0, (layer.first, layer.second),
        )  # fmt: skip
    return out, kept


def attend_layer_backward(
    runner: RowRunner, transposed: tuple[RowRunner, Tensors, Tensor], layer: Layer,
    messages: Tensor, kept: Tensor, grad: Tensor, for_vectors: bool, for_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of messages, both vectors and bias; those of vectors if needed.

    ``transposed`` is as in ``gat.attend_backward``. That of the bias comes with the vectors'; alone
    it is a sum of torch's.
    """
    nodes, n = messages.shape
    heads, device, dtype = layer.heads, messages.device.index, messages.dtype
    first, second, slope = layer.first, layer.second, layer.slope
    terms, scores, _ = _places(nodes, heads, n, True)
    d_messages = torch.empty_like(messages)
    d_first = d_second = d_bias = None
    if for_vectors:
        make = first.new_empty if nodes else first.new_zeros
        d_first, d_second = make(first.shape), make(second.shape)
        d_bias = make(n) if for_bias else None
    if not nodes:
        return d_messages, d_first, d_second, d_bias
    other, tensors, order = transposed
    base, at, own, to = kept.data_ptr(), grad.data_ptr(), messages.data_ptr(), d_messages.data_ptr()
    bent = base + 4 * nodes * n
    counts, scales = address(layer.counts), address(layer.scales)
    every = nodes * heads
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        scaled, low = bool(counts or scales), (at | own | to) & 15
        launch = launch_of(other, "gather", "backward", dtype, heads, n, scaled, False, low, device)
        # New terms, then d_target, then d_source.
        work = kept.new_empty(every * (TERMS + 1 + launch.parts))
        new_terms = work.data_ptr()
        d_target = new_terms + 4 * TERMS * every
        d_source = d_target + 4 * every
        launch_of(runner, "terms", dtype, heads, n, (at | base | bent) & 15, device)(
            stream, at, base, bent, base + 4 * terms, new_terms, d_target
        )
        joined = launch.parts == 1
        launch(
            stream, tensors, slope, counts, base + 4 * scores, 0, scales, order.data_ptr(),
            new_terms, at, to, own, first.data_ptr() if joined else 0,
            second.data_ptr() if joined else 0, d_target, 0, 0, 0, d_source,
        )  # fmt: skip
        if not joined:
            whole = _add_scores(work, d_messages, layer, launch.parts)
            d_source = whole.data_ptr()
        if d_first is not None and d_second is not None:
            with_bias = d_bias is not None
            low = (own | at if with_bias else own) & 15
            launch_of(runner, "vectors", dtype, heads, n, with_bias, low, device)(
                stream, own, at, d_source, d_target, d_first.data_ptr(), d_second.data_ptr(),
                address(d_bias),
            )  # fmt: skip
    return d_messages, d_first, d_second, d_bias


def _add_scores(work: Tensor, d_messages: Tensor, layer: Layer, parts: int) -> Tensor:
    """Add the scores' gradient to ``d_messages``, if heads span several slabs.

    Returns the gradient of ``of_source``. ``work``: as in :func:`attend_layer_backward`.
    """
    nodes, heads, dtype = d_messages.shape[0], layer.heads, d_messages.dtype
    d_target, in_parts = work[TERMS * nodes * heads :].split([nodes * heads, nodes * heads * parts])
    d_source = in_parts.view(nodes, heads, parts).sum(-1)
    by_head = d_messages.view(nodes, heads, -1)
    for grad, vector in ((d_source, layer.first), (d_target, layer.second)):
        column = grad.view(nodes, heads, 1).to(dtype)
        by_head.addcmul_(column, vector.view(heads, -1).to(dtype))
    return d_source
