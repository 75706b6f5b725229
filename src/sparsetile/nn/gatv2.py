"""Graph attention whose scores are a vector times a leaky ReLU of sums of both nodes' features.

    score = att · leaky(W_l x[source] + W_r x[target] + W_e e)

Scores are one number per edge and head; nothing of edges × features is stored. On a GPU, kernels
compute them, their softmax and the sum of messages (``layers/edge_attention.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.layers.edge_attention import bent_scores
from sparsetile.nn import arguments
from sparsetile.nn.edge_features import (
    edge_features,
    edge_softmax,
    features_with_loops,
    scores_in_chunks,
)
from sparsetile.nn.graph import Graph
from sparsetile.nn.heads import HeadsLayer

__all__ = ["GATv2Conv"]


class GATv2Conv(HeadsLayer):
    """Graph attention with the arguments, state dict and results of PyG's ``GATv2Conv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. Attention sums to 1 over the edges that enter a
    target; each parallel edge counts. The layer plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change.

    On a GPU, with float32, float16 or bfloat16 features, fused kernels compute all heads and their
    gradients. Results are bit-identical in every run, also with dropout. They have no second
    derivatives. On the CPU, for float64, with ``return_attention_weights=True``, with features of
    parallel edges, under torch.compile, in transforms of ``torch.func`` and in forward mode, the
    layer computes the scores of some edges at a time by torch operations, whose order of additions
    may vary, and one product per head.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets.
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
        Width of the edges' features.
    fill_value : float, Tensor or str
        Features of added self-loops, or how to reduce those of the edges that enter the node:
        "mean", "add", "max", "min" or "mul".
    bias : bool
    share_weights : bool
        Whether sources and targets have the same linear map.
    residual : bool
        Whether to add a linear map of the target's features.
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GATv2Conv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GATv2Conv(8, 4, heads=2, edge_dim=3)
    >>> conv(torch.randn(3, 8), edge_index, torch.randn(4, 3)).shape
    torch.Size([3, 8])
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1,
        concat: bool = True, negative_slope: float = 0.2, dropout: float = 0.0,
        add_self_loops: bool = True, edge_dim: int | None = None, fill_value: Any = "mean",
        bias: bool = True, share_weights: bool = False, residual: bool = False, *,
        flow: str = "source_to_target", aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._name = "GATv2Conv"
        arguments.refuse_others("GATv2Conv", others)
        arguments.sum_only("GATv2Conv", aggr)
        self.in_channels = in_channels
        self._widths = arguments.width_pair("GATv2Conv", in_channels)
        self.out_channels = arguments.channels("GATv2Conv", "out_channels", out_channels)
        self.heads = arguments.channels("GATv2Conv", "heads", heads)
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.edge_dim, self.fill_value = edge_dim, fill_value
        self.share_weights, self.residual = share_weights, residual
        self.flow = arguments.flow_name("GATv2Conv", flow)
        width = heads * out_channels
        self.lin_l = nn.Linear(self._widths[0], width, bias=bias)
        self.lin_r = self.lin_l
        if not share_weights:
            self.lin_r = nn.Linear(self._widths[1], width, bias=bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None
        if edge_dim is not None:
            arguments.channels("GATv2Conv", "edge_dim", edge_dim)
            self.lin_edge = nn.Linear(edge_dim, width, bias=False)
        total = width if concat else out_channels
        self.res = nn.Linear(self._widths[1], total, bias=False) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(total)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; the bias after the sum becomes 0."""
        for layer in (self.lin_l, self.lin_r, self.lin_edge, self.res):
            if layer is not None:
                arguments.glorot(layer.weight)
                if layer.bias is not None:
                    bound = layer.in_features**-0.5
                    nn.init.uniform_(layer.bias, -bound, bound)
        arguments.glorot(self.att)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [nodes, in_channels], or a pair of those for sources and targets
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``. Only the pattern counts: values of a
            matrix and weights of ``Data`` are not used.
        edge_attr : Tensor [E, edge_dim], optional
            Features of the edges. ``Data`` has its own.
        return_attention_weights : bool, optional
            Whether to return the attention too.

        Returns
        -------
        Tensor [targets, heads · out_channels], or [targets, out_channels] without ``concat``
            With ``return_attention_weights``, also returns ``(edge_index, attention)``: the edges
            that were used, self-loops last, and one row of attention [heads] per edge.
        """
        x_src, x_dst, sizes = self._nodes(x)
        assert x_dst is not None  # a pair without targets needs a size
        graph, given = self._graph(edge_index, sizes, x_src.device)
        count = given.pattern.shape[1] if given.kind == "edges" else graph.edge_count
        features = edge_features("GATv2Conv", edge_attr, self.edge_dim, edge_index, given, count)
        if features is not None:
            by_target = self.flow == "source_to_target"
            features = features_with_loops(graph, features, self.fill_value, by_target)
        messages = self.lin_l(x_src)
        shared = self.share_weights and x_src is x_dst
        targets = messages if shared else self.lin_r(x_dst)
        own = None if self.res is None else self.res(x_dst)
        if not return_attention_weights and self._fuses_entries(graph, messages, features):
            out = self._attend(graph, messages, targets, features)
            return out if own is None else out + own
        attention = self._attention(graph, messages, targets, features)
        out = self._gather(graph, messages, attention, self.bias)
        if own is not None:
            out = out + own
        return (out, self._returned(graph, attention)) if return_attention_weights else out

    def _attention(
        self, graph: Graph, messages: Tensor, targets: Tensor, features: Tensor | None
    ) -> Tensor:
        """Return the attention of each edge and head, [edges, heads]."""

        def score(first: Tensor, second: Tensor, more: Tensor | None) -> Tensor:
            total = first + second
            if more is not None and self.lin_edge is not None:
                total = total + self.lin_edge(more)
            bent = functional.leaky_relu(self._by_head(total), self.negative_slope)
            return (bent * self.att).sum(-1)

        scores = scores_in_chunks(score, graph, messages, targets, features)
        attention = edge_softmax(graph, scores)
        return functional.dropout(attention, p=self.dropout, training=self.training)

    def _attend(
        self, graph: Graph, messages: Tensor, targets: Tensor, features: Tensor | None
    ) -> Tensor:
        """Return the weighted sums of messages, heads joined, bias added, by the fused kernels."""
        messages, targets = self._cast(graph, messages), self._cast(graph, targets)
        weight = None if features is None or self.lin_edge is None else self.lin_edge.weight
        if features is not None:
            features = graph.to_entries(features)
        entries = self._entries(graph, messages, targets, self.att, features, weight)
        scores = bent_scores(
            entries, targets, messages, self.att[0], self.negative_slope, features, weight
        )
        return self._attend_scores(graph, entries, messages, scores, self.bias)
