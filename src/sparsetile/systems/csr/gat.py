"""Launches of graph attention: ``gat_scores``, ``gat_softmax``, ``spmm_gat`` and ``gat_terms``.

Those over rows take the plain schedule of a ``csr`` build, so that hubs are cut and joined as in
products. Attention is computed in registers, in the forward pass and again in the backward pass.
Stored are four numbers per target and head, and, for gradients, two float32 sums of the output's
shape.

What a pass moves per entry with H heads of width W in elements of b bytes: the softmax 4 + 4·H
bytes, the weighted sum 4 + 4·H + H·W·b, the gradients 4 + 16·H + H·W·b. The row of messages or
gradients is gathered once in each direction. Attention stored per entry instead, with products and
an SDDMM head by head, would move H·W·b once more for the SDDMM and 8·H or more for each pass that
writes or reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import current_stream_handle, on_device
from sparsetile.jit.source import ConfigValue
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import THREADS, vector_width
from sparsetile.kernels.gat import (
    GAT_DTYPES,
    GAT_SCORES,
    GAT_SOFTMAX,
    GAT_TERMS,
    SOFTMAX_LANES,
    SPMM_GAT,
    TERMS_LANES,
    TERMS_THREADS,
    gat_config,
    gat_fold,
    gat_tile,
    head_lanes,
    scores_config,
    slot_bytes,
    softmax_config,
    terms_config,
)
from sparsetile.kernels.spec import KernelSpec
from sparsetile.systems.base import Tensors
from sparsetile.systems.csr.runner import CSRRunner
from sparsetile.systems.shared.cuda_context import ensure_cuda_context

__all__ = ["GAT_DTYPES", "TERMS", "Attention", "attend", "attend_backward", "node_scores"]

# Numbers per target and head (gat.cuh).
TERMS = 4
# Partial results of a lane of gat_softmax: highest, total, bent.
_SOFTMAX_BYTES = 12


@dataclass(frozen=True, eq=False)
class Attention:
    """What attention is computed from, beside the pattern.

    Attributes
    ----------
    of_source : Tensor of float32 [sources, heads]
    counts : Tensor of float32 [entries] or None
        Parallel edges that each entry stands for; one when None.
    scales : Tensor of float32 [entries, heads] or None
        What messages are multiplied by in place of the counts: the sum of dropout's factors.
    slope : float
        Of the leaky ReLU below 0.
    """

    of_source: Tensor
    counts: Tensor | None
    scales: Tensor | None
    slope: float

    @property
    def heads(self) -> int:
        return self.of_source.shape[1]

    def params(self) -> dict[str, Any]:
        return {
            "of_source": self.of_source.data_ptr(),
            "counts": _address(self.counts),
            "heads": self.heads,
            "slope": self.slope,
        }


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kernel(
    runner: CSRRunner, spec: KernelSpec, device: int, config: dict[str, ConfigValue]
) -> LoadedKernel:
    key = (spec.name, device, *config.values())
    found = runner.attention_kernels.get(key)
    if found is None:
        found = runner.attention_kernels[key] = spec.load(config, device)
    return found


def _launch(
    runner: CSRRunner,
    kernel: LoadedKernel,
    tensors: Tensors,
    lanes: int,
    layers: int,
    size: int,
    params: dict[str, Any],
) -> None:
    """Launch over a runner's rows: ``layers`` slabs, partial results of ``size`` bytes a slot."""
    work, device = runner.plain, tensors["indptr"].device.index
    sections = work.section_params(lanes)
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        partials = arrivals = 0
        if work.slots:
            memory, counters = scratch(
                device, stream, layers * work.slots * size, layers * work.nodes
            )
            partials, arrivals = memory.data_ptr(), counters.data_ptr()
        shared: dict[str, Any] = {
            **work.pointers(tensors),
            **sections,
            "columns": tensors["columns"].data_ptr(),
            "slot_count": work.slots,
            "node_count": work.nodes,
            "partials": partials,
            "arrivals": arrivals,
        }
        kernel.launch((sections["block_end"][-1], layers, 1), THREADS, stream, shared | params)


def _softmax(
    runner: CSRRunner, tensors: Tensors, attention: Attention, of_target: Tensor | None
) -> Tensor:
    """Return the terms of each target and head."""
    heads = attention.heads
    terms = attention.of_source.new_empty((runner.rows, heads, TERMS))
    if runner.plain.items:
        kernel = _kernel(runner, GAT_SOFTMAX, tensors["indptr"].device.index, softmax_config(heads))
        params = {
            **attention.params(),
            "of_target": _address(of_target),
            "terms": terms.data_ptr(),
        }
        layers = -(-heads // head_lanes(heads))
        size = SOFTMAX_LANES * _SOFTMAX_BYTES
        _launch(runner, kernel, tensors, SOFTMAX_LANES, layers, size, params)
    return terms


def _vector(width: int, *matrices: Tensor) -> int:
    """Return the elements that one access may move: a vector lies in one head."""
    starts = (matrix.data_ptr() // matrix.element_size() for matrix in matrices)
    return vector_width(matrices[0].dtype, width, *starts)


def _gather(
    runner: CSRRunner,
    tensors: Tensors,
    attention: Attention,
    mode: str,
    terms: Tensor,
    gathered: Tensor,
    out: Tensor,
    vector: int,
    params: dict[str, Any],
) -> None:
    """Launch ``spmm_gat``: rows of ``gathered``, weighed by attention, into ``out``."""
    n = out.shape[1]
    tile = gat_tile(out.dtype, n, vector)
    scaled = attention.counts is not None or attention.scales is not None
    config = gat_config(out.dtype, tile, mode, scaled)
    kernel = _kernel(runner, SPMM_GAT, tensors["indptr"].device.index, config)
    width = n // attention.heads
    every = {
        **attention.params(),
        "scales": _address(attention.scales),
        "order": 0,
        "terms": terms.data_ptr(),
        "b": gathered.data_ptr(),
        "c": out.data_ptr(),
        "messages": 0,
        "bias": 0,
        "plain": 0,
        "bent": 0,
        "d_source": 0,
        "width": width,
        "n": n,
        "fold": gat_fold(tile, width),
    }
    _launch(
        runner, kernel, tensors, tile.lanes, tile.slabs(n), slot_bytes(tile, mode), every | params
    )


def attend(
    runner: CSRRunner,
    tensors: Tensors,
    attention: Attention,
    of_target: Tensor | None,
    messages: Tensor,
    bias: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of messages weighed by attention, bias added, and what gradients need.

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
        The last, in float32 and with ``keep``: plain sums and bent ones. The output cannot stand
        for the plain ones: it may be rounded, have a bias, and be changed in place.
    """
    rows, n = runner.rows, messages.shape[1]
    out = messages.new_empty((rows, n))
    sums = attention.of_source.new_empty((2 if keep else 0, rows, n))
    terms = _softmax(runner, tensors, attention, of_target)
    if runner.plain.items:
        params = {
            "bias": _address(bias),
            "plain": sums[0].data_ptr() if keep else 0,
            "bent": sums[1].data_ptr() if keep else 0,
        }
        vector = _vector(n // attention.heads, messages, out)
        mode = "train" if keep else "infer"
        _gather(runner, tensors, attention, mode, terms, messages, out, vector, params)
    return out, terms, sums


# Of gat_scores, which has no plan: by type, vector, number of terms and device.
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
        device, vectors = messages.device.index, (first, second) if second is not None else (first,)
        vector = _vector(width, messages, *vectors)
        key = (messages.dtype, vector, two, device)
        kernel = _score_kernels.get(key)
        if kernel is None:
            config = scores_config(messages.dtype, vector, two)
            kernel = _score_kernels[key] = GAT_SCORES.load(config, device)
        params = {
            "messages": messages.data_ptr(),
            "first": first.data_ptr(),
            "second": _address(second),
            "of_source": found[0].data_ptr(),
            "of_target": found[-1].data_ptr(),
            "count": nodes * heads,
            "heads": heads,
            "width": width,
        }
        _launch_flat(kernel, nodes * heads, device, params)
    return found


def _launch_flat(kernel: LoadedKernel, count: int, device: int, params: dict[str, Any]) -> None:
    """Launch with a group of lanes for each of ``count`` (node, head)."""
    blocks = -(-count // (TERMS_THREADS // TERMS_LANES))
    with on_device(device):
        ensure_cuda_context(device)
        kernel.launch((blocks, 1, 1), TERMS_THREADS, current_stream_handle(device), params)


def _backward_terms(
    runner: CSRRunner, terms: Tensor, grad: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of of_target and the terms of the backward pass."""
    plain, bent = sums
    rows, heads, _ = terms.shape
    width = grad.shape[1] // heads
    d_target, new_terms = terms.new_empty((rows, heads)), torch.empty_like(terms)
    if rows:
        device, vector = grad.device.index, _vector(width, grad, plain, bent)
        kernel = _kernel(runner, GAT_TERMS, device, terms_config(grad.dtype, vector))
        params = {
            "grad": grad.data_ptr(),
            "plain": plain.data_ptr(),
            "bent": bent.data_ptr(),
            "terms": terms.data_ptr(),
            "new_terms": new_terms.data_ptr(),
            "d_target": d_target.data_ptr(),
            "count": rows * heads,
            "width": width,
        }
        _launch_flat(kernel, rows * heads, device, params)
    return d_target, new_terms


def attend_backward(
    runner: CSRRunner,
    transposed: tuple[CSRRunner, Tensors, Tensor] | None,
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
        The same for Aᵀ, with A's number of each of its entries; None where the gradient of
        ``of_target`` alone is wanted: the others are empty then.
    terms, sums
        What :func:`attend` returned.
    grad : Tensor [targets, heads · width], contiguous
    """
    d_target, new_terms = _backward_terms(runner, terms, grad, sums)
    if transposed is None:
        return messages.new_empty(0), d_target.new_empty(0), d_target
    other, tensors, order = transposed
    n, heads = messages.shape[1], attention.heads
    d_messages = torch.empty_like(messages)
    vector = _vector(n // heads, messages, grad, d_messages)
    tile = gat_tile(messages.dtype, n, vector)
    parts = n // heads // (vector * gat_fold(tile, n // heads))  # of a head's dot products
    d_source = terms.new_empty((other.rows, heads, parts))
    if other.plain.items:
        params = {
            "order": order.data_ptr(),
            "messages": messages.data_ptr(),
            "d_source": d_source.data_ptr(),
        }
        _gather(other, tensors, attention, "backward", new_terms, grad, d_messages, vector, params)
    return d_messages, d_source.squeeze(-1) if parts == 1 else d_source.sum(-1), d_target
