"""What attention layers share: their graph, softmax, weighted sums, and what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from sparsetile.core.errors import type_error, value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.core.settings import entry_limit
from sparsetile.layers.edge_attention import Entries, attend_entries
from sparsetile.layers.graph_attention import ATTENTION_DTYPES
from sparsetile.nn import arguments
from sparsetile.nn.cache import find_graph
from sparsetile.nn.edge_features import edge_features
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, pair_of, read_input
from sparsetile.nn.lazy import draw_maps
from sparsetile.plan.inference import InferencePlan
from sparsetile.plan.modes import plain_call, transforming
from sparsetile.plan.operands import in_plan_dtype
from sparsetile.plan.plan import Plan

__all__ = ["HeadsLayer"]

# Limits of the attention kernels: devices, slabs of columns in a grid.
FUSED_ON, _MOST_COLUMNS = "cuda", 2**20


class HeadsLayer(nn.Module):
    """Base of the attention layers; subclasses set these attributes and make the maps."""

    add_self_loops: bool
    bias: nn.Parameter | None
    _name: str

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int, concat: bool,
        dropout: float, edge_dim: int | None, flow: str, aggr: str, others: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        arguments.refuse_others(self._name, others)
        arguments.sum_only(self._name, aggr)
        self.in_channels = in_channels
        self._widths = arguments.width_pair(self._name, in_channels)
        self.out_channels = arguments.channels(self._name, "out_channels", out_channels)
        self.heads = arguments.channels(self._name, "heads", heads)
        self.concat, self.dropout = concat, dropout
        self.edge_dim = edge_dim
        if edge_dim is not None:
            arguments.channels(self._name, "edge_dim", edge_dim, lazy=True)
        self.flow = arguments.flow_name(self._name, flow)

    def _result_width(self) -> int:
        return self.heads * self.out_channels if self.concat else self.out_channels

    def reset_parameters(self) -> None:
        """Draw new weights; the bias after the sum becomes 0."""
        draw_maps(self)
        for name, parameter in self._parameters.items():
            if parameter is not None and name != "bias":
                arguments.glorot(parameter)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _read(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None,
        size: tuple[int, int] | None = None, fresh: bool = False,
    ) -> tuple[Tensor, Tensor | None, Graph, Tensor | None]:  # fmt: skip
        """Return the features of sources and targets, the graph, and the edges' features.

        ``fresh``: whether the layer takes a graph that needs no plan, of eager calls on a GPU.
        """
        given = read_input(self._name, edge_index, None, self.flow).without_weight()
        sources, targets, sizes = pair_of(self._name, x, size, self.flow, given)
        self._check_nodes(sources, self._widths[0])
        if targets is not None and (targets is not sources or self._widths[0] != self._widths[1]):
            self._check_nodes(targets, self._widths[1])
        fresh = fresh and edge_attr is None and self._fuses_fresh(sources)
        graph = self._graph(given, sizes, sources.device, fresh)
        count = given.pattern.shape[1] if given.kind == "edges" else graph.edge_count
        features = edge_features(self._name, edge_attr, self.edge_dim, edge_index, given, count)
        return sources, targets, graph, features

    @property
    def _is_lazy(self) -> bool:
        """Whether a map had no width when the layer was made."""
        return -1 in self._widths or self.edge_dim == -1

    def _of_targets(self, targets: Tensor | None) -> Tensor:
        if targets is None:
            raise type_error(
                self._name, "x", "a pair of tensors", "a pair without features of targets",
                "Give the features of the targets: scores depend on them",
            )  # fmt: skip
        return targets

    def _check_nodes(self, nodes: Tensor, width: int) -> None:
        arguments.features(self._name, "x", nodes, width)
        if nodes.dim() != 2:
            raise value_error(
                self._name, "x", f"of shape [nodes, {width}]", tuple(nodes.shape),
                "Call the layer once for each matrix of features",
            )  # fmt: skip

    def _graph(
        self, given: Given, sizes: tuple[int, int], device: torch.device, fresh: bool
    ) -> Graph:
        """Return the graph of a call, with self-loops if the layer adds them.

        ``fresh``: whether it may be one that needs no plan.
        """
        if given.kind == "plan":
            self._check_plan(given)
        graph, _ = find_graph(
            self._name, given, sizes, device, flow=self.flow,
            loops="replace" if self.add_self_loops else "keep", fresh=fresh,
        )  # fmt: skip
        return graph

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

    def _fuses(self, graph: Graph, messages: Tensor, of_edge: Tensor | None = None) -> bool:
        """Whether the fused kernels support this call; ``of_edge``: what differs from edge to edge.

        Entries of A are sums of parallel edges, so that no two of those may differ.
        """
        return (
            isinstance(graph, FreshGraph)  # for which it was asked before
            or (
                messages.device.type == FUSED_ON
                and messages.dtype in ATTENTION_DTYPES
                and self.heads * self.out_channels <= _MOST_COLUMNS
                and graph.csr.nnz < entry_limit()
                and not isinstance(graph.planned, InferencePlan)  # it has no rows
                and not transforming()
                and forward_ad._current_level < 0
                and (of_edge is None or (plain_call() and graph.edge_count == graph.csr.nnz))
            )
        )

    def _fuses_fresh(self, sources: Tensor) -> bool:
        """Whether the fused kernels surely support a call whose scores come from nodes alone."""
        return (
            self.edge_dim is None
            and not (self.training and self.dropout)
            and sources.dtype in ATTENTION_DTYPES
            and self.heads * self.out_channels <= _MOST_COLUMNS
            and plain_call()
            and not transforming()
            and not torch.compiler.is_compiling()
            and forward_ad._current_level < 0
        )

    def _fuses_entries(self, graph: Graph, messages: Tensor, of_edge: Tensor | None) -> bool:
        """As :meth:`_fuses`, for scores of entries, which tracers do not see."""
        return plain_call() and self._fuses(graph, messages, of_edge)

    def _cast(self, graph: Graph, messages: Tensor) -> Tensor:
        """Return messages in the type of a given plan, or in autocast's."""
        if isinstance(graph.planned, Plan):
            return in_plan_dtype(graph.planned, messages, "run", "B")
        if torch.is_autocast_enabled(messages.device.type):
            return messages.to(torch.get_autocast_dtype(messages.device.type))
        return messages

    def _dropout_scales(self, graph: Graph, device: torch.device) -> Tensor | None:
        """Return the factors of dropout, [entries, heads]; None without dropout."""
        if not (self.training and self.dropout):
            return None
        # Same random numbers as dropout of [edges, heads] attention.
        ones = torch.ones(graph.edge_count, self.heads, dtype=torch.float32, device=device)
        return graph.to_entries(functional.dropout(ones, p=self.dropout))

    def _entries(self, graph: Graph, *operands: Tensor | None) -> Entries:
        """Return the rows of A, with the transpose if an operand or weight needs a gradient."""
        tracked = any(each is not None and each.requires_grad for each in operands)
        needs = torch.is_grad_enabled() and tracked
        return Entries(graph.rows_plan(self.heads * self.out_channels, needs), graph.rows)

    def _attend_scores(
        self, graph: Graph, entries: Entries, messages: Tensor, scores: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the sums of messages weighted by the softmax of scores [entries, heads]."""
        joined = self.concat or self.heads == 1
        out = attend_entries(
            entries, messages, scores, counts=graph.edges_of_entries(),
            scales=self._dropout_scales(graph, messages.device), bias=bias if joined else None,
        )  # fmt: skip
        return self._mean(out, bias)

    def _mean(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """Return heads joined, to which the bias was added, or their mean plus the bias."""
        # The mean of one head is that head.
        if self.concat or self.heads == 1:
            return out
        out = self._by_head(out).mean(1)
        return out if bias is None else out + bias

    def _gather(
        self, graph: Graph, messages: Tensor, attention: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the sums of messages weighted by [edges, heads] attention, bias added.

        Each head is one product with the attention as A's values. Heads are joined with ``concat``,
        otherwise this returns their mean.
        """
        numbers = graph.edge_count * messages.shape[1] // self.heads
        plain = graph.planned is None and attention.dtype is messages.dtype
        if plain and graph.gathers(numbers, messages.dtype):
            source, target = graph.edges
            wide = self._by_head(messages).index_select(0, source) * attention.unsqueeze(-1)
            out = messages.new_zeros(graph.shape[0], messages.shape[1])
            out = out.index_add(0, target, wide.flatten(1))
            out = out if self.concat else self._by_head(out).mean(1)
            return out if bias is None else out + bias
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
