"""Graph attention: each target weighs its neighbours by a softmax over its incoming edges.

Scores are one number per edge and head, gathered from one number per node and head. Features of
edges add one more, which is linear in them. Nothing of edges × features is stored.

On a GPU, three kernels compute the scores' terms, the softmax and the sum of messages for all
heads, and three more all gradients (``layers/graph_attention.py``). Each recomputes the attention
from numbers per node and stores it nowhere. The order of additions is fixed. Otherwise, and if the
caller wants the attention itself, torch computes it as [edges, heads], and each head is one product
with the attention as A's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.layers import graph_attention as fused
from sparsetile.layers.edge_attention import Entries, attend_entries
from sparsetile.nn.edge_features import edge_softmax, features_with_loops
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.graph import Graph
from sparsetile.nn.heads import HeadsLayer
from sparsetile.nn.lazy import linear, materialise

__all__ = ["GATConv"]


class GATConv(HeadsLayer):
    """Graph attention with the arguments, state dict and results of PyG's ``GATConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. Attention sums to 1 over the edges that enter a
    target; each parallel edge counts. The layer plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change.

    On a GPU, with float32, float16 or bfloat16 features, fused kernels compute all heads and their
    gradients. Results are bit-identical in every run, also with dropout. They have no second
    derivatives. On the CPU, for float64, with ``return_attention_weights=True``, in transforms of
    ``torch.func`` and in forward mode, the layer uses torch operations, whose order of additions
    may vary, and one product per head.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets, which then have separate weights; -1:
        that of the first x.
    out_channels : int
        Width of one head.
    heads : int
    concat : bool
        Whether to concatenate the heads. Otherwise the layer returns their mean.
    negative_slope : float
        Slope of the leaky ReLU of the scores.
    dropout : float
        Probability of setting an attention weight to 0 in training.
    add_self_loops : bool
        Whether to replace self-loops by one per node. Must be False for a plan.
    edge_dim : int, optional
        Width of the edges' features; -1: that of the first ones.
    fill_value : float, Tensor or str
        Features of added self-loops, or how to reduce those of the edges that enter the node:
        "mean", "add", "max", "min" or "mul".
    bias : bool
    residual : bool
        Whether to add a linear map of the target's features.
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GATConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GATConv(8, 4, heads=2)
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 8])
    """

    lin: nn.Linear | None
    lin_src: nn.Linear | None
    lin_dst: nn.Linear | None
    _name = "GATConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1,
        concat: bool = True, negative_slope: float = 0.2, dropout: float = 0.0,
        add_self_loops: bool = True, edge_dim: int | None = None, fill_value: Any = "mean",
        bias: bool = True, residual: bool = False, *, flow: str = "source_to_target",
        aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, flow, aggr, others
        )
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value, self.residual = fill_value, residual
        width = heads * out_channels
        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, (tuple, list)):
            self.lin_src, self.lin_dst = (linear(each, width) for each in self._widths)
        else:
            self.lin = linear(self._widths[0], width)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None
        if edge_dim is not None:
            self.lin_edge = linear(edge_dim, width)
            self.att_edge = nn.Parameter(torch.empty(1, heads, out_channels))
        else:
            self.register_parameter("att_edge", None)
        total = self._result_width()
        self.res = linear(self._widths[1], total) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(total)) if bias else None)
        self.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None, return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` or the graph gives the number of
            targets; if neither does, there are as many as sources, as in PyG.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``. Only the pattern counts: values of a
            matrix and weights of ``Data`` are not used.
        edge_attr : Tensor [E, edge_dim], optional
            Features of the edges. ``Data`` has its own.
        size : (sources, targets), optional
        return_attention_weights : bool, optional
            Whether to return the attention too.

        Returns
        -------
        Tensor [targets, heads · out_channels], or [targets, out_channels] without ``concat``
            With ``return_attention_weights``, also returns ``(edge_index, attention)``: the edges
            that were used, self-loops last, and one row of attention [heads] per edge.
        """
        x_src, x_dst, graph, features = self._read(
            x, edge_index, edge_attr, size, fresh=not return_attention_weights
        )
        first = self.lin if self.lin is not None else self.lin_src
        second = self.lin if self.lin is not None else self.lin_dst
        if self._is_lazy:
            maps = (self.res, x_dst), (first, x_src), (second, x_dst), (self.lin_edge, features)
            materialise("GATConv", *maps)
        of_edge = None if features is None else self._of_edges(graph, features)
        residual = self.res(x_dst) if self.res is not None and x_dst is not None else None
        assert first is not None and second is not None
        messages, targets = first(x_src), None
        if x_dst is not None:
            same = isinstance(x, Tensor) and first is second
            targets = messages if same else second(x_dst)
        if not return_attention_weights and self._fuses(graph, messages, of_edge):
            out = self._attend(graph, messages, targets, of_edge)
            return out if residual is None else out + residual
        graph = graph.canonical if isinstance(graph, FreshGraph) else graph
        attention = self._attention(graph, messages, targets, of_edge)
        out = self._gather(graph, messages, attention, self.bias)
        if residual is not None:
            out = out + residual
        return (out, self._returned(graph, attention)) if return_attention_weights else out

    def _of_edges(self, graph: Graph, features: Tensor) -> Tensor:
        """Return the edges' terms in the scores, [edges, heads], with those of self-loops."""
        assert self.lin_edge is not None and self.att_edge is not None
        wide = features_with_loops(
            graph, features, self.fill_value, self.flow == "source_to_target"
        )
        # The map and the dot product are one smaller map.
        by_head = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        return wide @ (by_head * self.att_edge.view(self.heads, -1, 1)).sum(1).t()

    def _scores(
        self, dots: Callable[..., list[Tensor]], messages: Tensor, targets: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the terms of sources and of targets in the scores, [nodes, heads]."""
        first, second = (each.view(self.heads, -1) for each in (self.att_src, self.att_dst))
        by_head = self._by_head(messages)
        if targets is messages:
            of_source, of_target = dots(by_head, first, second)
            return of_source, of_target
        (of_source,) = dots(by_head, first)
        return of_source, None if targets is None else dots(self._by_head(targets), second)[0]

    def _attend(
        self, graph: Graph, messages: Tensor, targets: Tensor | None, of_edge: Tensor | None
    ) -> Tensor:
        """Return the weighted sums of messages, heads joined, bias added, by the fused kernels."""
        scored = messages
        messages = self._cast(graph, messages)
        scales = self._dropout_scales(graph, messages.device)
        first, second, own = self.att_src, self.att_dst, self.bias
        tracked = messages.requires_grad or first.requires_grad or second.requires_grad
        if targets is not None and targets is not scored:
            tracked = tracked or targets.requires_grad
        tracked = tracked or (of_edge is not None and of_edge.requires_grad)
        # A tracer reads the flat plan once, whether or not the first call needs a gradient.
        needs = torch.is_grad_enabled() and (tracked or torch.compiler.is_compiling())
        flat = graph.rows_plan(self.heads * self.out_channels, needs)
        # The mean of one head is that head.
        joined = self.concat or self.heads == 1
        bias = own if joined else None
        if of_edge is not None:
            of_source, of_target = self._scores(fused.node_scores, scored, targets)
            out = attend_entries(
                Entries(flat, graph.rows), messages, graph.to_entries(of_edge).float(),
                of_source=of_source, of_target=of_target, scales=scales, bias=bias,
                slope=self.negative_slope,
            )  # fmt: skip
            return self._mean(out, own)
        counts = graph.edges_of_entries()
        if targets is messages:  # one set of nodes, and no other type than that of the scores
            out = fused.attention_layer(
                flat, messages, first, second, counts, scales, bias, self.negative_slope
            )
        else:
            terms = self._scores(fused.node_scores, scored, targets)
            out = fused.graph_attention(
                flat, self._by_head(messages), *terms, counts, scales, bias, self.negative_slope
            )
        return self._mean(out, own)

    def _attention(
        self, graph: Graph, messages: Tensor, targets: Tensor | None, of_edge: Tensor | None
    ) -> Tensor:
        """Return the attention of each edge and head, [edges, heads]."""
        source, target = graph.edges
        of_source, of_target = self._scores(_dots, messages, targets)
        scores = of_source.index_select(0, source)
        if of_target is not None:
            scores = scores + of_target.index_select(0, target)
        if of_edge is not None:
            scores = scores + of_edge
        scores = functional.leaky_relu(scores, self.negative_slope)
        attention = edge_softmax(graph, scores)
        return functional.dropout(attention, p=self.dropout, training=self.training)


def _dots(messages: Tensor, *vectors: Tensor) -> list[Tensor]:
    """As ``node_scores``, by torch's operations."""
    wide = torch.promote_types(messages.dtype, torch.float32)
    return [(messages * vector).sum(-1).to(wide) for vector in vectors]
