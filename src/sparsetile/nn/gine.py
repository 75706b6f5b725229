"""Graph isomorphism network with edge features: nn((1 + eps) · x + sum of relu(x_j + e))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sequential

from sparsetile.core.errors import type_error, value_error
from sparsetile.core.settings import entry_limit
from sparsetile.layers.edge_attention import Entries
from sparsetile.layers.graph_attention import ATTENTION_DTYPES
from sparsetile.layers.relu_sums import relu_sums
from sparsetile.nn import arguments
from sparsetile.nn.cache import find_graph
from sparsetile.nn.edge_features import edge_features, sums_in_chunks
from sparsetile.nn.graph import Graph
from sparsetile.nn.inputs import pair_of, read_input
from sparsetile.nn.lazy import linear, materialise
from sparsetile.plan.inference import InferencePlan
from sparsetile.plan.modes import plain_call

__all__ = ["GINEConv"]

# Devices that the fused kernel supports.
FUSED_ON = "cuda"


class GINEConv(Module):
    """Graph isomorphism layer with the arguments, state dict and results of PyG's ``GINEConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``.
    relu(x_j + e) is never stored for all edges, and neither is the map of edges' features. On a
    GPU, with float32, float16 or bfloat16 features and no parallel edges, a fused kernel adds the
    messages. Otherwise torch's operations do, for some edges at a time.

    Parameters
    ----------
    nn : torch.nn.Module
        Maps the sums to the new features. As in PyG, its weights are drawn again.
    eps : float
    train_eps : bool
        Whether eps is a trainable parameter.
    edge_dim : int, optional
        Width of the edges' features, which a linear layer maps to the width of x: that of the first
        layer of ``nn``. -1: that of the first features. None: they have the width of x.
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GINEConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GINEConv(torch.nn.Linear(8, 4), edge_dim=3)
    >>> conv(torch.randn(3, 8), edge_index, torch.randn(4, 3)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, nn: Callable[[Tensor], Tensor], eps: float = 0.0, train_eps: bool = False,
        edge_dim: int | None = None, *, flow: str = "source_to_target", aggr: str = "add",
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        arguments.refuse_others("GINEConv", others)
        arguments.sum_only("GINEConv", aggr)
        if not callable(nn):
            raise type_error(
                "GINEConv", "nn", "a module", type(nn).__name__, "Pass a torch.nn.Module"
            )
        self.nn = nn
        self.initial_eps = float(eps)
        self.edge_dim = edge_dim
        self.flow = arguments.flow_name("GINEConv", flow)
        start = torch.full((1,), self.initial_eps)
        if train_eps:
            self.eps: Tensor = Parameter(start)
        else:
            self.register_buffer("eps", start)
        self.lin = None
        if edge_dim is not None:
            arguments.channels("GINEConv", "edge_dim", edge_dim, lazy=True)
            self.lin = linear(edge_dim, _width_of(nn), True, uniform=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights of ``nn`` and of the edges' map, and set eps to its first value."""
        if isinstance(self.nn, Module):
            arguments.reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)
        if self.lin is not None:
            self.lin.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        edge_attr: Tensor | None = None, size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [nodes, channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` or the graph gives the number of
            targets; if neither does, there are as many as sources, as in PyG.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data or Plan
        edge_attr : Tensor [E, channels or edge_dim]
            Features of the edges. ``Data`` has its own.
        size : (sources, targets), optional
        """
        given = read_input("GINEConv", edge_index, None, self.flow).without_weight()
        sources, targets, sizes = pair_of("GINEConv", x, size, self.flow, given)
        width = sources.shape[-1] if self.lin is None else self.lin.bias.shape[0]
        arguments.features("GINEConv", "x", sources, width)
        if sources.dim() != 2:
            raise value_error(
                "GINEConv", "x", f"of shape [nodes, {width}]", tuple(sources.shape),
                "Call the layer once for each matrix of features",
            )  # fmt: skip
        graph, _ = find_graph("GINEConv", given, sizes, sources.device, flow=self.flow)
        count = given.pattern.shape[1] if given.kind == "edges" else graph.edge_count
        wide = width if self.edge_dim is None else self.edge_dim
        features = edge_features("GINEConv", edge_attr, wide, edge_index, given, count)
        if features is None:
            raise type_error(
                "GINEConv", "edge_attr", "a tensor", "None", "Give the features of the edges"
            )
        if self.edge_dim == -1:
            materialise("GINEConv", (self.lin, features))
        out = self._sums(graph, sources, features)
        if targets is not None:
            out = out + (1 + self.eps) * targets
        return self.nn(out)

    def _sums(self, graph: Graph, x: Tensor, features: Tensor) -> Tensor:
        """Return the sum of relu(x_j + e) at each target."""
        if self._fuses(graph, x, features):
            weight = None if self.lin is None else self.lin.weight
            bias = None if self.lin is None else self.lin.bias
            operands = (x, features, weight, bias)
            tracked = any(each is not None and each.requires_grad for each in operands)
            flat = graph.rows_plan(x.shape[1], torch.is_grad_enabled() and tracked)
            return relu_sums(Entries(flat, graph.rows), x, graph.to_entries(features), weight, bias)

        def message(sources: Tensor, more: Tensor) -> Tensor:
            return (sources + (more if self.lin is None else self.lin(more))).relu()

        return sums_in_chunks(message, graph, x, features)

    def _fuses(self, graph: Graph, x: Tensor, features: Tensor) -> bool:
        """Whether the fused kernel supports this call."""
        same = features.dtype is x.dtype or self.lin is not None
        return (
            x.device.type == FUSED_ON
            and x.dtype in ATTENTION_DTYPES
            and same
            and graph.csr.nnz < entry_limit()
            and graph.edge_count == graph.csr.nnz  # parallel edges may differ
            and not isinstance(graph.planned, InferencePlan)  # it has no rows
            and not torch.is_autocast_enabled(x.device.type)
            and plain_call()
        )


def _width_of(nn: Any) -> int:
    """Return the width of the input of a module's first layer."""
    first = nn[0] if isinstance(nn, Sequential) else nn
    for name in ("in_features", "in_channels"):
        if isinstance(width := getattr(first, name, None), int) and width > 0:
            return width
    raise value_error(
        "GINEConv", "nn", "a module whose first layer has in_features above 0, with edge_dim",
        type(first).__name__, "Pass a torch.nn.Sequential that begins with a torch.nn.Linear",
    )  # fmt: skip
