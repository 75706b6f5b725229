"""GraphSAGE on sampled neighbourhoods (fan-out 15, 10), on a GPU if there is one.

Each step has two sampled graphs, edges from sampled sources to targets. Layers take them with pairs
of features (sources, targets), as from PyG's loaders. The graphs are new at every step; the layers
detect this, and at most sort their edges.

python examples/graphsage_minibatch.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsetile.data import generators
from sparsetile.intake import CSR
from sparsetile.nn import SAGEConv

COMMUNITIES = 4
MEMBERS = 1000
CROSSING = 6000
WIDTH = 32
FANOUT = (15, 10)
BATCH = 256


class SampledGraph(NamedTuple):
    """Edges of one layer: messages flow from ``edge_index[0]`` to ``edge_index[1]``."""

    edge_index: Tensor
    sources: int
    targets: int  # the first of the sources


def sample_edges(graph: CSR, targets: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """Return the sources of at most ``fanout`` random edges of each target, and whose they are."""
    rows, _ = graph.select_rows(targets)
    owner = rows.row_ids()
    # A random order within each row: its first entries are a draw without replacement.
    order = torch.argsort(owner + torch.rand(owner.shape, dtype=torch.float64, device=owner.device))
    rank = torch.arange(order.numel(), device=targets.device) - rows.indptr[owner[order]]
    chosen = order[rank < fanout]
    return rows.indices[chosen].long(), owner[chosen]


def sample_graphs(graph: CSR, seeds: Tensor) -> tuple[Tensor, list[SampledGraph]]:
    """Return the nodes whose features are needed, seeds first, and the graphs, widest first.

    ``graph`` is A[target, source].
    """
    nodes, sampled = seeds, []
    place = torch.full((graph.shape[0],), -1, device=seeds.device)
    for fanout in FANOUT:
        source, target = sample_edges(graph, nodes, fanout)
        place[nodes] = torch.arange(nodes.numel(), device=seeds.device)
        fresh = source[place[source] < 0].unique()
        targets, nodes = nodes.numel(), torch.cat([nodes, fresh])
        place[fresh] = torch.arange(targets, nodes.numel(), device=seeds.device)
        sampled.append(SampledGraph(torch.stack([place[source], target]), nodes.numel(), targets))
        place[nodes] = -1
    return nodes, sampled[::-1]


class Net(torch.nn.Module):
    """Two layers of GraphSAGE, each on its own sampled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([SAGEConv(WIDTH, 64), SAGEConv(64, COMMUNITIES)])

    def forward(self, x: Tensor, sampled: list[SampledGraph]) -> Tensor:
        for layer, graph in zip(self.layers, sampled, strict=True):
            x = layer((x, x[: graph.targets]), graph.edge_index)
            if layer is not self.layers[-1]:
                x = x.relu()
        return x


def community_graph(seed: int = 0) -> tuple[CSR, Tensor]:
    """Return A[target, source] of four communities with edges across, and each node's."""
    generator = torch.Generator().manual_seed(seed)
    nodes = COMMUNITIES * MEMBERS
    rows, columns = [], []
    for community in range(COMMUNITIES):
        inside = generators.power_law(MEMBERS, 20 * MEMBERS, communities=1, seed=seed + community)
        rows.append(inside.row_ids() + community * MEMBERS)
        columns.append(inside.indices.long() + community * MEMBERS)
    across = torch.randint(nodes, (2, CROSSING), generator=generator)
    keys = torch.cat([*rows, across[0]]) * nodes + torch.cat([*columns, across[1]])
    keys = keys.unique()
    indptr = torch.searchsorted(keys // nodes, torch.arange(nodes + 1))
    return CSR(indptr, (keys % nodes).int(), None, (nodes, nodes)), torch.arange(nodes) // MEMBERS


def batches(nodes: Tensor) -> Iterator[Tensor]:
    """Yield the nodes in random order, ``BATCH`` at a time."""
    yield from nodes[torch.randperm(nodes.numel(), device=nodes.device)].split(BATCH)


def main(epochs: int = 5) -> float:
    """Train on half of the nodes; return the share of the others that is right."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph, labels = community_graph()
    graph, labels = graph.to(device), labels.to(device)
    signs = torch.randn(COMMUNITIES, WIDTH, device=device)
    x = 0.3 * signs[labels] + torch.randn(labels.numel(), WIDTH, device=device)
    training = torch.rand(labels.numel(), device=device) < 0.5
    known, unknown = training.nonzero().flatten(), (~training).nonzero().flatten()

    net = Net().to(device)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    accuracy = 0.0
    for epoch in range(epochs):
        net.train()
        total = torch.zeros((), device=device)
        for seeds in batches(known):
            nodes, sampled = sample_graphs(graph, seeds)
            loss = cross_entropy(net(x[nodes], sampled), labels[seeds])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach() * seeds.numel()
        net.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for seeds in batches(unknown):
                nodes, sampled = sample_graphs(graph, seeds)
                right += (net(x[nodes], sampled).argmax(1) == labels[seeds]).sum()
        accuracy = right.item() / unknown.numel()
        print(f"epoch {epoch}: loss {total.item() / known.numel():.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
