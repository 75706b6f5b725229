"""Features of edges in attention: those of self-loops, scores in chunks, and weighted sums.

The maps of edges' features to the layer's width are never stored for all edges. What depends on
them linearly is computed on the features themselves (:func:`weighted_features`), and scores with a
nonlinearity are computed for some edges at a time, again in the backward pass
(:func:`scores_in_chunks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparsetile.cache.operators import csr_sddmm, multiply
from sparsetile.core.errors import type_error, value_error
from sparsetile.nn.graph import Graph
from sparsetile.nn.inputs import Given
from sparsetile.plan.modes import plain_call

__all__ = [
    "dot_features", "edge_features", "edge_softmax", "entry_softmax", "features_with_loops",
    "scores_in_chunks", "sums_in_chunks", "weighted_features",
]  # fmt: skip


def _eager() -> bool:
    """Whether nobody traces or transforms the call."""
    return plain_call() and not torch.jit.is_tracing()


# Edges of a chunk: a quarter of the nodes, and no fewer than this.
LEAST_CHUNK = 2**12
_REDUCTIONS = {"max": "amax", "min": "amin", "mul": "prod"}


def edge_features(
    layer: str, edge_attr: Any, edge_dim: int | None, edge_index: Any, given: Given, edges: int
) -> Tensor | None:
    """Return the features of the given edges, [edges, edge_dim], or raise; None if there are none.

    ``Data`` has its own. ``edge_dim`` -1 is any width. ``edges``: how many there are.
    """
    if edge_attr is None and edge_dim is not None and type(edge_index) is not Tensor:
        edge_attr = getattr(edge_index, "edge_attr", None)
    if edge_attr is None:
        return None
    if edge_dim is None:
        raise value_error(
            layer, "edge_attr", "None without edge_dim", type(edge_attr).__name__,
            "Make the layer with edge_dim, the width of the edges' features",
        )  # fmt: skip
    if given.kind == "matrix":
        raise value_error(
            layer, "edge_attr", "None with a sparse matrix", type(edge_attr).__name__,
            "Pass edge_index [2, E], whose order the features have",
        )  # fmt: skip
    if not isinstance(edge_attr, Tensor) or not edge_attr.is_floating_point():
        got = getattr(edge_attr, "dtype", type(edge_attr).__name__)
        raise type_error(layer, "edge_attr", "a float tensor", got, "Convert it with .float()")
    wide = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
    edge_dim = wide.shape[-1] if edge_dim == -1 else edge_dim
    if wide.shape != (edges, edge_dim) or wide.device != given.pattern.device:
        raise value_error(
            layer, "edge_attr", f"of shape ({edges}, {edge_dim}) on {given.pattern.device}",
            f"{tuple(edge_attr.shape)} on {edge_attr.device}", "Give one row per edge",
        )  # fmt: skip
    return wide


def features_with_loops(graph: Graph, features: Tensor, fill: Any, by_target: bool) -> Tensor:
    """Return the features of all edges of a graph, those of added self-loops last.

    As in PyG, ``fill`` is a number, a tensor, or how to reduce the features of the edges whose
    ``edge_index[1]`` is the node. ``by_target``: whether targets are there.
    """
    if graph.kept is None:
        return features
    kept = features if graph.kept.numel() == features.shape[0] else features[graph.kept]
    loops = min(graph.shape)
    if isinstance(fill, (int, float)):
        made = kept.new_full((loops, kept.shape[1]), fill)
    elif isinstance(fill, Tensor):
        made = fill.to(kept.device, kept.dtype).expand(loops, kept.shape[1])
    elif fill in ("add", "sum", "mean") and not _eager():
        node, count = graph.edges[int(by_target)][: kept.shape[0]], graph.shape[1 - by_target]
        made = kept.new_zeros(count, kept.shape[1]).index_add(0, node, kept)[:loops]
        if fill == "mean":
            made = made / torch.bincount(node, minlength=count)[:loops, None].clamp(min=1)
    elif fill in ("add", "sum", "mean"):
        pointers, order = graph.derived(("loops", by_target), lambda: _ends(graph, by_target))
        made = multiply(pointers, order, None, kept, "mean" if fill == "mean" else "sum")[:loops]
    elif fill in _REDUCTIONS:
        node = graph.edges[int(by_target)][: kept.shape[0]]
        made = (kept.new_ones if fill == "mul" else kept.new_zeros)(graph.shape[1 - by_target], 1)
        made = made.expand(-1, kept.shape[1]).contiguous()
        where = node[:, None].expand_as(kept)
        made = made.scatter_reduce(0, where, kept, _REDUCTIONS[fill], include_self=False)[:loops]
    else:
        raise value_error(
            "forward", "fill_value", "a number, a tensor, or add, mean, min, max, mul", repr(fill),
            "Pass fill_value='mean'",
        )  # fmt: skip
    return torch.cat([kept, made])


def _ends(graph: Graph, by_target: bool) -> tuple[Tensor, Tensor]:
    """Row pointers and edges by ``edge_index[1]``, without the self-loops that were added."""
    assert graph.kept is not None
    node = graph.edges[int(by_target)][: graph.kept.numel()]
    return _by_node(node, graph.shape[1 - by_target])


def _by_node(node: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return row pointers, and the numbers of all edges by node."""
    ordered, order = torch.sort(node, stable=True)
    numbers = torch.arange(nodes + 1, dtype=node.dtype, device=node.device)
    return torch.searchsorted(ordered, numbers), order


def edges_by_target(graph: Graph) -> tuple[Tensor, ...]:
    """Return row pointers, the numbers of all edges by target, and the place of each edge there."""

    def make() -> tuple[Tensor, ...]:
        pointers, order = _by_node(graph.edges[1], graph.shape[0])
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        return pointers, order, place

    return graph.derived("by target", make)


def dot_features(graph: Graph, of_target: Tensor, features: Tensor) -> Tensor:
    """Return the dot products of [targets, heads, edge_dim] and each edge's features.

    The result is [edges, heads], in the order of ``graph.edges``.
    """
    pointers, order, place = edges_by_target(graph)
    parts = [csr_sddmm(pointers, order, each, features) for each in of_target.unbind(1)]
    return torch.stack(parts, 1).index_select(0, place)


def weighted_features(graph: Graph, attention: Tensor, features: Tensor) -> Tensor:
    """Return the sums of edges' features by target, weighted by [edges, heads] attention.

    The result is [targets, heads, edge_dim]. Both are in the order of ``graph.edges``.
    """
    target, targets = graph.edges[1], graph.shape[0]
    if not _eager():
        parts = [
            features.new_zeros(targets, features.shape[1]).index_add(0, target, features * each)
            for each in attention.to(features.dtype).unsqueeze(-1).unbind(1)
        ]
        return torch.stack(parts, 1)
    pointers, order, _ = edges_by_target(graph)
    sorted_by_head = attention.to(features.dtype).index_select(0, order).t().contiguous()
    parts = [multiply(pointers, order, each, features, "sum") for each in sorted_by_head]
    return torch.stack(parts, 1)


def scores_in_chunks(
    score: Callable[[Tensor, Tensor, Tensor | None], Tensor], graph: Graph, of_source: Tensor,
    of_target: Tensor, features: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the scores of all edges, [edges, heads], in the order of ``graph.edges``.

    ``score`` gets the rows of ``of_source`` and ``of_target`` of some edges, and their features.
    Their memory is that of the nodes. The backward pass computes them again.
    """
    source, target = graph.edges
    edges = source.numel()
    step = max(LEAST_CHUNK, sum(graph.shape) // 4)

    def of_chunk(first: Tensor, second: Tensor, more: Tensor | None, begin: int) -> Tensor:
        chosen = slice(begin, begin + step)
        return score(
            first.index_select(0, source[chosen]), second.index_select(0, target[chosen]),
            None if more is None else more[chosen],
        )  # fmt: skip

    given = (of_source, of_target, features)
    again = torch.is_grad_enabled() and _eager()
    parts = [
        checkpoint(of_chunk, *given, begin, use_reentrant=False, preserve_rng_state=False)
        if again
        else of_chunk(*given, begin)
        for begin in range(0, max(edges, 1), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sums_in_chunks(
    message: Callable[[Tensor, Tensor], Tensor], graph: Graph, x: Tensor, features: Tensor
) -> Tensor:
    """Return the sums of messages at each target.

    ``message`` gets the rows of x at the sources of some edges, and these edges' features. Their
    memory is that of the nodes. The backward pass computes them again.
    """
    source, target = graph.edges
    edges, targets = source.numel(), graph.shape[0]
    step = max(LEAST_CHUNK, sum(graph.shape))

    def of_chunk(x: Tensor, features: Tensor, begin: int) -> Tensor:
        chosen = slice(begin, begin + step)
        found = message(x.index_select(0, source[chosen]), features[chosen])
        zeros = found.new_zeros(targets, found.shape[1])
        return zeros.index_add(0, target[chosen], found)

    again = torch.is_grad_enabled() and _eager()
    out: Tensor | None = None
    for begin in range(0, max(edges, 1), step):
        if again:
            part = checkpoint(
                of_chunk, x, features, begin, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = of_chunk(x, features, begin)
        out = part if out is None else out + part
    assert out is not None
    return out


class _EdgeSoftmax(torch.autograd.Function):
    """The softmax over the edges of each target; the order of additions is fixed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, scores: Tensor, target: Tensor, pointers: Tensor, order: Tensor
    ) -> Tensor:
        highest = _highest(scores, target, pointers.shape[0] - 1)
        raised = (scores - highest.index_select(0, target)).exp_()
        total = multiply(pointers, order, None, raised, "sum") + 1e-16
        attention = raised / total.index_select(0, target)
        ctx.save_for_backward(attention, target, pointers, order)
        return attention

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        attention, target, pointers, order = ctx.saved_tensors
        pull = attention * grad
        total = multiply(pointers, order, None, pull, "sum")
        return pull - attention * total.index_select(0, target), None, None, None


@torch.no_grad()
def _highest(scores: Tensor, target: Tensor, targets: int) -> Tensor:
    where = target[:, None].expand_as(scores)
    highest = scores.new_zeros(targets, scores.shape[1])
    return highest.scatter_reduce_(0, where, scores, "amax", include_self=False)


def edge_softmax(graph: Graph, scores: Tensor) -> Tensor:
    """Return the softmax of [edges, heads] scores over the edges of each target.

    Differentiable any number of times.
    """
    target = graph.edges[1]
    if _eager():
        pointers, order, _ = edges_by_target(graph)
        return _EdgeSoftmax.apply(scores, target, pointers, order)  # type: ignore[no-any-return]
    raised = (scores - _highest(scores, target, graph.shape[0]).index_select(0, target)).exp()
    total = scores.new_zeros(graph.shape[0], scores.shape[1]).index_add(0, target, raised)
    return raised / (total.index_select(0, target) + 1e-16)


def entry_softmax(graph: Graph, scores: Tensor) -> Tensor:
    """Return the softmax of [entries, heads] scores over the entries of each target. Eager."""
    (order,) = graph.derived(
        "entries", lambda: (torch.arange(graph.csr.nnz, device=graph.csr.device),)
    )
    return _EdgeSoftmax.apply(scores, graph.rows, graph.csr.indptr, order)  # type: ignore[no-any-return]
