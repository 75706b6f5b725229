"""Linear maps of the combined neighbours and of the targets, for SAGEConv and GraphConv."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.hooks import is_plain_linear

__all__ = ["map_both"]


def map_both(
    graph: Graph, sources: Tensor, targets: Tensor | None, weights: Weights | None, reduce: str,
    of_neighbours: nn.Linear, of_targets: nn.Linear | None,
) -> Tensor:  # fmt: skip
    """Return of_neighbours(reduced sources) + of_targets(targets), one after the other."""
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
