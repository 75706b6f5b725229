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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.rows.runner import RowRunner
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.kernels.gat import GAT_DTYPES, GAT_SCORES, TERMS_THREADS, scores_config
from sparsetile.launch.interface import Tensors
from sparsetile.layers.gat_launches import (
    address,
    gather_launch,
    group_grid,
    scores_launch,
    softmax_launch,
    terms_launch,
    vector_at,
)

__all__ = [
    "GAT_DTYPES",
    "TERMS",
    "Attention",
    "attend",
    "attend_backward",
    "attend_forward",
    "node_scores",
]

# Numbers per target and head (gat.cuh).
TERMS = 4


@dataclass(frozen=True, eq=False)
class Attention:
    """The inputs of attention other than the pattern.

    Attributes
    ----------
    of_source : Tensor of float32 [sources, heads]
    counts : Tensor of float32 [entries] or None
        Parallel edges that each entry stands for; one when None.
    scales : Tensor of float32 [entries, heads] or None
        Factors of messages that replace the counts: the sums of dropout's factors.
    slope : float
        Of the leaky ReLU below 0.
    """

    of_source: Tensor
    counts: Tensor | None
    scales: Tensor | None
    slope: float


def attend(
    runner: RowRunner,
    tensors: Tensors,
    attention: Attention,
    of_target: Tensor | None,
    messages: Tensor,
    bias: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of messages weighted by attention, bias added, and what gradients need.

    Parameters
    ----------
    runner, tensors
        A[target, source] as ``csr`` has built it.
    of_target : Tensor of float32 [targets, heads], optional
    messages : Tensor [sources, heads · width], contiguous
    bias : Tensor of float32 [heads · width], optional
    keep : bool
        Whether gradients will be needed.

    Returns
    -------
    Tensor [targets, heads · width], Tensor [targets, heads, 4], Tensor [0 or 2, targets, n]
        The last, in float32 and with ``keep``: plain sums and bent ones. The output cannot replace
        the plain ones: it may be rounded, have a bias, and be changed in place.
    """
    rows, n = runner.rows, messages.shape[1]
    of_source = attention.of_source
    heads = of_source.shape[1]
    out = messages.new_empty((rows, n))
    sums = of_source.new_empty((2 if keep else 0, rows, n))
    terms = of_source.new_empty((rows, heads, TERMS))
    if runner.plain.items:
        plain = sums.data_ptr() if keep else 0
        attend_forward(
            runner, tensors, heads, messages, out, bias, address(attention.counts),
            address(attention.scales), attention.slope, of_source.data_ptr(), address(of_target),
            terms.data_ptr(), plain,
        )  # fmt: skip
    return out, terms, sums


def attend_forward(
    runner: RowRunner,
    tensors: Tensors,
    heads: int,
    messages: Tensor,
    out: Tensor,
    bias: Tensor | None,
    counts: int,
    scales: int,
    slope: float,
    of_source: int,
    of_target: int,
    terms: int,
    plain: int,
    vectors: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch softmax and sum; with ``vectors`` the scores' terms first. Addresses are numbers.

    ``plain``: where both kept sums begin, 0 for none.
    """
    n, dtype, device = messages.shape[1], messages.dtype, messages.device.index
    at, to = messages.data_ptr(), out.data_ptr()
    bent = plain + runner.rows * n * 4 if plain else 0
    scaled, mode = bool(counts or scales), "train" if plain else "infer"
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        if vectors is not None:
            first, second = vectors[0].data_ptr(), vectors[1].data_ptr()
            low = (at | first | second) & 15
            scores_launch(runner, dtype, heads, n, low, device)(
                stream, at, first, second, of_source, of_target
            )
        softmax_launch(runner, heads, device)(
            stream, tensors, slope, counts, of_source, of_target, terms
        )
        gather_launch(runner, mode, dtype, heads, n, scaled, (at | to) & 15, device)(
            stream, tensors, slope, counts, of_source, scales, 0, terms, at, to, 0, 0, 0, 0,
            address(bias), plain, bent, 0,
        )  # fmt: skip


# Launches of gat_scores without a plan, by type, vector, number of terms and device.
_score_kernels: dict[tuple[Any, ...], LoadedKernel] = {}


def node_scores(messages: Tensor, first: Tensor, second: Tensor | None) -> tuple[Tensor, ...]:
    """Return the dot products of each node's and head's message with one or two vectors.

    Parameters
    ----------
    messages : Tensor [nodes, heads, width], contiguous
    first, second : Tensor of float32 [heads, width], contiguous

    Returns
    -------
    One or two Tensors of float32 [nodes, heads]
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
            "messages": at,
            "first": one,
            "second": other,
            "of_source": found[0].data_ptr(),
            "of_target": found[-1].data_ptr(),
            "count": nodes * heads,
            "heads": heads,
            "width": width,
        }
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            kernel.launch(group_grid(nodes * heads), TERMS_THREADS, stream, params)
    return found


def attend_backward(
    runner: RowRunner,
    transposed: tuple[RowRunner, Tensors, Tensor] | None,
    attention: Attention,
    terms: Tensor,
    sums: Tensor,
    messages: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the messages, of ``of_source`` and of ``of_target``.

    Parameters
    ----------
    transposed
        The same for Aᵀ, with A's number of each of its entries; None if only the gradient of
        ``of_target`` is needed: the others are empty then.
    terms, sums
        What :func:`attend` returned.
    grad : Tensor [targets, heads · width], contiguous
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
            terms_launch(runner, dtype, heads, n, (at | plain | bent) & 15, device)(
                stream, at, plain, bent, terms.data_ptr(), new_terms.data_ptr(), d_target.data_ptr()
            )
        if transposed is None:
            return messages.new_empty(0), d_target.new_empty(0), d_target
        other, tensors, order = transposed
        d_messages = torch.empty_like(messages)
        counts, scales = address(attention.counts), address(attention.scales)
        own, to = messages.data_ptr(), d_messages.data_ptr()
        scaled, low = bool(counts or scales), (at | own | to) & 15
        launch = gather_launch(other, "backward", dtype, heads, n, scaled, low, device)
        d_source = terms.new_empty((other.rows, heads, launch.parts))
        if other.plain.items:
            launch(
                stream, tensors, attention.slope, counts, attention.of_source.data_ptr(), scales,
                order.data_ptr(), new_terms.data_ptr(), at, to, own, 0, 0, 0, 0, 0, 0,
                d_source.data_ptr(),
            )  # fmt: skip
    whole = d_source.squeeze(-1) if launch.parts == 1 else d_source.sum(-1)
    return d_messages, whole, d_target
