"""What SAGEConv and GraphConv share: linear maps of the combined neighbours and of the targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import value_error
from sparsetile.nn import arguments
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.hooks import is_plain_linear
from sparsetile.nn.inputs import pair_of, read_input
from sparsetile.nn.lazy import draw_maps, materialise
from sparsetile.nn.mapped import mapped_product
from sparsetile.nn.neighbours import reduction

__all__ = ["Call", "TwoMaps", "map_both"]

_AGGREGATIONS = ("add", "sum", "mean", "max", "min", "amax", "amin")


class Call(NamedTuple):
    """Checked arguments of a call, with the graph and how neighbours are combined."""

    sources: Tensor
    targets: Tensor | None
    graph: Graph
    weights: Weights | None
    reduce: str


class TwoMaps(nn.Module):
    """Base of both layers, whose maps are made by the subclass."""

    _name: str

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str, flow: str,
        others: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        arguments.refuse_others(self._name, others)
        if aggr not in _AGGREGATIONS:
            raise value_error(
                self._name, "aggr", "add, sum, mean, max or min", repr(aggr),
                f"Use torch_geometric.nn.{self._name} for other aggregations",
            )  # fmt: skip
        self.aggr = reduce_name(self._name, aggr)
        self.in_channels = in_channels
        self._widths = arguments.width_pair(self._name, in_channels)
        self.out_channels = arguments.channels(self._name, "out_channels", out_channels)
        self.flow = arguments.flow_name(self._name, flow)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        draw_maps(self, uniform=True)

    def _read(
        self, x: Any, edge_index: Any, edge_weight: Tensor | None, size: tuple[int, int] | None,
        of_neighbours: nn.Linear, of_targets: nn.Linear | None, weighted: bool = True,
    ) -> Call:  # fmt: skip
        """Check the arguments of a call; maps of unknown width get that of their input.

        ``weighted``: whether weights of ``Data`` count.
        """
        given = read_input(self._name, edge_index, edge_weight, self.flow)
        given = given if weighted else given.without_weight()
        sources, targets, sizes = pair_of(self._name, x, size, self.flow, given)
        arguments.features(self._name, "x", sources, self._widths[0])
        if targets is not None:
            arguments.features(self._name, "x", targets, self._widths[1])
        if -1 in self._widths:
            materialise(self._name, (of_neighbours, sources), (of_targets, targets))
        graph, reduce, weights = reduction(self._name, given, sizes, sources, self.flow, self.aggr)
        return Call(sources, targets, graph, weights, reduce)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr}"


def map_both(call: Call, of_neighbours: nn.Linear, of_targets: nn.Linear | None) -> Tensor:
    """Return of_neighbours(reduced sources) + of_targets(targets), as one node if possible."""
    sources, targets, graph, weights, reduce = call
    if weights is None or weights.key is not None:
        name = None if weights is None else weights.key
        of_both = mapped_product(
            graph, reduce, name, lambda: weights, sources, of_neighbours, targets, of_targets,
            of_neighbours.bias,
        )  # fmt: skip
        if of_both is not None:
            return of_both
    # Sums and means commute with the linear map: they run on its narrower side.
    narrow = of_neighbours.out_features <= of_neighbours.in_features
    if narrow and reduce in ("sum", "mean") and is_plain_linear(of_neighbours):
        mapped = functional.linear(sources, of_neighbours.weight)
        out = graph.aggregate(mapped, weights, reduce=reduce, bias=of_neighbours.bias)
    else:
        out = of_neighbours(graph.aggregate(sources, weights, reduce=reduce))
    if of_targets is None or targets is None:
        return out
    same = targets.dim() == out.dim() == 2 and targets.dtype is out.dtype
    if same and is_plain_linear(of_targets):  # one operation
        return torch.addmm(out, targets, of_targets.weight.t())
    added: Tensor = out + of_targets(targets)
    return added
