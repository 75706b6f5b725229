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
from sparsetile.nn.edge_features import edge_softmax, features_with_loops, scores_in_chunks
from sparsetile.nn.graph import Graph
from sparsetile.nn.heads import HeadsLayer
from sparsetile.nn.lazy import linear, materialise

__all__ = ["GATv2Conv"]


class GATv2Conv(HeadsLayer):
    """Graph attention with the arguments, state dict and results of PyG's ``GATv2Conv``.

    Messages, self-loops and the graph are those of :class:`GATConv`. On a GPU, its kernels are
    fused in the same calls, except with features of parallel edges and under torch.compile. In the
    other calls the layer computes the scores of some edges at a time by torch operations, whose
    order of additions may vary, and one product per head.

    Parameters
    ----------
    share_weights : bool
        Whether sources and targets have the same linear map.
    others
        Those of :class:`GATConv`.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GATv2Conv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GATv2Conv(8, 4, heads=2, edge_dim=3)
    >>> conv(torch.randn(3, 8), edge_index, torch.randn(4, 3)).shape
    torch.Size([3, 8])
    """

    _name = "GATv2Conv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1,
        concat: bool = True, negative_slope: float = 0.2, dropout: float = 0.0,
        add_self_loops: bool = True, edge_dim: int | None = None, fill_value: Any = "mean",
        bias: bool = True, share_weights: bool = False, residual: bool = False, *,
        flow: str = "source_to_target", aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, flow, aggr, others
        )
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value = fill_value
        self.share_weights, self.residual = share_weights, residual
        width = heads * out_channels
        self.lin_l = linear(self._widths[0], width, bias)
        self.lin_r = self.lin_l if share_weights else linear(self._widths[1], width, bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, width)
        total = self._result_width()
        self.res = linear(self._widths[1], total) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(total)) if bias else None)
        self.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the new features of the targets, which have features here.

        Parameters and results are those of :meth:`GATConv.forward`.
        """
        x_src, x_dst, graph, features = self._read(
            x, edge_index, edge_attr, fresh=not return_attention_weights
        )
        x_dst = self._of_targets(x_dst)
        if self._is_lazy:
            of_nodes = (self.res, x_dst), (self.lin_l, x_src), (self.lin_r, x_dst)
            materialise("GATv2Conv", *of_nodes, (self.lin_edge, features))
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
