"""What attention layers share: their graph, softmax, weighted sums, and what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.nn import arguments
from sparsetile.nn.cache import find_graph
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, pair_of, read_input

__all__ = ["HeadsLayer", "edge_softmax"]


class HeadsLayer(nn.Module):
    """Base of the attention layers; subclasses set these attributes."""

    heads: int
    out_channels: int
    concat: bool
    add_self_loops: bool
    flow: str
    _name: str
    _widths: tuple[int, int]

    def _nodes(
        self, x: Any, size: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
        """Return the features of sources and targets, checked, and how many there are."""
        sources, targets, sizes = pair_of(self._name, x, size, self.flow)
        self._check_nodes(sources, self._widths[0])
        if targets is not None and (targets is not sources or self._widths[0] != self._widths[1]):
            self._check_nodes(targets, self._widths[1])
        return sources, targets, sizes

    def _check_nodes(self, nodes: Tensor, width: int) -> None:
        arguments.features(self._name, "x", nodes, width)
        if nodes.dim() != 2:
            raise value_error(
                self._name, "x", f"of shape [nodes, {width}]", tuple(nodes.shape),
                "Call the layer once for each matrix of features",
            )  # fmt: skip

    def _graph(
        self, edge_index: Any, sizes: tuple[int, int], device: torch.device
    ) -> tuple[Graph, Given]:
        """Return the graph of a call, with self-loops if the layer adds them."""
        given = read_input(self._name, edge_index, None, self.flow).without_weight()
        if given.kind == "plan":
            self._check_plan(given)
        graph, _ = find_graph(
            self._name, given, sizes, device, flow=self.flow,
            loops="replace" if self.add_self_loops else "keep",
        )  # fmt: skip
        return graph, given

    def _check_plan(self, given: Given) -> None:
        if isinstance(given.pattern, SharedPlan):
            raise type_error(
                self._name, "edge_index", "a graph of this process", type(given.pattern).__name__,
                "Scores of nodes on other processes are not exchanged: use GCNConv, SAGEConv or "
                "GINConv with a distributed plan",
            )  # fmt: skip
        if self.add_self_loops:
            raise value_error(
                self._name, "add_self_loops", "False with a Plan", "True",
                "Plan a matrix that has its self-loops, and make the layer with "
                "add_self_loops=False",
            )  # fmt: skip
        if given.pattern.column_order is not None:
            raise value_error(
                self._name, "edge_index", "a plan without reordered columns",
                "one with reorder_columns=True", "Plan without reorder_columns",
            )  # fmt: skip

    def _by_head(self, messages: Tensor) -> Tensor:
        return messages.view(-1, self.heads, self.out_channels)

    def _gather(
        self, graph: Graph, messages: Tensor, attention: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the sums of messages weighted by [edges, heads] attention, bias added.

        Each head is one product with the attention as A's values. Heads are joined with ``concat``,
        otherwise this returns their mean.
        """
        # Permuted to A's order once for all heads. A given plan uses the order of its own edges.
        if graph.planned is None:
            attention = graph.to_entries(attention)
        by_head, messages = attention.t().contiguous(), self._by_head(messages)
        biases: tuple[Tensor | None, ...] = (None,) * self.heads
        if self.concat and bias is not None:
            biases = bias.split(self.out_channels)
        parts = [
            graph.aggregate(messages[:, head], Weights(None, by_head[head]), bias=biases[head])
            for head in range(self.heads)
        ]
        if self.concat:
            return parts[0] if self.heads == 1 else torch.cat(parts, dim=-1)
        out = torch.stack(parts).mean(0)
        return out if bias is None else out + bias

    def _returned(self, graph: Graph, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges that were used, as PyG numbers them, with their attention."""
        source, target = graph.edges
        pair = (source, target) if self.flow == "source_to_target" else (target, source)
        return torch.stack(pair), attention

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def edge_softmax(scores: Tensor, target: Tensor, targets: int) -> Tensor:
    """Return the softmax of [edges, heads] over the edges of each target."""
    where = target[:, None].expand_as(scores)
    with torch.no_grad():
        highest = scores.new_zeros(targets, scores.shape[1])
        highest.scatter_reduce_(0, where, scores, "amax", include_self=False)
    raised = (scores - highest.index_select(0, target)).exp()
    total = scores.new_zeros(targets, scores.shape[1]).index_add(0, target, raised)
    return raised / (total.index_select(0, target) + 1e-16)
