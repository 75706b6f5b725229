"""Graph attention whose scores are dot products of a target's query and its sources' keys.

    score = q[target] · (k[source] + W_e e) / sqrt(width)     message = v[source] + W_e e

Scores are one number per edge and head; nothing of edges × features is stored. The edges' part of
the messages is mapped after the sum: W_e · (sum of attention · e). On a GPU, kernels compute the
scores, their softmax and the sum of messages (``layers/edge_attention.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.errors import type_error
from sparsetile.layers.edge_attention import dot_scores
from sparsetile.layers.head_sums import head_dots, head_sums
from sparsetile.nn.edge_features import (
    dot_features,
    edge_softmax,
    entry_softmax,
    scores_in_chunks,
    weighted_features,
)
from sparsetile.nn.graph import Graph
from sparsetile.nn.heads import HeadsLayer
from sparsetile.nn.lazy import draw_maps, linear, materialise

__all__ = ["TransformerConv"]


class TransformerConv(HeadsLayer):
    """Graph transformer with the arguments, state dict and results of PyG's ``TransformerConv``.

    Messages and the graph are those of :class:`GATConv`, but no self-loops are added.

    On a GPU, with float32, float16 or bfloat16 features, fused kernels compute the scores and, if
    edges have no features, the attention of all heads and its gradients. Results are bit-identical
    in every run, also with dropout. They have no second derivatives. With features each head's sum
    is one product. On the CPU, for float64, under torch.compile, in transforms of ``torch.func``
    and in forward mode, the layer computes the scores of some edges at a time by torch operations,
    whose order of additions may vary.

    Parameters
    ----------
    beta : bool
        Whether a learnt gate mixes the sums with the target's own features, which are otherwise
        added. Needs ``root_weight``.
    edge_dim : int, optional
        Width of the edges' features, which are added to keys and values.
    root_weight : bool
        Whether to add a linear map of the target's features.
    others
        Those of :class:`GATConv`.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import TransformerConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = TransformerConv(8, 4, heads=2, beta=True)
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 8])
    """

    lin_edge: nn.Linear | None
    lin_beta: nn.Linear | None
    _name = "TransformerConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1,
        concat: bool = True, beta: bool = False, dropout: float = 0.0, edge_dim: int | None = None,
        bias: bool = True, root_weight: bool = True, *, flow: str = "source_to_target",
        aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, heads, concat, dropout, edge_dim, flow, aggr, others
        )
        self.root_weight, self.beta = root_weight, beta and root_weight
        self.add_self_loops = False
        of_sources, of_targets = self._widths
        width = heads * out_channels
        total = self._result_width()
        self.lin_key = linear(of_sources, width, bias, uniform=True)
        self.lin_query = linear(of_targets, width, bias, uniform=True)
        self.lin_value = linear(of_sources, width, bias, uniform=True)
        self.lin_edge = self.lin_beta = None
        if edge_dim is not None:
            self.lin_edge = linear(edge_dim, width, uniform=True)
        self.lin_skip = linear(of_targets, total, bias, uniform=True)
        if self.beta:
            self.lin_beta = nn.Linear(3 * total, 1, bias=False)
        self.reset_parameters()  # PyG draws twice, too: the same seed gives the same weights

    def reset_parameters(self) -> None:
        """Draw new weights."""
        draw_maps(self, uniform=True)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the new features of the targets, which have features here.

        Parameters and results are those of :meth:`GATConv.forward`, except:

        Parameters
        ----------
        edge_attr : Tensor [E, edge_dim]
            Needed with ``edge_dim``.
        return_attention_weights : bool, optional
            As in PyG, False returns the attention as well; only None does not. It is that before
            dropout.
        """
        x_src, x_dst, graph, features = self._read(
            x, edge_index, edge_attr, fresh=return_attention_weights is None
        )
        x_dst = self._of_targets(x_dst)
        if features is None and self.lin_edge is not None:
            raise type_error(
                "TransformerConv", "edge_attr", "a tensor with edge_dim", "None",
                "Give the features of the edges",
            )  # fmt: skip
        if self._is_lazy:
            of_nodes = (self.lin_query, x_dst), (self.lin_key, x_src), (self.lin_value, x_src)
            skip = self.lin_skip if self.root_weight else None
            materialise("TransformerConv", *of_nodes, (self.lin_edge, features), (skip, x_dst))
        query, key, value = self.lin_query(x_dst), self.lin_key(x_src), self.lin_value(x_src)
        whole = return_attention_weights is None and features is None
        if whole and self._fuses_entries(graph, value, None):
            return self._with_targets(self._attend(graph, query, key, value), x_dst)
        if return_attention_weights is None and self._fuses_entries(graph, value, features):
            out = self._attend_features(graph, query, key, value, features)  # type: ignore[arg-type]
            return self._with_targets(out, x_dst)
        attention = self._attention(graph, query, key, features)
        attention = attention.to(value.dtype)
        dropped = functional.dropout(attention, p=self.dropout, training=self.training)
        out = self._gather(graph, value, dropped, None)
        if features is not None:
            out = out + self._of_edges(weighted_features(graph, dropped, features))
        out = self._with_targets(out, x_dst)
        return out if return_attention_weights is None else (out, self._returned(graph, attention))

    def _with_targets(self, out: Tensor, targets: Tensor) -> Tensor:
        """Add or mix in the map of the targets' own features."""
        if not self.root_weight:
            return out
        own: Tensor = self.lin_skip(targets)
        if self.lin_beta is None:
            return out + own
        gate = self.lin_beta(torch.cat([out, own, out - own], -1)).sigmoid()
        mixed: Tensor = gate * own + (1 - gate) * out
        return mixed

    def _attend(self, graph: Graph, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the weighted sums of values, heads joined, by the fused kernels."""
        query, key, value = (self._cast(graph, each) for each in (query, key, value))
        entries = self._entries(graph, query, key, value)
        scores = dot_scores(entries, query, key, self.heads, self.out_channels**-0.5)
        return self._attend_scores(graph, entries, value, scores, None)

    def _attend_features(
        self, graph: Graph, query: Tensor, key: Tensor, value: Tensor, features: Tensor
    ) -> Tensor:
        """Return the weighted sums of values and edges' features, all heads in each launch."""
        assert self.lin_edge is not None
        query, key, value = (self._cast(graph, each) for each in (query, key, value))
        entries = self._entries(graph, query, key, value)
        scale, edges = self.out_channels**-0.5, graph.edges_of_rows
        weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1).float()
        # q · W_e e = (q · W_e) · e, with one factor per target. Autocast rounds it.
        of_target = torch.einsum("thc,hcd->thd", self._by_head(query).float() * scale, weight)
        of_target, features = of_target.flatten(1).float(), features.float()
        scores = dot_scores(entries, query, key, self.heads, scale)
        scores = scores + head_dots(entries, of_target, features, edges, self.heads)
        attention = entry_softmax(graph, scores)
        scales = self._dropout_scales(graph, value.device)
        attention = attention if scales is None else attention * scales
        out = self._mean(head_sums(entries, attention, value, None), None)
        sums = head_sums(entries, attention, features, edges).to(self.lin_edge.weight.dtype)
        return out + self._of_edges(sums.view(sums.shape[0], self.heads, -1)).to(out.dtype)

    def _scores(self, graph: Graph, query: Tensor, key: Tensor, features: Tensor | None) -> Tensor:
        """Return the scores of all edges, [edges, heads]."""
        scale = self.out_channels**-0.5
        if self._fuses_entries(graph, key, None):
            query, key = self._cast(graph, query), self._cast(graph, key)
            entries = self._entries(graph, query, key)
            scores = dot_scores(entries, query, key, self.heads, scale)
            entry_map = graph.csr.entry_map
            scores = scores if entry_map is None else scores.index_select(0, entry_map)
            if features is None or self.lin_edge is None:
                return scores
            # q · W_e e = (q · W_e) · e, with one factor per target.
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1).float()
            of_target = torch.einsum("thc,hcd->thd", self._by_head(query).float() * scale, weight)
            return scores + dot_features(graph, of_target, features.float())

        def score(first: Tensor, second: Tensor, more: Tensor | None) -> Tensor:
            if more is not None and self.lin_edge is not None:
                first = first + self.lin_edge(more)
            return (self._by_head(first) * self._by_head(second)).sum(-1)

        return scores_in_chunks(score, graph, key, query * scale, features)

    def _attention(
        self, graph: Graph, query: Tensor, key: Tensor, features: Tensor | None
    ) -> Tensor:
        """Return the attention of each edge and head, [edges, heads]."""
        scores = self._scores(graph, query, key, features)
        return edge_softmax(graph, scores)

    def _of_edges(self, sums: Tensor) -> Tensor:
        """Return the map of the edges' features after their sum, heads joined."""
        assert self.lin_edge is not None
        weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        by_head = torch.einsum("thd,hcd->thc", sums, weight)
        return by_head.flatten(1) if self.concat else by_head.mean(1)
