"""Explanations, torch.compile and sampled mini-batches give the same under the patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsetile.pyg
from tests.nn.cases import NODES, WIDTH, directed_graph, pyg

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLASSES = 3


class Net(nn.Module):
    """A product, a pair of features, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.GCNConv(WIDTH, 16)
        self.second = pyg.SAGEConv(16, 12)
        self.third = pyg.GATConv(12, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.second(self.first(x, edge_index).relu(), edge_index)
        return self.third(h.relu(), edge_index)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def calls(ran: str, why: str = "") -> dict[str, int]:
    rows = sparsetile.pyg.report().rows
    return {row.name: row.calls for row in rows if row.ran == ran and why in row.why}


def explanation(model: Net, x: Tensor, edge_index: Tensor) -> Any:
    from torch_geometric.explain import Explainer, GNNExplainer

    explainer = Explainer(
        model,
        GNNExplainer(epochs=8),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node",
                      "return_type": "raw"},
    )  # fmt: skip
    torch.manual_seed(1)
    return explainer(x, edge_index, index=5)


def test_an_explanation_is_the_same():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    expected = explanation(net().eval(), x, edge_index)
    with sparsetile.pyg.patch():
        found = explanation(net().eval(), x, edge_index)
    for name in ("node_mask", "edge_mask", "prediction", "target"):
        torch.testing.assert_close(found[name], expected[name], **CLOSE)
    assert expected.edge_mask.any() and expected.node_mask.any()
    layers = {"GCNConv.propagate", "SAGEConv.propagate", "GATConv.forward"}
    assert calls("PyG", "explain is on").keys() == layers | {"GATConv.propagate"}
    assert calls("sparsetile").keys() == layers, "the prediction that is explained"


def test_layers_that_were_explained_run_on_sparsetile_again():
    """PyG binds a propagate of its own to a layer that is explained."""
    model, x, edge_index = net().eval(), torch.randn(NODES, WIDTH), directed_graph()
    expected = model(x, edge_index)
    for _ in range(2):
        with sparsetile.pyg.patch():
            explanation(model, x, edge_index)
            before = calls("sparsetile")
            torch.testing.assert_close(model(x, edge_index), expected, **CLOSE)
            assert calls("sparsetile") == {name: number + 1 for name, number in before.items()}
            assert len(before) == 3
        counted = calls("sparsetile")
        torch.testing.assert_close(model(x, edge_index), expected, **CLOSE)
        assert calls("sparsetile") == counted
    assert not hasattr(pyg.SAGEConv._orig_propagate, "_sparsetile_original")
    assert not hasattr(pyg.SAGEConv._jinja_propagate, "_sparsetile_original")


def trained(model: Any, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    """The result and the gradients of every parameter."""
    out = model(x, edge_index)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out.detach(), *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_the_same(backend):
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    expected = trained(net(), x, edge_index)
    torch.compiler.reset()
    with sparsetile.pyg.patch():
        compiled = torch.compile(net(), backend=backend, fullgraph=True)
        for _ in range(2):
            compiled.zero_grad()
            found = trained(compiled, x, edge_index)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert not calls("sparsetile")
    once = {"GCNConv.propagate", "SAGEConv.propagate", "GATConv.forward", "GATConv.propagate"}
    assert calls("PyG", "inside torch.compile") == dict.fromkeys(once, 1), "once for each trace"


def batches(edge_index: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes and edges of sampled subgraphs, as a NeighborLoader gives them: new tensors."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        seeds = torch.randperm(NODES, generator=generator)[:12]
        into = torch.isin(edge_index[1], seeds) & (
            torch.rand(edge_index.shape[1], generator=generator) < 0.7
        )
        kept = edge_index[:, into]
        nodes, numbers = torch.cat([seeds, kept[0]]).unique(return_inverse=True)
        number_of = torch.empty(NODES, dtype=torch.int64)
        number_of[nodes] = torch.arange(nodes.numel())
        assert numbers.numel() == seeds.numel() + kept.shape[1]
        yield nodes, number_of[kept]


def test_sampled_batches_train_the_same():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph(400)
    labels = torch.arange(NODES) % CLASSES
    histories, steps = [], 12
    for on in (False, True):
        model = net()
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        if on:
            sparsetile.pyg.patch()
        losses = []
        for nodes, edges in batches(edge_index, steps):
            loss = nn.functional.cross_entropy(model(x[nodes], edges), labels[nodes])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        histories.append(losses)
    assert histories[1] == pytest.approx(histories[0], rel=1e-4)
    assert len(set(histories[0])) == steps
    names = ("GCNConv.propagate", "SAGEConv.propagate", "GATConv.forward")
    assert calls("sparsetile") == dict.fromkeys(names, steps) and not calls("PyG")
