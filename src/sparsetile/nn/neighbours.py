"""Sum, mean, max or min of each node's neighbours: the product that the layers share.

Parallel edges are summed into one entry of A. This file corrects means, in which each edge counts,
and maxima and minima, which do not depend on how often an edge occurs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import value_error
from sparsetile.kernels.grouping import MEAN
from sparsetile.nn.arguments import features, flow_name
from sparsetile.nn.cache import find_graph
from sparsetile.nn.fresh import fresh_values, takes_weighted
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, pair_of, read_input
from sparsetile.nn.traced import How, TracedEdges, traces

__all__ = ["aggregate", "reduction"]


def aggregate(
    x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any, edge_weight: Tensor | None = None, *,
    reduce: str = "sum", size: tuple[int, int] | None = None, flow: str = "source_to_target",
) -> Tensor:  # fmt: skip
    """Return the sum, mean, max or min of the neighbours of each target, in one call.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    this multiplies by A[target, source]. It stores nothing of size edges × features. It plans the
    graph at the first call and keeps the plan while ``edge_index`` lives and does not change.

    Parameters
    ----------
    x : Tensor [..., nodes, N], or a pair of those for sources and targets
        Of the targets only their number is used. The second of a pair may be None. Then ``size``
        or the graph gives the number of targets; if neither does, there are as many as sources.
    edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
        A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages.
    edge_weight : Tensor [E], optional
        Scales the messages; gradients flow into it. ``Data`` has its own weights.
    reduce : {"sum", "mean", "max", "min"}
        The mean divides by the number of edges, not by their weights. Nodes without edges get 0.
    size : (sources, targets), optional
    flow : {"source_to_target", "target_to_source"}

    Returns
    -------
    Tensor [..., targets, N]

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import aggregate
    >>> edge_index = torch.tensor([[0, 1, 2], [2, 2, 0]])
    >>> aggregate(torch.tensor([[1.0], [2.0], [5.0]]), edge_index)
    tensor([[5.],
            [0.],
            [3.]])
    """
    reduce, flow = reduce_name("aggregate", reduce), flow_name("aggregate", flow)
    given = read_input("aggregate", edge_index, edge_weight, flow)
    sources, _, sizes = pair_of("aggregate", x, size, flow, given)
    features("aggregate", "x", sources, -1)
    graph, reduce, weights = reduction("aggregate", given, sizes, sources, flow, reduce)
    return graph.aggregate(sources, weights, reduce=reduce)


def reduction(
    layer: str, given: Given, size: tuple[int, int], x: Tensor, flow: str, reduce: str
) -> tuple[Graph, str, Weights | None]:
    """Return the graph, and the reduction over A's entries with values that reduces over edges.

    ``x`` has the features of the sources; the other parameters are those of :func:`find_graph`.
    """
    if traces(given, reduce):
        return TracedEdges(given, size, How(layer, flow, reduce)), reduce, None  # type: ignore[return-value]
    graph, values_key = find_graph(
        layer, given, size, x.device, flow=flow, only_reduces=True,
        fresh=given.weight is None or (reduce in ("sum", "mean") and takes_weighted(x)),
        values=fresh_values(MEAN, x) if reduce == "mean" and given.weight is None else None,
    )  # fmt: skip
    parallel = graph.multiplicity is not None
    if given.weight is None:
        if not parallel or reduce == "sum":
            return graph, reduce, graph.own_weights(given, values_key)
        if reduce == "mean":
            return graph, "sum", graph.mean_weights()
        return graph, reduce, None  # parallel edges do not change a maximum
    if parallel and reduce in ("max", "min"):
        raise value_error(
            layer, "edge_index", f"without parallel edges for a weighted {reduce}",
            "edges that occur several times", "Join them with torch_geometric.utils.coalesce",
        )  # fmt: skip
    by_edge = given.weight

    def values() -> Tensor:
        scaled = graph.to_entries(by_edge)
        if parallel and reduce == "mean":
            return scaled / graph.edge_counts().index_select(0, graph.rows).to(scaled.dtype)
        return scaled

    reduced = "sum" if parallel else reduce
    if given.trained:
        return graph, reduced, Weights(None, values())
    name = ("edges", parallel and reduce == "mean")
    return graph, reduced, graph.keep_values(name, values_key, lambda: values().detach())
