"""Higher-order graph convolution: W_rel · (sum, mean, max of the neighbours) + W_root · x."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import value_error
from sparsetile.nn.arguments import channels, features, flow_name, refuse_others, width_pair
from sparsetile.nn.inputs import pair_of, read_input
from sparsetile.nn.neighbours import reduction
from sparsetile.nn.two_maps import map_both

__all__ = ["GraphConv"]


class GraphConv(nn.Module):
    """Graph convolution with the arguments, state dict and results of PyG's ``GraphConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change. New edge weights reuse the plan.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets.
    out_channels : int
    aggr : {"add", "sum", "mean", "max", "min"}
        Each parallel edge counts, as in PyG.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GraphConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GraphConv(8, 4)
    >>> conv(torch.randn(3, 8), edge_index, edge_weight=torch.rand(4)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str = "add",
        bias: bool = True, *, flow: str = "source_to_target", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others("GraphConv", others)
        if aggr not in ("add", "sum", "mean", "max", "min"):
            raise value_error(
                "GraphConv", "aggr", "add, sum, mean, max or min", repr(aggr),
                "Use torch_geometric.nn.GraphConv for other aggregations",
            )  # fmt: skip
        self.aggr = reduce_name("GraphConv", aggr)
        self.in_channels = in_channels
        self._widths = width_pair("GraphConv", in_channels)
        self.out_channels = channels("GraphConv", "out_channels", out_channels)
        self.flow = flow_name("GraphConv", flow)
        self.lin_rel = nn.Linear(self._widths[0], out_channels, bias=bias)
        self.lin_root = nn.Linear(self._widths[1], out_channels, bias=False)
        self.reset_parameters()  # PyG draws twice, too: the same seed gives the same weights

    def reset_parameters(self) -> None:
        """Draw new weights."""
        self.lin_rel.reset_parameters()
        self.lin_root.reset_parameters()

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        edge_weight: Tensor | None = None, size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` gives the number of targets.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages.
        edge_weight : Tensor [E], optional
            Scales the messages; gradients flow into it. ``Data`` has its own weights.
        size : (sources, targets), optional

        Returns
        -------
        Tensor [..., targets, out_channels]
        """
        sources, targets, sizes = pair_of("GraphConv", x, size, self.flow)
        features("GraphConv", "x", sources, self._widths[0])
        if targets is not None:
            features("GraphConv", "x", targets, self._widths[1])
        given = read_input("GraphConv", edge_index, edge_weight, self.flow)
        graph, reduce, weights = reduction(
            "GraphConv", given, sizes, sources.device, self.flow, self.aggr
        )
        return map_both(graph, sources, targets, weights, reduce, self.lin_rel, self.lin_root)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"
