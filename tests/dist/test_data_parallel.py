"""Graph layers in DistributedDataParallel, a graph of its own on each of two gloo ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

NODES, WIDTH, CLASSES, STEPS = 40, 6, 3, 3


class Net(nn.Module):
    """Layers that are one node of autograd's graph, and attention."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.first = layers.GCNConv(WIDTH, 8)
        self.second = layers.SAGEConv(8, 8, aggr="max")
        self.third = layers.GATConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.second(self.first(x, edge_index).relu(), edge_index)
        return self.third(h.relu(), edge_index)


def data(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    edges = torch.randint(NODES, (2, 150), generator=generator).unique(dim=1)
    labels = torch.randint(CLASSES, (NODES,), generator=generator)
    return torch.randn(NODES, WIDTH, generator=generator), edges, labels


def trained(model: nn.Module, ranks: list[int]) -> list[Tensor]:
    """Parameters after some steps on the mean of the graphs' losses."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [data(rank) for rank in ranks]
    for _ in range(STEPS):
        optimiser.zero_grad()
        losses = [nn.functional.cross_entropy(model(x, edges), y) for x, edges, y in given]
        torch.stack(losses).mean().backward()
        optimiser.step()
    return [each.detach() for each in model.parameters()]


def replicas(group, how: str) -> None:
    import torch_geometric.nn as pyg

    import sparsetile.nn
    import sparsetile.pyg

    torch.manual_seed(3)
    whole = Net(pyg)
    mine = Net(sparsetile.nn if how == "layers" else pyg)
    mine.load_state_dict(whole.state_dict())
    expected = trained(whole, list(range(group.size())))
    patched = sparsetile.pyg.patch() if how == "patch" else contextlib.nullcontext()
    with patched:
        model = DistributedDataParallel(mine, process_group=group)
        found = trained(model, [group.rank()])
        if how == "patch":
            ran = {row.name for row in sparsetile.pyg.report().rows if row.ran == "sparsetile"}
            assert ran == {"GCNConv.propagate", "SAGEConv.propagate", "GATConv.forward"}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["layers", "patch"])
def test_replicas_train_as_one_process_on_all_graphs(workers, how):
    pytest.importorskip("torch_geometric")
    workers.run(replicas, 2, how=how)
