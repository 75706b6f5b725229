"""Chebyshev convolution: polynomials of the scaled Laplacian, which is planned once.

With L = 2 L / lambda_max - I, sums over k of T_k(L)·x·W_k are computed from whichever side is
narrower: by the recurrence of T_k on x, or by Clenshaw's on the mapped features,

    b_k = x·W_k + 2 L·b_(k+1) - b_(k+2)        out = x·W_0 + L·b_1 - b_2

which keeps nothing but x for the gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error
from sparsetile.nn.arguments import channels, features, flow_name, refuse_others, sum_only
from sparsetile.nn.cache import find_graph
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, read_input
from sparsetile.nn.lazy import draw, linear, materialise

__all__ = ["ChebConv"]


class ChebConv(nn.Module):
    """Chebyshev convolution with the arguments, state dict and results of PyG's ``ChebConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``. The
    scaled Laplacian is computed and planned once, and kept while ``edge_index`` lives and does not
    change. New edge weights reuse the plan.

    Parameters
    ----------
    in_channels : int
        Width of x; -1: that of the first x.
    out_channels : int
    K : int
        Number of polynomials: 1 uses no neighbours, 2 those one edge away, and so on.
    normalization : {"sym", "rw", None}
        Laplacian: I - D^-1/2 A D^-1/2, I - D^-1 A, or D - A.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import ChebConv
    >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> conv = ChebConv(8, 4, K=3)
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 4])
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, K: int, normalization: str | None = "sym",
        bias: bool = True, *, flow: str = "source_to_target", aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others("ChebConv", others)
        sum_only("ChebConv", aggr)
        self.in_channels = channels("ChebConv", "in_channels", in_channels, lazy=True)
        self.out_channels = channels("ChebConv", "out_channels", out_channels)
        if normalization is not None:
            one_of("ChebConv", "normalization", normalization, ("sym", "rw"))
        self.normalization = normalization
        self.flow = flow_name("ChebConv", flow)
        count = channels("ChebConv", "K", K)
        self.lins = nn.ModuleList(linear(in_channels, out_channels) for _ in range(count))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; the bias becomes 0."""
        for layer in self.lins:
            draw(layer)  # type: ignore[arg-type]
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None,
        batch: Tensor | None = None, lambda_max: Tensor | float | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the convolved features.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels]
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            Self-loops are not used. A sparse tensor is PyG's ``adj_t[target, source]``. A
            :class:`sparsetile.Plan` is used unchanged: it is the scaled Laplacian itself.
        edge_weight : Tensor [E], optional
            1 for every edge when None. Gradients flow into it. ``Data`` has its own weights.
        batch : Tensor [nodes], optional
            Graph of each node, if ``lambda_max`` has one number per graph.
        lambda_max : Tensor or float, optional
            Largest eigenvalue of the Laplacian. Twice its largest entry when None, as in PyG. With
            a tensor the Laplacian is computed in each call.

        Returns
        -------
        Tensor [..., nodes, out_channels]
        """
        if isinstance(x, (tuple, list)):
            raise type_error(
                "ChebConv", "x", "one tensor", "a pair",
                "Use SAGEConv for graphs between two sets of nodes",
            )  # fmt: skip
        features("ChebConv", "x", x, self.in_channels)
        if self.in_channels == -1:
            materialise("ChebConv", *((layer, x) for layer in self.lins))
        given = read_input("ChebConv", edge_index, edge_weight, self.flow)
        product = None
        if len(self.lins) > 1:
            nodes = x.shape[-2]
            graph, values_key = find_graph(
                "ChebConv", given, (nodes, nodes), x.device, flow=self.flow, loops="replace"
            )
            weights = self._weights(graph, given, values_key, batch, lambda_max, x.dtype)
            product = functools.partial(graph.aggregate, weights=weights)
        out = self._polynomials(x, product)
        return out if self.bias is None else out + self.bias

    def _polynomials(self, x: Tensor, product: Any) -> Tensor:
        """Return the sum of all polynomials' maps; ``product`` multiplies by the Laplacian."""
        first, *others = self.lins
        if product is None:
            return first(x)  # type: ignore[no-any-return]
        if self.out_channels <= x.shape[-1]:
            later: Tensor | None = None  # b_(k+2), and b_(k+1) in `last`
            last = others.pop()(x)
            for layer in reversed(others):
                now = layer(x) + 2.0 * product(last)
                last, later = (now if later is None else now - later), last
            out = first(x) + product(last)
            return out if later is None else out - later
        before, last = x, product(x)
        out = first(x) + others[0](last)
        for layer in others[1:]:
            before, last = last, 2.0 * product(last) - before
            out = out + layer(last)
        return out

    def _weights(
        self, graph: Graph, given: Given, values_key: Any, batch: Tensor | None,
        lambda_max: Tensor | float | None, dtype: torch.dtype,
    ) -> Weights | None:  # fmt: skip
        if given.kind == "plan":
            return None
        dtype = torch.promote_types(dtype, torch.float32)
        by_source = self.flow == "source_to_target"

        def compute() -> Tensor:
            weight = graph.edge_weights(given, 1.0)
            laplacian = _laplacian(graph, weight, self.normalization, by_source, dtype)
            return _scaled(graph, laplacian, lambda_max, batch, by_source)

        if given.trained or isinstance(lambda_max, Tensor):
            return Weights(None, compute())
        name = ("cheb", self.normalization, lambda_max, by_source, dtype)
        return graph.keep_values(name, values_key, compute)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, normalization={self.normalization}"


def _ends(graph: Graph, by_source: bool) -> tuple[Tensor, Tensor]:
    """Return ``edge_index`` as it was given, with the added self-loops last."""
    source, target = graph.edges
    return (source, target) if by_source else (target, source)


def _laplacian(
    graph: Graph, weight: Tensor | None, normalization: str | None, by_source: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the Laplacian's value of each edge, self-loops last. Differentiable in weights.

    As in PyG, degrees are sums over ``edge_index[0]``.
    """
    row, column = _ends(graph, by_source)
    nodes = graph.shape[0]
    count = row.numel() - nodes
    row, column = row[:count], column[:count]
    if weight is None:
        weight = torch.ones(count, dtype=dtype, device=row.device)
    else:
        weight = weight.to(torch.promote_types(dtype, weight.dtype))
        weight = weight if graph.kept is None else weight.index_select(0, graph.kept)
    degree = _degrees(graph, torch.cat([weight, weight.new_zeros(nodes)]), by_source)
    if normalization is None:
        return torch.cat([-weight, degree])
    # Nodes without edges are scaled by 0. The inner torch.where keeps gradients finite.
    empty = degree == 0
    scale = torch.where(empty, 1.0, degree).pow(-0.5 if normalization == "sym" else -1.0)
    scale = torch.where(empty, 0.0, scale)
    scaled = scale.index_select(0, row) * weight
    if normalization == "sym":
        scaled = scaled * scale.index_select(0, column)
    return torch.cat([-scaled, weight.new_ones(nodes)])


def _degrees(graph: Graph, values: Tensor, by_source: bool) -> Tensor:
    """Return the sums of edges' values over sources or targets, in a fixed order."""
    entries = graph.to_entries(values)
    if not by_source:
        return graph.csr.row_sums(entries)
    order = graph.csr.transpose_order()
    return graph.csr.transposed(order).row_sums(entries.index_select(0, order))


def _scaled(
    graph: Graph, laplacian: Tensor, lambda_max: Tensor | float | None, batch: Tensor | None,
    by_source: bool,
) -> Tensor:  # fmt: skip
    """Return 2 L / lambda_max - I, one value per entry."""
    nodes = graph.shape[0]
    if not nodes:
        return laplacian
    highest = 2.0 * laplacian.max() if lambda_max is None else lambda_max
    if isinstance(highest, Tensor):
        highest = highest.to(laplacian.dtype)
        if batch is not None and highest.numel() > 1:
            row, _ = _ends(graph, by_source)
            highest = highest[batch.index_select(0, row)]
    scaled = 2.0 * laplacian / highest
    scaled = scaled.masked_fill(scaled == torch.inf, 0.0)
    loops = torch.zeros_like(scaled)
    loops[-nodes:] = 1.0
    return graph.to_entries(scaled - loops)
