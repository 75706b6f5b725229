"""Graphs of several types: PyG's HeteroConv and to_hetero give what they give with PyG's layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparsetile import nn as ours
from tests.nn.cases import pyg

F64 = torch.float64
CLOSE = {"rtol": 1e-8, "atol": 1e-8}
NODES = {"a": 12, "b": 7, "c": 5}
WIDTHS = {"a": 6, "b": 4, "c": 3}
TYPES = [
    ("a", "to", "b"),
    ("b", "back", "a"),
    ("a", "self", "a"),
    ("c", "to", "a"),
    ("a", "on", "c"),
]
METADATA = (list(NODES), TYPES)

# Name -> how the layer is made, and which features of edges it gets.
PAIRED: dict[str, tuple[Callable[[Any], nn.Module], str | None]] = {
    "sage": (lambda module: module.SAGEConv((-1, -1), 5), None),
    "sage-max": (lambda module: module.SAGEConv((-1, -1), 5, "max"), None),
    "graph": (lambda module: module.GraphConv((-1, -1), 5), "edge_weight"),
    "gat": (lambda module: module.GATConv((-1, -1), 5, heads=2, add_self_loops=False), None),
    "gatv2": (
        lambda module: module.GATv2Conv((-1, -1), 5, edge_dim=-1, add_self_loops=False),
        "edge_attr",
    ),
    "transformer": (lambda module: module.TransformerConv((-1, -1), 5, edge_dim=2), "edge_attr"),
    "gine": (lambda module: module.GINEConv(nn.Linear(6, 5), edge_dim=-1), "edge_attr"),
}


def features(same: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        kind: torch.randn(count, 6 if same else WIDTHS[kind], generator=generator, dtype=F64)
        for kind, count in NODES.items()
    }


def graphs() -> dict[tuple[str, str, str], Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        kind: torch.stack(
            [torch.randint(NODES[kind[end]], (20,), generator=generator) for end in (0, 2)]
        )
        for kind in TYPES
    }


def of_edges(name: str | None) -> dict[str, dict[Any, Tensor]]:
    if name is None:
        return {}
    generator = torch.Generator().manual_seed(3)
    shape = (20, 2) if name == "edge_attr" else (20,)
    made = {kind: torch.rand(shape, generator=generator, dtype=F64) for kind in TYPES}
    return {f"{name}_dict": made}


def both(make: Callable[[Any], nn.Module], call: Callable[[nn.Module], Any]) -> None:
    """Compare results, states and gradients of a model of each library, made with one seed."""
    models, results = [], []
    for module in (ours, pyg):
        torch.manual_seed(5)
        model = make(module).double()
        out = call(model)
        sum(each.square().sum() for each in out.values()).backward()
        models.append(model)
        results.append(out)
    assert results[0].keys() == results[1].keys()
    for kind, out in results[0].items():
        torch.testing.assert_close(out, results[1][kind], **CLOSE)
    first, second = (dict(model.named_parameters()) for model in models)
    assert list(first) == list(second)
    for name, parameter in first.items():
        assert is_lazy(parameter) == is_lazy(second[name]), name
        if is_lazy(parameter):  # that of targets without features
            continue
        torch.testing.assert_close(parameter, second[name], **CLOSE)
        assert (parameter.grad is None) == (second[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, second[name].grad, **CLOSE)


@pytest.mark.parametrize("name", PAIRED)
def test_hetero_conv_calls_each_layer_as_it_calls_pyg_s(name):
    make, kind = PAIRED[name]
    both(
        lambda module: pyg.HeteroConv({each: make(module) for each in TYPES}),
        lambda model: model(features(same=name == "gine"), graphs(), **of_edges(kind)),
    )


def test_hetero_conv_with_an_edge_index_and_a_sparse_tensor():
    from torch_geometric import EdgeIndex

    x = features()
    for form in (EdgeIndex, "adj_t"):
        edges: dict[Any, Any] = {}
        for kind, each in graphs().items():
            each = each.unique(dim=1).contiguous()
            size = NODES[kind[0]], NODES[kind[2]]
            if form == "adj_t":
                ones = torch.ones(each.shape[1], dtype=F64)
                edges[kind] = torch.sparse_coo_tensor(each.flip(0), ones, size[::-1])
                edges[kind] = edges[kind].coalesce().to_sparse_csr()
            else:
                edges[kind] = EdgeIndex(each, sparse_size=size)

        def call(model: nn.Module, edges: Any = edges) -> Any:
            return model(x, edges)

        both(lambda module: pyg.HeteroConv({k: PAIRED["sage"][0](module) for k in TYPES}), call)


def test_hetero_conv_without_features_of_targets():
    edges = {("b", "back", "a"): graphs()["b", "back", "a"]}
    x = {"b": torch.randn(12, 4, dtype=F64)}  # PyG takes as many targets as sources
    for name in ("sage", "graph", "gat"):
        with pytest.warns(UserWarning, match="do not get updated"):
            both(
                lambda module, name=name: pyg.HeteroConv(
                    {kind: PAIRED[name][0](module) for kind in edges}
                ),
                lambda model: {"a": model(x, edges)["a"]},
            )


class Net(nn.Module):
    """Two layers and a linear map between them."""

    def __init__(self, module: Any, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([make(module), make(module)])
        self.lin = pyg.Linear(-1, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        return self.convs[1](self.lin(x).relu(), edge_index)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["sage", "graph", "gat"])
def test_to_hetero_makes_a_layer_for_each_type_of_edges(name, aggr):
    make = PAIRED[name][0]
    transform = {ours: ours.to_hetero, pyg: pyg.to_hetero}
    both(
        lambda module: transform[module](Net(module, make), METADATA, aggr),
        lambda model: model(features(), graphs()),
    )


def test_to_hetero_leaves_the_model_and_its_result_has_only_its_layers():
    net = Net(ours, PAIRED["sage"][0])
    found = ours.to_hetero(net, METADATA)
    assert type(net.convs[0]) is ours.SAGEConv
    kinds = {type(each) for each in found.modules()}
    assert ours.SAGEConv in kinds and not any(
        issubclass(each, pyg.MessagePassing) for each in kinds
    )


def test_to_hetero_checks_self_loops_as_pyg_does():
    net = Net(ours, lambda module: module.GATConv((-1, -1), 5))
    with pytest.raises(ValueError, match=r"'add_self_loops' .* 'GATConv\("):
        ours.to_hetero(net, METADATA)


def test_to_hetero_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    expected = "to_hetero: torch_geometric must be installed, got no such package. Run pip install"
    with pytest.raises(ModuleNotFoundError, match=expected):
        ours.to_hetero(nn.Linear(2, 2), METADATA)
