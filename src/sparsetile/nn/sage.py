"""GraphSAGE: W_l · (mean, max, ... of the neighbours) + W_r · x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import value_error
from sparsetile.nn.arguments import channels, features, flow_name, refuse_others, width_pair
from sparsetile.nn.graph import Graph
from sparsetile.nn.hooks import is_plain_linear
from sparsetile.nn.inputs import pair_of, read_input
from sparsetile.nn.neighbours import reduction
from sparsetile.nn.sampled import SampledGraph
from sparsetile.nn.two_maps import map_both

__all__ = ["SAGEConv"]

# Largest concatenation, in bytes, for which two linear maps are computed as one.
MOST_JOINED = 2**26


class SAGEConv(nn.Module):
    """GraphSAGE with the arguments, state dict and results of PyG's ``SAGEConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets.
    out_channels : int
    aggr : {"mean", "max", "min", "sum"}
        Each parallel edge counts, as in PyG.
    normalize : bool
        Scale each row of the result to length 1.
    root_weight : bool
        Whether to add W_r · x of the target.
    project : bool
        Whether to map x by a linear layer and ReLU first.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SAGEConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = SAGEConv(8, 4, aggr="max")
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str = "mean",
        normalize: bool = False, root_weight: bool = True, project: bool = False, bias: bool = True,
        *, flow: str = "source_to_target", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others("SAGEConv", others)
        if aggr not in ("mean", "max", "min", "sum", "add", "amax", "amin"):
            raise value_error(
                "SAGEConv", "aggr", "mean, max, min or sum", repr(aggr),
                "Use torch_geometric.nn.SAGEConv for other aggregations",
            )  # fmt: skip
        self.aggr = reduce_name("SAGEConv", aggr)
        self.in_channels = in_channels
        self._widths = width_pair("SAGEConv", in_channels)
        self.out_channels = channels("SAGEConv", "out_channels", out_channels)
        self.normalize = normalize
        self.root_weight = root_weight
        self.project = project
        self.flow = flow_name("SAGEConv", flow)
        if project:
            self.lin = nn.Linear(self._widths[0], self._widths[0])
        self.lin_l = nn.Linear(self._widths[0], out_channels, bias=bias)
        if root_weight:
            self.lin_r = nn.Linear(self._widths[1], out_channels, bias=False)
        self.reset_parameters()  # PyG draws twice, too: the same seed gives the same weights

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` gives the number of targets.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages, as in
            PyG. Weights of ``Data`` are not used.
        size : (sources, targets), optional

        Returns
        -------
        Tensor [..., targets, out_channels]
        """
        sources, targets, sizes = pair_of("SAGEConv", x, size, self.flow)
        features("SAGEConv", "x", sources, self._widths[0])
        if targets is not None:
            features("SAGEConv", "x", targets, self._widths[1])
        if self.project:
            sources = self.lin(sources).relu()
        given = read_input("SAGEConv", edge_index, None, self.flow).without_weight()
        graph, reduce, weights = reduction(
            "SAGEConv", given, sizes, sources.device, self.flow, self.aggr
        )
        if targets is not None and self._joins(graph, sources, targets):
            out = self._joined(graph.aggregate(sources, reduce=reduce), targets)
        else:
            of_targets = self.lin_r if self.root_weight else None
            out = map_both(graph, sources, targets, weights, reduce, self.lin_l, of_targets)
        if not self.normalize:
            return out
        # torch divides by at least 1e-12, which is 0 in float16: rows of zeros would be NaN.
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        return functional.normalize(wide, p=2.0, dim=-1).to(out.dtype)

    def _joins(self, graph: Graph, sources: Tensor, targets: Tensor) -> bool:
        """Whether both linear maps are computed as one: on short-lived graphs."""
        return (
            isinstance(graph, SampledGraph)
            and self.aggr in ("sum", "mean")
            and self.root_weight
            and targets.dim() == sources.dim() == 2
            and targets.dtype is sources.dtype
            and targets.shape[0] * sum(self._widths) * targets.element_size() <= MOST_JOINED
            and is_plain_linear(self.lin_l)
            and is_plain_linear(self.lin_r)
        )

    def _joined(self, reduced: Tensor, targets: Tensor) -> Tensor:
        """Both linear maps as one.

        The host's launches take longer than the GPU's work on a sampled graph; this needs fewer.
        Means come first, because a sampled graph has many more sources than targets.
        """
        weight = torch.cat([self.lin_l.weight, self.lin_r.weight], 1)
        return functional.linear(torch.cat([reduced, targets], 1), weight, self.lin_l.bias)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"
