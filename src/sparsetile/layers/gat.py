"""Launches of graph attention: ``gat_scores``, ``gat_softmax``, ``spmm_gat``, ``gat_terms`` and
``gat_vectors``.

Kernels over rows use the schedule of a ``csr`` build, so that long rows are split as in products.
Attention is computed in registers, in the forward pass and again in the backward pass. They store
four numbers per target and head, and, for gradients, two float32 sums of the output's shape.

What a pass moves per entry with H heads of width W in elements of b bytes: the softmax 4 + 4·H
bytes, the weighted sum 4 + 4·H + H·W·b, the gradients 4 + 16·H + H·W·b. The row of messages or
gradients is gathered once in each direction. Attention stored per entry instead, with products and
an SDDMM head by head, would move H·W·b once more for the SDDMM and 8·H or more for each pass that
writes or reads it.

What a training step of a layer moves per node beside that, in multiples of H·W·b: scores 1, output
1, terms of the backward pass 1, messages and their gradient 2, gradients of vectors and bias 2;
and of H·W·4: 4 for the two sums, written and read. Gradients of the scores' terms are added to
those of the messages before these are stored; with torch's operations that moves 6 more.

Here the scores' terms are inputs; ``gat_layer.py`` computes them in the same step if targets are
sources. ``gat_launches.py`` prepares the launches of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.kernels.gat import GAT_DTYPES, GAT_SCORES, TERMS_THREADS, scores_config
from sparsetile.launch.interface import Tensors
from sparsetile.layers.gat_launches import address, group_grid, launch_of, vector_at

__all__ = ["GAT_DTYPES", "TERMS", "attend_backward", "attend_forward", "node_scores"]

# Numbers per target and head (gat.cuh).
TERMS = 4


def attend_forward(
    runner: RowRunner, tensors: Tensors, heads: int, messages: Tensor, out: Tensor,
    bias: Tensor | None, counts: int, scales: int, slope: float, of_source: int, of_target: int,
    terms: int, plain: int, vectors: tuple[Tensor, Tensor] | None = None,
    of_edge: int | None = None, alone: bool = False,
) -> None:  # fmt: skip
    """Launch softmax and sum; with ``vectors`` the scores' terms first. Addresses are numbers.

    Messages are contiguous, [sources, heads · width]. ``counts``: parallel edges of each entry, one
    if 0. ``scales``: factors of each entry's messages that replace them, sums of dropout's factors.
    ``slope`` is that of the leaky ReLU below 0. ``plain``: where both kept sums begin, 0 for none.
    ``of_edge``: terms of entries; ``alone``: there are no others, and one kept sum.
    """
    n, dtype, device = messages.shape[1], messages.dtype, messages.device.index
    at, to = messages.data_ptr(), out.data_ptr()
    bent = plain + runner.rows * n * 4 if plain and not alone else 0
    edges, of_edge = of_edge is not None, of_edge or 0
    scaled, mode = bool(counts or scales), "train" if plain else "infer"
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        if vectors is not None:
            first, second = vectors[0].data_ptr(), vectors[1].data_ptr()
            low = (at | first | second) & 15
            launch_of(runner, "scores", dtype, heads, n, low, device)(
                stream, at, first, second, of_source, of_target
            )
        launch_of(runner, "softmax", heads, edges, device)(
            stream, tensors, slope, counts, of_source, of_edge, of_target, terms
        )
        low = (at | to) & 15
        launch_of(runner, "gather", mode, dtype, heads, n, scaled, edges, low, device)(
            stream, tensors, slope, counts, of_source, of_edge, scales, 0, terms, at, to, 0, 0, 0,
            0, address(bias), plain, bent, 0,
        )  # fmt: skip


# Launches of gat_scores without a plan, by type, vector, number of terms and device.
_score_kernels: dict[tuple[Any, ...], LoadedKernel] = {}


def node_scores(messages: Tensor, first: Tensor, second: Tensor | None) -> tuple[Tensor, ...]:
    """Return the dot products of each node's and head's message with one or two vectors.

    All are contiguous, [nodes, heads, width] and float32 [heads, width].
    """
    nodes, heads, width = messages.shape
    two = second is not None
    found = tuple(first.new_empty((nodes, heads)) for _ in range(1 + two))
    if nodes:
        device, dtype = messages.device.index, messages.dtype
        at, one, other = messages.data_ptr(), first.data_ptr(), address(second)
        vector = vector_at(dtype, width, (at | one | other) & 15)
        key = (dtype, vector, two, device)
        kernel = _score_kernels.get(key)
        if kernel is None:
            config = scores_config(dtype, vector, two)
            kernel = _score_kernels[key] = GAT_SCORES.load(config, device)
        params = {
            "messages": at, "first": one, "second": other, "of_source": found[0].data_ptr(),
            "of_target": found[-1].data_ptr(), "count": nodes * heads, "heads": heads,
            "width": width,
        }  # fmt: skip
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            kernel.launch(group_grid(nodes * heads), TERMS_THREADS, stream, params)
    return found


def attend_backward(
    runner: RowRunner, transposed: tuple[RowRunner, Tensors, Tensor] | None, of_source: Tensor,
    terms: Tensor, sums: Tensor, messages: Tensor, grad: Tensor, counts: int, scales: int,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the messages, of ``of_source`` and of ``of_target``.

    ``transposed`` is Aᵀ with A's number of each of its entries; None if only the gradient of
    ``of_target`` is needed: the others are empty then. ``grad`` is contiguous.
    """
    n, dtype, device = messages.shape[1], messages.dtype, messages.device.index
    rows, heads, _ = terms.shape
    d_target, new_terms = terms.new_empty((rows, heads)), torch.empty_like(terms)
    at, plain = grad.data_ptr(), sums.data_ptr()
    bent = plain + rows * n * 4
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        if rows:
            launch_of(runner, "terms", dtype, heads, n, (at | plain | bent) & 15, device)(
                stream, at, plain, bent, terms.data_ptr(), new_terms.data_ptr(), d_target.data_ptr()
            )
        if transposed is None:
            return messages.new_empty(0), d_target.new_empty(0), d_target
        other, tensors, order = transposed
        d_messages = torch.empty_like(messages)
        own, to = messages.data_ptr(), d_messages.data_ptr()
        scaled, low = bool(counts or scales), (at | own | to) & 15
        launch = launch_of(other, "gather", "backward", dtype, heads, n, scaled, False, low, device)
        d_source = terms.new_empty((other.rows, heads, launch.parts))
        if other.plain.items:
            launch(
                stream, tensors, slope, counts, of_source.data_ptr(), 0, scales, order.data_ptr(),
                new_terms.data_ptr(), at, to, own, 0, 0, 0, 0, 0, 0, d_source.data_ptr(),
            )  # fmt: skip
    whole = d_source.squeeze(-1) if launch.parts == 1 else d_source.sum(-1)
    return d_messages, whole, d_target
