"""Graph convolution of Kipf and Welling: D^-1/2 (A + I) D^-1/2 X W, normalisation in A's values."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.errors import type_error, value_error
from sparsetile.intake import CSR
from sparsetile.kernels.grouping import SYMMETRIC
from sparsetile.layers.normalise import normalised_values, scaled_by_degree
from sparsetile.nn.arguments import channels, features, flow_name, refuse_others, sum_only
from sparsetile.nn.cache import find_fresh, find_graph, find_sampled, note_loops
from sparsetile.nn.fresh import FreshGraph, fresh_values, takes_weighted
from sparsetile.nn.graph import Graph, Loops, Weights
from sparsetile.nn.hooks import is_plain_linear
from sparsetile.nn.inputs import Given, read_input
from sparsetile.nn.lazy import draw, linear, materialise
from sparsetile.nn.mapped import mapped_product
from sparsetile.nn.sampled import SampledGraph
from sparsetile.nn.traced import How, TracedEdges, traces
from sparsetile.plan.modes import plain_call
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan

__all__ = ["GCNConv", "convolution_weights", "gcn_matrix", "gcn_plan"]


class GCNConv(nn.Module):
    """Graph convolution with the arguments, state dict and results of PyG's ``GCNConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It normalises and plans A once and keeps the plan
    while ``edge_index`` lives and does not change. New edge weights reuse the plan.

    Parameters
    ----------
    in_channels : int
        Width of x; -1: that of the first x.
    out_channels : int
    improved : bool
        Whether added self-loops have weight 2 instead of 1. As in PyG, this needs edge weights:
        without them, self-loops have weight 1.
    cached : bool
        Accepted for compatibility with PyG. Graphs are always cached, and changes are noticed.
    add_self_loops : bool, optional
        Same as ``normalize`` when None. Existing self-loops keep their weight. As in PyG, a sparse
        matrix gets 1 (or 2) added to each diagonal entry instead.
    normalize : bool
        Whether to scale by the degrees of the targets. Otherwise the weights are used unchanged.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GCNConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GCNConv(8, 4)
    >>> conv(torch.randn(3, 8), edge_index, relu=True).shape
    torch.Size([3, 4])
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, improved: bool = False, cached: bool = False,
        add_self_loops: bool | None = None, normalize: bool = True, bias: bool = True, *,
        flow: str = "source_to_target", aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others("GCNConv", others)
        sum_only("GCNConv", aggr)
        if add_self_loops and not normalize:
            raise value_error(
                "GCNConv", "add_self_loops", "False or None with normalize=False", "True",
                "Add the self-loops to edge_index first",
            )  # fmt: skip
        self.in_channels = channels("GCNConv", "in_channels", in_channels, lazy=True)
        self.out_channels = channels("GCNConv", "out_channels", out_channels)
        self.improved = improved
        self.cached = cached
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self.normalize = normalize
        self.flow = flow_name("GCNConv", flow)
        self.lin = linear(in_channels, out_channels)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; the bias becomes 0."""
        draw(self.lin)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        """Return the convolved features.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels]
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            Messages flow from ``edge_index[0]`` to ``edge_index[1]`` (see ``flow``). A sparse
            tensor is PyG's ``adj_t[target, source]``. A :class:`sparsetile.Plan` is used unchanged:
            nothing is added or normalised. Make it with :func:`gcn_plan`. The same holds for a
            :class:`sparsetile.dist.DistributedPlan`. Then x holds this process's nodes, and the
            gradients of the layer's weights cover only these nodes.
        edge_weight : Tensor [E], optional
            1 for every edge when None. Gradients flow into it. ``Data`` has its own weights.
        relu : bool
            Apply ReLU, inside the product's kernel if the product comes last.

        Returns
        -------
        Tensor [..., nodes, out_channels]
        """
        if isinstance(x, (tuple, list)):
            raise type_error(
                "GCNConv", "x", "one tensor", "a pair",
                "Use SAGEConv for graphs between two sets of nodes",
            )  # fmt: skip
        features("GCNConv", "x", x, self.in_channels)
        if self.in_channels == -1:
            materialise("GCNConv", (self.lin, x))
        given = read_input("GCNConv", edge_index, edge_weight, self.flow)
        nodes = x.shape[-2]
        loops: Loops = "append" if given.kind == "matrix" else "replace"
        loops = loops if self.add_self_loops else "keep"
        counted, known = self.normalize and given.weight is None, None
        if given.weight is None or takes_weighted(x):
            known = find_fresh(
                "GCNConv", given, (nodes, nodes), x.device, flow=self.flow, loops=loops,
                values=fresh_values(SYMMETRIC, x) if counted else None,
            )  # fmt: skip
        if known is not None and isinstance(known[0], FreshGraph):
            out = self._of_fresh(known[0], x, given, relu)
            if out is not None:
                return out
            known = None
        if known is None and self.normalize and self.add_self_loops:
            sampled = find_sampled("GCNConv", given, (nodes, nodes), x.device, flow=self.flow)
            out = None if sampled is None else self._of_sampled(sampled, x, relu)
            if out is not None:
                return out
            if sampled is not None and sampled.has_loops:
                note_loops()
        fill = 2.0 if self.improved else 1.0
        weights = None
        if traces(given, "sum"):
            how = How("GCNConv", self.flow, "convolve", loops, fill, self.normalize)
            graph: Any = TracedEdges(given, (nodes, nodes), how)
        else:
            graph, values_key = known or find_graph(
                "GCNConv", given, (nodes, nodes), x.device, flow=self.flow, loops=loops
            )
            compute = functools.partial(
                convolution_weights, graph, given, values_key, fill, self.normalize, x.dtype
            )
            name: Hashable = ("gcn", fill, self.normalize, x.dtype)
            if given.kind != "edges" or values_key is not None:  # not of the pattern alone
                weights = compute()
                name = None if weights is None else weights.key
            if name is not None and not relu:
                out = mapped_product(
                    graph, "sum", name, lambda: compute() if weights is None else weights, x,
                    self.lin, None, None, self.bias,
                )  # fmt: skip
                if out is not None:
                    return out
            weights = compute() if weights is None else weights
        # The product is cheaper on the narrower side of the linear map.
        if self.out_channels <= x.shape[-1]:
            return graph.aggregate(self.lin(x), weights, bias=self.bias, relu=relu)
        return self._map(graph.aggregate(x, weights), relu)

    def _of_fresh(self, graph: FreshGraph, x: Tensor, given: Given, relu: bool) -> Tensor | None:
        """The convolution of a graph that needs no plan yet; None if there has to be one."""
        weights: Weights | None = None
        name: Hashable = "gcn" if self.normalize else None
        if given.weight is not None:
            fill, dtype = 2.0 if self.improved else 1.0, torch.promote_types(x.dtype, torch.float32)
            weights = graph.convolution_values(given.weight, fill, self.normalize, dtype)
            name = weights.key
        if weights is None or name is not None:
            out = mapped_product(
                graph, "sum", name, lambda: weights, x, self.lin, None, None, self.bias
            )
            if out is not None:
                return out.relu() if relu else out
        if weights is not None:
            if self.out_channels <= x.shape[-1]:
                return graph.aggregate(self.lin(x), weights, bias=self.bias, relu=relu)
            return self._map(graph.aggregate(x, weights), relu)
        if self.out_channels <= x.shape[-1]:
            return graph.reduce_edges(self.lin(x), "sum", self.normalize, self.bias, relu)
        wide = graph.reduce_edges(x, "sum", self.normalize, None, False)
        return None if wide is None else self._map(wide, relu)

    def _of_sampled(self, sampled: SampledGraph, x: Tensor, relu: bool) -> Tensor | None:
        """The convolution of a sampled graph; None if the call is not supported."""
        if self.out_channels <= x.shape[-1]:
            return sampled.convolve(self.lin(x), self.bias, relu)
        wide = sampled.convolve(x, None, False)
        return None if wide is None else self._map(wide, relu)

    def _map(self, x: Tensor, relu: bool) -> Tensor:
        """The linear map after the sum."""
        if is_plain_linear(self.lin):
            out = functional.linear(x, self.lin.weight, self.bias)
        else:
            out = self.lin(x) if self.bias is None else self.lin(x) + self.bias
        return out.relu() if relu else out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


def gcn_plan(
    edge_index: Any, nodes: int, n: int, edge_weight: Tensor | None = None, *,
    improved: bool = False, add_self_loops: bool = True, dtype: torch.dtype | None = None,
    flow: str = "source_to_target", **options: Any,
) -> Plan:  # fmt: skip
    """Plan the matrix that :class:`GCNConv` multiplies by: D^-1/2 (A + I) D^-1/2.

    Pass the plan to the layer instead of ``edge_index``; then the layer does no work on the graph.
    ``torch.compile(fullgraph=True)`` and CUDA graphs need this. It also lets you set a row order.

    Parameters
    ----------
    edge_index : Tensor of int64 [2, E], EdgeIndex, Data or sparse tensor
        Messages flow from ``edge_index[0]`` to ``edge_index[1]`` (see ``flow``): the plan is of
        A[target, source]. A sparse tensor is PyG's ``adj_t[target, source]``.
    nodes : int
    n : int
        Width of the features in the widest product, as in :func:`sparsetile.plan`.
    edge_weight : Tensor [E], optional
        Copied. 1 for every edge when None.
    improved, add_self_loops : bool
        As in :class:`GCNConv`.
    dtype : torch.dtype, optional
        Dtype of the features; torch's default when None.
    flow : {"source_to_target", "target_to_source"}
    **options
        Options of :func:`sparsetile.plan`, such as ``reorder="locality"``.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import gcn_plan
    >>> plan = gcn_plan(torch.tensor([[0, 1], [1, 0]]), nodes=2, n=1)
    >>> plan @ torch.tensor([[2.0], [4.0]])
    tensor([[3.0000],
            [3.0000]])
    """
    matrix = gcn_matrix(
        edge_index, nodes, edge_weight, improved=improved, add_self_loops=add_self_loops,
        dtype=dtype, flow=flow, function="gcn_plan",
    )  # fmt: skip
    return plan(matrix, n, dtype=dtype or torch.get_default_dtype(), **options)


def gcn_matrix(
    edge_index: Any, nodes: int, edge_weight: Tensor | None = None, *, improved: bool = False,
    add_self_loops: bool = True, dtype: torch.dtype | None = None, flow: str = "source_to_target",
    function: str = "gcn_matrix",
) -> CSR:  # fmt: skip
    """Return the matrix of :func:`gcn_plan`, A[target, source], without planning it."""
    flow = flow_name(function, flow)
    given = read_input(function, edge_index, edge_weight, flow)
    if given.kind == "plan":
        raise type_error(function, "edge_index", "a graph", "a Plan", "Pass it to GCNConv")
    loops: Loops = "append" if given.kind == "matrix" else "replace"
    graph, _ = find_graph(
        function, given, (nodes, nodes), given.pattern.device, flow=flow,
        loops=loops if add_self_loops else "keep",
    )  # fmt: skip
    dtype = dtype or torch.get_default_dtype()
    with torch.inference_mode(False), torch.no_grad():
        values = _values(graph, given, 2.0 if improved else 1.0, True, dtype)
        return graph.pattern.with_values(values.to(dtype))


def convolution_weights(
    graph: Graph, given: Given, values_key: Any, fill: float, normalize: bool, dtype: torch.dtype
) -> Weights | None:
    """Return the values of a convolution's matrix; None for a plan, which has its own."""
    if given.kind == "plan":
        return None
    compute = functools.partial(_values, graph, given, fill, normalize, dtype)
    if given.trained:
        return Weights(None, compute())
    return graph.keep_values(("gcn", fill, normalize, dtype), values_key, compute)


def _values(graph: Graph, given: Given, fill: float, normalize: bool, dtype: torch.dtype) -> Tensor:
    """Return A's values, one per entry, at least in float32. Differentiable in the weights."""
    dtype = torch.promote_types(dtype, torch.float32)
    weight = graph.edge_weights(given, fill)
    if weight is not None:
        weight_map = graph.weight_map(differentiable=normalize and weight.requires_grad)
        if not normalize:
            return weight_map.entries(weight.to(dtype), fill)
        return normalised_values(weight_map, weight, fill, dtype, fused=plain_call())
    if graph.multiplicity is not None:
        values = graph.multiplicity.to(dtype)
    else:
        values = torch.ones(graph.csr.nnz, dtype=dtype, device=graph.csr.device)
    return scaled_by_degree(graph.csr, values) if normalize else values
