"""Launches of graph attention: ``gat_scores``, ``gat_softmax``, ``spmm_gat``, ``gat_terms`` and
``gat_vectors``.

Those over rows take the plain schedule of a ``csr`` build, so that hubs are cut and joined as in
products. Attention is computed in registers, in the forward pass and again in the backward pass.
Stored are four numbers per target and head, and, for gradients, two float32 sums of the output's
shape.

What a pass moves per entry with H heads of width W in elements of b bytes: the softmax 4 + 4·H
bytes, the weighted sum 4 + 4·H + H·W·b, the gradients 4 + 16·H + H·W·b. The row of messages or
gradients is gathered once in each direction. Attention stored per entry instead, with products and
an SDDMM head by head, would move H·W·b once more for the SDDMM and 8·H or more for each pass that
writes or reads it.

What a training step of a layer moves per node beside that, in multiples of H·W·b: scores 1, output
1, terms of the backward pass 1, messages and their gradient 2, gradients of vectors and bias 2;
and of H·W·4: 4 for the two sums, written and read. Gradients of the scores' terms are added to
those of the messages before these are stored. torch's operations took 1 + 2 + 3 more for that:
d_source times its vector written, the same with d_target added to it, and both gradients of the
messages added.

On small graphs the host decides. Launches are prepared once for each kind of operand
(``LoadedKernel.prepare``) and kept by the runner; a call writes addresses and the slope. Numbers
that only kernels read share one allocation.

Longer than a file should be: both passes take the same launches, and a step of a layer is made of
both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    GAT_VECTORS,
    SOFTMAX_LANES,
    SPMM_GAT,
    TERMS_LANES,
    TERMS_THREADS,
    VECTORS_THREADS,
    gat_config,
    gat_parts,
    gat_tile,
    head_lanes,
    scores_config,
    slot_bytes,
    softmax_config,
    terms_config,
    vectors_config,
    vectors_grid,
)
from sparsetile.kernels.spec import KernelSpec
from sparsetile.systems.base import Tensors
from sparsetile.systems.csr.runner import CSRRunner
from sparsetile.systems.shared.cuda_context import ensure_cuda_context

__all__ = [
    "GAT_DTYPES",
    "TERMS",
    "Attention",
    "Layer",
    "attend",
    "attend_backward",
    "attend_layer",
    "attend_layer_backward",
    "kept_parts",
    "node_scores",
]

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


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# -- prepared launches ---------------------------------------------------------------------------


def _prepare(
    spec: KernelSpec,
    config: dict[str, ConfigValue],
    device: int,
    grid: tuple[int, int, int],
    threads: int,
    constants: dict[str, Any],
) -> Callable[..., None]:
    """Return a launch that takes the stream, then every address and the slope as fields come."""
    changing = [field.name for field in spec.params.fields if field.letter in "Qd"]
    params = {**dict.fromkeys(changing, 0), **constants}
    return spec.load(config, device).prepare(grid, threads, params, changing).launch


class _RowLaunch:
    """A kernel over a runner's rows, ``layers`` times, partial results of ``size`` bytes a slot."""

    def __init__(
        self,
        runner: CSRRunner,
        spec: KernelSpec,
        config: dict[str, ConfigValue],
        device: int,
        lanes: int,
        layers: int,
        size: int,
        constants: dict[str, Any],
    ) -> None:
        work = runner.plain
        sections = work.section_params(lanes)
        every = {**sections, "slot_count": work.slots, "node_count": work.nodes, **constants}
        grid = (sections["block_end"][-1], layers, 1)
        self._launch = _prepare(spec, config, device, grid, THREADS, every)
        self._device = device
        self._needed = (layers * work.slots * size, layers * work.nodes) if work.slots else None

    def __call__(self, stream: int, tensors: Tensors, slope: float, *values: int) -> None:
        """Launch with the addresses between ``columns`` and ``slope`` of the parameters."""
        partials = arrivals = 0
        if self._needed is not None:
            memory, counters = scratch(self._device, stream, *self._needed)
            partials, arrivals = memory.data_ptr(), counters.data_ptr()
        self._launch(
            stream, tensors["items"].data_ptr(), tensors["columns"].data_ptr(), *values, slope,
            tensors["parent_of_slot"].data_ptr(), tensors["nodes"].data_ptr(), arrivals, partials,
        )  # fmt: skip


class _Gather(_RowLaunch):
    """``spmm_gat`` in one mode, for rows of ``n`` columns at addresses that end like ``low``."""

    def __init__(
        self,
        runner: CSRRunner,
        mode: str,
        dtype: torch.dtype,
        heads: int,
        n: int,
        scaled: bool,
        low: int,
        device: int,
    ) -> None:
        width = n // heads
        tile = gat_tile(dtype, n, _vector(dtype, width, low))
        self.parts = gat_parts(tile, heads, width)
        constants = {"heads": heads, "width": width, "n": n, "parts": self.parts}
        config, size = gat_config(dtype, tile, mode, scaled), slot_bytes(tile, mode)
        super().__init__(
            runner, SPMM_GAT, config, device, tile.lanes, tile.slabs(n), size, constants
        )


def _vector(dtype: torch.dtype, width: int, low: int) -> int:
    """Return the elements that one access may move: a vector lies in one head.

    ``low`` has the lowest bits of all addresses, joined: they are as aligned as it is.
    """
    return vector_width(dtype, width, low // dtype.itemsize)


def _gather(runner: CSRRunner, *key: Any) -> _Gather:
    try:
        found: _Gather = runner.attention_launches[key]
    except KeyError:
        found = runner.attention_launches[key] = _Gather(runner, *key)
    return found


def _softmax(runner: CSRRunner, heads: int, device: int) -> _RowLaunch:
    key = ("softmax", heads, device)
    found: _RowLaunch | None = runner.attention_launches.get(key)
    if found is None:
        layers, size = -(-heads // head_lanes(heads)), SOFTMAX_LANES * _SOFTMAX_BYTES
        found = runner.attention_launches[key] = _RowLaunch(
            runner, GAT_SOFTMAX, softmax_config(heads), device, SOFTMAX_LANES, layers, size,
            {"heads": heads},
        )  # fmt: skip
    return found


def _group_grid(count: int) -> tuple[int, int, int]:
    """Return the grid with a group of lanes for each of ``count`` (node, head)."""
    return -(-count // (TERMS_THREADS // TERMS_LANES)), 1, 1


def _scores(
    runner: CSRRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    """Return the launch of both terms of the scores for as many nodes as A has columns."""
    key = ("scores", dtype, heads, n, low, device)
    found: Callable[..., None] | None = runner.attention_launches.get(key)
    if found is None:
        count, width = runner.cols * heads, n // heads
        found = runner.attention_launches[key] = _prepare(
            GAT_SCORES, scores_config(dtype, _vector(dtype, width, low), True), device,
            _group_grid(count), TERMS_THREADS, {"count": count, "heads": heads, "width": width},
        )  # fmt: skip
    return found


def _terms(
    runner: CSRRunner, dtype: torch.dtype, heads: int, n: int, low: int, device: int
) -> Callable[..., None]:
    key = ("terms", dtype, heads, n, low, device)
    found: Callable[..., None] | None = runner.attention_launches.get(key)
    if found is None:
        count, width = runner.rows * heads, n // heads
        found = runner.attention_launches[key] = _prepare(
            GAT_TERMS, terms_config(dtype, _vector(dtype, width, low)), device,
            _group_grid(count), TERMS_THREADS, {"count": count, "width": width},
        )  # fmt: skip
    return found


class _Vectors:
    """``gat_vectors`` for as many nodes as A has rows."""

    def __init__(
        self,
        runner: CSRRunner,
        dtype: torch.dtype,
        heads: int,
        n: int,
        bias: bool,
        low: int,
        device: int,
    ) -> None:
        width = n // heads
        vector = _vector(dtype, width, low)
        grid = vectors_grid(runner.rows, n, vector)
        constants = {"nodes": runner.rows, "heads": heads, "width": width, "n": n}
        config = vectors_config(dtype, vector, grid.lanes, bias)
        blocks = (grid.chunks, grid.slabs, 1)
        self._launch = _prepare(GAT_VECTORS, config, device, blocks, VECTORS_THREADS, constants)
        self._device = device
        self._needed = grid.scratch(vector, bias)

    def __call__(self, stream: int, *values: int) -> None:
        partials = arrivals = 0
        if self._needed[1]:
            memory, counters = scratch(self._device, stream, *self._needed)
            partials, arrivals = memory.data_ptr(), counters.data_ptr()
        self._launch(stream, *values, partials, arrivals)


def _vectors(runner: CSRRunner, *key: Any) -> _Vectors:
    try:
        found: _Vectors = runner.attention_launches["vectors", *key]
    except KeyError:
        found = runner.attention_launches["vectors", *key] = _Vectors(runner, *key)
    return found


# -- operators -----------------------------------------------------------------------------------


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
    of_source = attention.of_source
    heads = of_source.shape[1]
    out = messages.new_empty((rows, n))
    sums = of_source.new_empty((2 if keep else 0, rows, n))
    terms = of_source.new_empty((rows, heads, TERMS))
    if runner.plain.items:
        plain = sums.data_ptr() if keep else 0
        _forward(
            runner, tensors, heads, messages, out, bias, attention, of_source.data_ptr(),
            _address(of_target), terms.data_ptr(), plain,
        )  # fmt: skip
    return out, terms, sums


def _forward(
    runner: CSRRunner,
    tensors: Tensors,
    heads: int,
    messages: Tensor,
    out: Tensor,
    bias: Tensor | None,
    given: Attention | Layer,
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
    counts, scales, slope = _address(given.counts), _address(given.scales), given.slope
    bent = plain + runner.rows * n * 4 if plain else 0
    scaled, mode = bool(counts or scales), "train" if plain else "infer"
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        if vectors is not None:
            first, second = vectors[0].data_ptr(), vectors[1].data_ptr()
            low = (at | first | second) & 15
            _scores(runner, dtype, heads, n, low, device)(
                stream, at, first, second, of_source, of_target
            )
        _softmax(runner, heads, device)(stream, tensors, slope, counts, of_source, of_target, terms)
        _gather(runner, mode, dtype, heads, n, scaled, (at | to) & 15, device)(
            stream, tensors, slope, counts, of_source, scales, 0, terms, at, to, 0, 0, 0, 0,
            _address(bias), plain, bent, 0,
        )  # fmt: skip


# Of gat_scores without a plan: by type, vector, number of terms and device.
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
        at, one, other = messages.data_ptr(), first.data_ptr(), _address(second)
        vector = _vector(dtype, width, (at | one | other) & 15)
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
            kernel.launch(_group_grid(nodes * heads), TERMS_THREADS, stream, params)
    return found


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
    n, dtype, device = messages.shape[1], messages.dtype, messages.device.index
    rows, heads, _ = terms.shape
    d_target, new_terms = terms.new_empty((rows, heads)), torch.empty_like(terms)
    at, plain = grad.data_ptr(), sums.data_ptr()
    bent = plain + rows * n * 4
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        if rows:
            _terms(runner, dtype, heads, n, (at | plain | bent) & 15, device)(
                stream, at, plain, bent, terms.data_ptr(), new_terms.data_ptr(), d_target.data_ptr()
            )
        if transposed is None:
            return messages.new_empty(0), d_target.new_empty(0), d_target
        other, tensors, order = transposed
        d_messages = torch.empty_like(messages)
        counts, scales = _address(attention.counts), _address(attention.scales)
        own, to = messages.data_ptr(), d_messages.data_ptr()
        scaled, low = bool(counts or scales), (at | own | to) & 15
        launch = _gather(other, "backward", dtype, heads, n, scaled, low, device)
        d_source = terms.new_empty((other.rows, heads, launch.parts))
        if other.plain.items:
            launch(
                stream, tensors, attention.slope, counts, attention.of_source.data_ptr(), scales,
                order.data_ptr(), new_terms.data_ptr(), at, to, own, 0, 0, 0, 0, 0, 0,
                d_source.data_ptr(),
            )  # fmt: skip
    whole = d_source.squeeze(-1) if launch.parts == 1 else d_source.sum(-1)
    return d_messages, whole, d_target


# -- a layer of one set of nodes -----------------------------------------------------------------


class Layer(NamedTuple):
    """What a layer is given beside messages: the vectors of its scores, its bias, its edges.

    Parameters
    ----------
    heads : int
    first, second : Tensor of float32, heads · width numbers, contiguous, at multiples of 16 bytes
        Of a node as a source and as a target.
    bias : Tensor of float32 [heads · width], contiguous, or None
    counts, scales, slope
        As in :class:`Attention`.
    """

    heads: int
    first: Tensor
    second: Tensor
    bias: Tensor | None
    counts: Tensor | None
    scales: Tensor | None
    slope: float


def _places(nodes: int, heads: int, n: int, keep: bool) -> tuple[int, int, int]:
    """Return where terms and scores begin in what a layer keeps, and how long it is, in floats.

    Both sums come first. Terms are read 16 bytes at once.
    """
    terms = -(-2 * nodes * n // 4) * 4 if keep else 0
    scores = terms + TERMS * nodes * heads
    return terms, scores, scores + 2 * nodes * heads


def kept_parts(kept: Tensor, nodes: int, heads: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return terms, ``of_source`` and sums as :func:`attend_backward` takes them."""
    terms, scores, _ = _places(nodes, heads, n, True)
    return (
        kept[terms:scores].view(nodes, heads, TERMS),
        kept[scores : scores + nodes * heads].view(nodes, heads),
        kept[: 2 * nodes * n].view(2, nodes, n),
    )


def attend_layer(
    runner: CSRRunner, tensors: Tensors, layer: Layer, messages: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and in one tensor all that its gradients need of the forward pass.

    Parameters
    ----------
    runner, tensors
        A[node, node] as ``csr`` has built it.
    messages : Tensor [nodes, heads · width], contiguous
    keep : bool
        Whether gradients will be needed.
    """
    nodes, n = messages.shape
    heads = layer.heads
    terms, scores, size = _places(nodes, heads, n, keep)
    out = messages.new_empty(nodes, n)
    kept = layer.first.new_empty(size)
    if nodes:
        base = kept.data_ptr()
        of_source = base + 4 * scores
        _forward(
            runner, tensors, heads, messages, out, layer.bias, layer, of_source,
            of_source + 4 * nodes * heads, base + 4 * terms, base if keep else 0,
            (layer.first, layer.second),
        )  # fmt: skip
    return out, kept


def attend_layer_backward(
    runner: CSRRunner,
    transposed: tuple[CSRRunner, Tensors, Tensor],
    layer: Layer,
    messages: Tensor,
    kept: Tensor,
    grad: Tensor,
    for_vectors: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of messages, both vectors and bias; those of vectors where wanted.

    Parameters
    ----------
    transposed
        Runner and tensors of Aᵀ, with A's number of each of its entries.
    kept
        What :func:`attend_layer` returned.
    grad : Tensor [nodes, heads · width], contiguous
    for_bias : bool
        Together with the vectors; alone it is a sum of torch's.
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
    counts, scales = _address(layer.counts), _address(layer.scales)
    every = nodes * heads
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        launch = _gather(
            other, "backward", dtype, heads, n, bool(counts or scales), (at | own | to) & 15, device
        )
        # New terms, then d_target, then d_source.
        work = kept.new_empty(every * (TERMS + 1 + launch.parts))
        new_terms = work.data_ptr()
        d_target = new_terms + 4 * TERMS * every
        d_source = d_target + 4 * every
        _terms(runner, dtype, heads, n, (at | base | bent) & 15, device)(
            stream, at, base, bent, base + 4 * terms, new_terms, d_target
        )
        joined = launch.parts == 1
        launch(
            stream, tensors, slope, counts, base + 4 * scores, scales, order.data_ptr(), new_terms,
            at, to, own, first.data_ptr() if joined else 0, second.data_ptr() if joined else 0,
            d_target, 0, 0, 0, d_source,
        )  # fmt: skip
        if not joined:
            whole = _add_scores(work, d_messages, layer, launch.parts)
            d_source = whole.data_ptr()
        if d_first is not None and d_second is not None:
            with_bias = d_bias is not None
            low = (own | at if with_bias else own) & 15
            _vectors(runner, dtype, heads, n, with_bias, low, device)(
                stream, own, at, d_source, d_target, d_first.data_ptr(), d_second.data_ptr(),
                _address(d_bias),
            )  # fmt: skip
    return d_messages, d_first, d_second, d_bias


def _add_scores(work: Tensor, d_messages: Tensor, layer: Layer, parts: int) -> Tensor:
    """Add what the scores bring to ``d_messages``, where heads lie in several slabs.

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
