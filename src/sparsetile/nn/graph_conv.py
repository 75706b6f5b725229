"""Higher-order graph convolution: W_rel · (sum, mean, max of the neighbours) + W_root · x."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsetile.nn.lazy import linear
from sparsetile.nn.two_maps import TwoMaps, map_both

__all__ = ["GraphConv"]


class GraphConv(TwoMaps):
    """Graph convolution with the arguments, state dict and results of PyG's ``GraphConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change. New edge weights reuse the plan.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets; -1: that of the first x.
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

    _name = "GraphConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str = "add",
        bias: bool = True, *, flow: str = "source_to_target", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, aggr, flow, others)
        self.lin_rel = linear(self._widths[0], out_channels, bias, uniform=True)
        self.lin_root = linear(self._widths[1], out_channels, uniform=True)
        self.reset_parameters()  # PyG draws twice, too: the same seed gives the same weights

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        edge_weight: Tensor | None = None, size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` or the graph gives the number of
            targets; if neither does, there are as many as sources, as in PyG.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages.
        edge_weight : Tensor [E], optional
            Scales the messages; gradients flow into it. ``Data`` has its own weights.
        size : (sources, targets), optional

        Returns
        -------
        Tensor [..., targets, out_channels]
        """
        call = self._read(x, edge_index, edge_weight, size, self.lin_rel, self.lin_root)
        return map_both(call, self.lin_rel, self.lin_root)
