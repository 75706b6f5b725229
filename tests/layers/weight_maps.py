"""Maps from edges to entries, as graph layers make them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.canonical import Names, from_coordinates
from sparsetile.layers.normalise import WeightMap

__all__ = ["gcn_map", "random_edges"]


def random_edges(nodes: int, count: int, *, parallel: bool = False) -> Tensor:
    """Sources and targets of edges, self-loops among them; node 0 has no incoming edge."""
    generator = torch.Generator().manual_seed(nodes + count)
    drawn = torch.randint(1 if nodes > 1 else 0, nodes, (2, count), generator=generator)
    drawn[0] = torch.randint(nodes, (count,), generator=generator)
    if parallel:
        return drawn
    found = torch.unique(drawn, dim=1)
    return found[:, torch.randperm(found.shape[1], generator=generator)]


def gcn_map(edge_index: Tensor, nodes: int, loops: str = "keep") -> WeightMap:
    """A[target, source]. ``replace``: each node gets one self-loop, which keeps the weight of the
    last one given; ``append``: each node gets one more."""
    source, target = edge_index
    numbers = None
    every = torch.arange(nodes, device=edge_index.device)
    given = torch.arange(source.numel(), device=edge_index.device)
    if loops == "replace":
        kept, own = given[source != target], given[source == target]
        last = torch.full_like(every, -1)
        for edge in own.tolist():
            last[source[edge]] = edge
        source, target = torch.cat([source[kept], every]), torch.cat([target[kept], every])
        numbers = torch.cat([kept, last])
    elif loops == "append":
        source, target = torch.cat([source, every]), torch.cat([target, every])
        numbers = torch.cat([given, torch.full_like(every, -1)])
    names = Names("test", rows="target", columns="source")
    return WeightMap(from_coordinates(names, target, source, None, (nodes, nodes)), numbers)
