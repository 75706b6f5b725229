"""A two-layer GCN that finds the communities of a generated graph, on a GPU if there is one.

python examples/gcn_train.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, dropout

from sparsetile.data import generators
from sparsetile.nn import GCNConv

COMMUNITIES = 4
MEMBERS = 500
CROSSING = 2000
WIDTH = 32


def community_graph(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edge_index [2, E], both directions of every edge, and the community of each node."""
    parts = []
    for community in range(COMMUNITIES):
        inside = generators.power_law(MEMBERS, 10 * MEMBERS, communities=1, seed=seed + community)
        edges = torch.stack([inside.indices.long(), inside.row_ids()])
        parts.append(edges + community * MEMBERS)
    nodes = COMMUNITIES * MEMBERS
    crossing = torch.randint(nodes, (2, CROSSING), generator=torch.Generator().manual_seed(seed))
    edge_index = torch.cat([*parts, crossing, crossing.flip(0)], dim=1)
    return edge_index, torch.arange(nodes) // MEMBERS


class Net(torch.nn.Module):
    """Two graph convolutions. ReLU and bias of the first are part of its product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(WIDTH, 16)
        self.second = GCNConv(16, COMMUNITIES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x, edge_index, relu=True)
        return self.second(dropout(hidden, 0.5, self.training), edge_index)


def main(epochs: int = 60) -> float:
    """Train on a tenth of the labels; return the share of the other nodes that is right."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    edge_index, labels = (part.to(device) for part in community_graph())
    # Features say little: noise around a faint sign of the community.
    signs = torch.randn(COMMUNITIES, WIDTH, device=device)
    x = 0.3 * signs[labels] + torch.randn(labels.numel(), WIDTH, device=device)
    known = torch.rand(labels.numel(), device=device) < 0.1

    net = Net().to(device)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    accuracy = 0.0
    for epoch in range(epochs + 1):
        net.train()
        loss = cross_entropy(net(x, edge_index)[known], labels[known])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if epoch % 20 == 0:
            net.eval()
            with torch.no_grad():
                right = net(x, edge_index).argmax(1) == labels
            accuracy = right[~known].float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
