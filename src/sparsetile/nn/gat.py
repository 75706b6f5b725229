"""Graph attention: each target weighs its neighbours by a softmax over its incoming edges.

Scores are one number per edge and head, gathered from one number per node and head. Nothing of
edges × features is stored.

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
from torch.autograd import forward_ad
from torch.nn import functional

from sparsetile.core.errors import type_error, value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.layers import graph_attention as fused
from sparsetile.nn import arguments
from sparsetile.nn.cache import find_graph
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, pair_of, read_input
from sparsetile.plan.inference import InferencePlan
from sparsetile.plan.modes import transforming
from sparsetile.plan.operands import in_plan_dtype
from sparsetile.plan.plan import Plan

__all__ = ["GATConv"]

# Limits of the attention kernels: devices, slabs of columns in a grid, entries.
FUSED_ON, _MOST_COLUMNS, _MOST_ENTRIES = "cuda", 2**20, 2**31


class GATConv(nn.Module):
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
        Width of x, or the widths of sources and targets, which then have separate weights.
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
    edge_dim : None
        Edge features are not supported.
    fill_value : object
        Accepted for compatibility with PyG. It affects only edge features.
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
    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1,
        concat: bool = True, negative_slope: float = 0.2, dropout: float = 0.0,
        add_self_loops: bool = True, edge_dim: int | None = None, fill_value: Any = "mean",
        bias: bool = True, residual: bool = False, *, flow: str = "source_to_target",
        aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        arguments.refuse_others("GATConv", others)
        arguments.sum_only("GATConv", aggr)
        if edge_dim is not None:
            raise value_error(
                "GATConv", "edge_dim", "None", edge_dim,
                "Use torch_geometric.nn.GATConv for edge features",
            )  # fmt: skip
        self.in_channels = in_channels
        self._widths = arguments.width_pair("GATConv", in_channels)
        self.out_channels = arguments.channels("GATConv", "out_channels", out_channels)
        self.heads = arguments.channels("GATConv", "heads", heads)
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.residual = residual
        self.flow = arguments.flow_name("GATConv", flow)
        width = heads * out_channels
        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, (tuple, list)):
            self.lin_src = nn.Linear(self._widths[0], width, bias=False)
            self.lin_dst = nn.Linear(self._widths[1], width, bias=False)
        else:
            self.lin = nn.Linear(self._widths[0], width, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        total = width if concat else out_channels
        self.res = nn.Linear(self._widths[1], total, bias=False) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(total)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; the bias becomes 0."""
        for layer in (self.lin, self.lin_src, self.lin_dst, self.res):
            if layer is not None:
                arguments.glorot(layer.weight)
        arguments.glorot(self.att_src)
        arguments.glorot(self.att_dst)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any, edge_attr: None = None,
        size: tuple[int, int] | None = None, return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` gives the number of targets.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``. Only the pattern counts: values of a
            matrix and weights of ``Data`` are not used.
        edge_attr : None
            Edge features are not supported.
        size : (sources, targets), optional
        return_attention_weights : bool, optional
            Whether to return the attention too.

        Returns
        -------
        Tensor [targets, heads · out_channels], or [targets, out_channels] without ``concat``
            With ``return_attention_weights``, also returns ``(edge_index, attention)``: the edges
            that were used, self-loops last, and one row of attention [heads] per edge.
        """
        if edge_attr is not None:
            raise value_error(
                "GATConv", "edge_attr", "None", type(edge_attr).__name__,
                "Use torch_geometric.nn.GATConv for edge features",
            )  # fmt: skip
        x_src, x_dst, sizes = pair_of("GATConv", x, size, self.flow)
        _check_nodes(x_src, self._widths[0])
        if x_dst is not None and (x_dst is not x_src or self._widths[0] != self._widths[1]):
            _check_nodes(x_dst, self._widths[1])
        given = read_input("GATConv", edge_index, None, self.flow).without_weight()
        if given.kind == "plan":
            self._check_plan(given)
        graph, _ = find_graph(
            "GATConv", given, sizes, x_src.device, flow=self.flow,
            loops="replace" if self.add_self_loops else "keep",
        )  # fmt: skip
        residual = self.res(x_dst) if self.res is not None and x_dst is not None else None
        messages, targets = self._mapped(x_src, x_dst, same=isinstance(x, Tensor))
        if not return_attention_weights and self._fuses(graph, messages):
            out = self._attend(graph, messages, targets)
            return out if residual is None else out + residual
        attention = self._attention(graph, messages, targets)
        out = self._gather(graph, messages, attention)
        if residual is not None:
            out = out + residual
        if not return_attention_weights:
            return out
        source, target = graph.edges
        pair = (source, target) if self.flow == "source_to_target" else (target, source)
        return out, (torch.stack(pair), attention)

    def _check_plan(self, given: Given) -> None:
        if isinstance(given.pattern, SharedPlan):
            raise type_error(
                "GATConv", "edge_index", "a graph of this process", type(given.pattern).__name__,
                "Scores of nodes on other processes are not exchanged: use GCNConv, SAGEConv or "
                "GINConv with a distributed plan",
            )  # fmt: skip
        if self.add_self_loops:
            raise value_error(
                "GATConv", "add_self_loops", "False with a Plan", "True",
                "Plan a matrix that has its self-loops, and make the layer with "
                "add_self_loops=False",
            )  # fmt: skip
        if given.pattern.column_order is not None:
            raise value_error(
                "GATConv", "edge_index", "a plan without reordered columns",
                "one with reorder_columns=True", "Plan without reorder_columns",
            )  # fmt: skip

    def _mapped(
        self, x_src: Tensor, x_dst: Tensor | None, same: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the linear maps of sources and targets, [nodes, heads · out_channels]."""
        first = self.lin if self.lin is not None else self.lin_src
        second = self.lin if self.lin is not None else self.lin_dst
        assert first is not None and second is not None
        messages = first(x_src)
        if x_dst is None:
            return messages, None
        return messages, messages if same and first is second else second(x_dst)

    def _by_head(self, messages: Tensor) -> Tensor:
        return messages.view(-1, self.heads, self.out_channels)

    def _fuses(self, graph: Graph, messages: Tensor) -> bool:
        """Whether the fused kernels support this call."""
        return (
            messages.device.type == FUSED_ON
            and messages.dtype in fused.ATTENTION_DTYPES
            and self.heads * self.out_channels <= _MOST_COLUMNS
            and graph.csr.nnz < _MOST_ENTRIES
            and not isinstance(graph.planned, InferencePlan)  # it has no rows
            and not transforming()
            and forward_ad._current_level < 0
        )

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

    def _attend(self, graph: Graph, messages: Tensor, targets: Tensor | None) -> Tensor:
        """Return the weighted sums of messages, heads joined, bias added, by the fused kernels."""
        scored = messages
        if isinstance(graph.planned, Plan):
            messages = in_plan_dtype(graph.planned, messages, "run", "B")
        elif torch.is_autocast_enabled(messages.device.type):
            messages = messages.to(torch.get_autocast_dtype(messages.device.type))
        scales = None
        if self.training and self.dropout:
            # Same random numbers as dropout of [edges, heads] attention.
            ones = torch.ones(
                graph.edge_count, self.heads, dtype=torch.float32, device=messages.device
            )
            scales = graph.to_entries(functional.dropout(ones, p=self.dropout))
        first, second, own = self.att_src, self.att_dst, self.bias
        tracked = messages.requires_grad or first.requires_grad or second.requires_grad
        if targets is not None and targets is not scored:
            tracked = tracked or targets.requires_grad
        # A tracer reads the flat plan once, whether or not the first call needs a gradient.
        needs = torch.is_grad_enabled() and (tracked or torch.compiler.is_compiling())
        flat = graph.rows_plan(self.heads * self.out_channels, needs)
        # The mean of one head is that head.
        joined = self.concat or self.heads == 1
        bias = own if joined else None
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
        if joined:
            return out
        out = self._by_head(out).mean(1)
        return out if own is None else out + own

    def _attention(self, graph: Graph, messages: Tensor, targets: Tensor | None) -> Tensor:
        """Return the attention of each edge and head, [edges, heads]."""
        source, target = graph.edges
        of_source, of_target = self._scores(_dots, messages, targets)
        scores = of_source.index_select(0, source)
        if of_target is not None:
            scores = scores + of_target.index_select(0, target)
        scores = functional.leaky_relu(scores, self.negative_slope)
        attention = _edge_softmax(scores, target, graph.shape[0])
        return functional.dropout(attention, p=self.dropout, training=self.training)

    def _gather(self, graph: Graph, messages: Tensor, attention: Tensor) -> Tensor:
        """Return the weighted sums of messages, heads joined, bias added."""
        # Permuted to A's order once for all heads. A given plan uses the order of its own edges.
        if graph.planned is None:
            attention = graph.to_entries(attention)
        by_head, messages = attention.t().contiguous(), self._by_head(messages)
        biases: tuple[Tensor | None, ...] = (None,) * self.heads
        if self.concat and self.bias is not None:
            biases = self.bias.split(self.out_channels)
        parts = [
            graph.aggregate(messages[:, head], Weights(None, by_head[head]), bias=biases[head])
            for head in range(self.heads)
        ]
        if self.concat:
            return parts[0] if self.heads == 1 else torch.cat(parts, dim=-1)
        out = torch.stack(parts).mean(0)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _check_nodes(nodes: Tensor, width: int) -> None:
    arguments.features("GATConv", "x", nodes, width)
    if nodes.dim() != 2:
        raise value_error(
            "GATConv", "x", f"of shape [nodes, {width}]", tuple(nodes.shape),
            "Call the layer once for each matrix of features",
        )  # fmt: skip


def _dots(messages: Tensor, *vectors: Tensor) -> list[Tensor]:
    """As ``node_scores``, by torch's operations."""
    wide = torch.promote_types(messages.dtype, torch.float32)
    return [(messages * vector).sum(-1).to(wide) for vector in vectors]


def _edge_softmax(scores: Tensor, target: Tensor, targets: int) -> Tensor:
    """Return the softmax of [edges, heads] over the edges of each target."""
    where = target[:, None].expand_as(scores)
    with torch.no_grad():
        highest = scores.new_zeros(targets, scores.shape[1])
        highest.scatter_reduce_(0, where, scores, "amax", include_self=False)
    raised = (scores - highest.index_select(0, target)).exp()
    total = scores.new_zeros(targets, scores.shape[1]).index_add(0, target, raised)
    return raised / (total.index_select(0, target) + 1e-16)
