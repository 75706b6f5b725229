"""PyG's attention layers, and others that are more than a product, run on sparsetile's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsetile.pyg
from sparsetile import nn as ours
from sparsetile.pyg import forwards
from tests.nn.cases import FLOWS, NODES, WIDTH, directed_graph, pyg, weights_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
EDGES = directed_graph()
FEATURES = torch.randn(EDGES.shape[1], 3)
TYPES = torch.randint(4, (EDGES.shape[1],))

# Layer, and what it is given beside x and the edges.
TAKEN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ChebConv": (lambda **m: pyg.ChebConv(WIDTH, 5, K=3, **m), ()),
    "ChebConv-weights": (lambda **m: pyg.ChebConv(WIDTH, 12, K=3, **m), (weights_of(EDGES),)),
    "FastRGCNConv": (lambda **m: pyg.FastRGCNConv(WIDTH, 5, 4, num_bases=2, **m), (TYPES,)),
    "GATConv": (lambda **m: pyg.GATConv(WIDTH, 5, heads=2, **m), ()),
    "GATConv-edges": (lambda **m: pyg.GATConv(WIDTH, 5, 2, edge_dim=3, **m), (FEATURES,)),
    "GATConv-dropout": (lambda **m: pyg.GATConv(WIDTH, 5, heads=2, dropout=0.5, **m), ()),
    "GATv2Conv": (lambda **m: pyg.GATv2Conv(WIDTH, 5, heads=2, residual=True, **m), ()),
    "GATv2Conv-lazy": (lambda **m: pyg.GATv2Conv(-1, 5, heads=2, **m), ()),
    "GATv2Conv-edges": (lambda **m: pyg.GATv2Conv(WIDTH, 5, 2, edge_dim=3, **m), (FEATURES,)),
    "GINEConv": (lambda **m: pyg.GINEConv(nn.Linear(WIDTH, 5), edge_dim=3, **m), (FEATURES,)),
    "RGCNConv": (lambda **m: pyg.RGCNConv(WIDTH, 5, 4, **m), (TYPES,)),
    "RGCNConv-max": (lambda **m: pyg.RGCNConv(WIDTH, 5, 4, aggr="max", **m), (TYPES,)),
    "TransformerConv": (lambda **m: pyg.TransformerConv(WIDTH, 5, heads=2, beta=True, **m), ()),
    "TransformerConv-edges": (
        lambda **m: pyg.TransformerConv(WIDTH, 5, 2, edge_dim=3, **m),
        (FEATURES,),
    ),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers whose result sparsetile computed."""
    seen: list[str] = []
    original = forwards._computed

    def counted(layer: Any, *arguments: Any) -> Any:
        found = original(layer, *arguments)
        if isinstance(found, tuple):
            seen.append(type(layer).__name__)
        return found

    monkeypatch.setattr(forwards, "_computed", counted)
    return seen


def run(layer: Any, x: Tensor, *given: Any) -> list[Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = layer(leaf, *given)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(slope)
    return [out.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", TAKEN)
def test_results_and_gradients_are_the_same(name, flow, taken):
    make, more = TAKEN[name]
    layer, x = make(flow=flow), torch.randn(NODES, WIDTH)
    layer(x, EDGES, *more)  # widths that are found at the first call
    expected = run(layer, x, EDGES, *more)
    with sparsetile.pyg.patch():
        found = run(layer, x, EDGES, *more)
    assert taken == [name.split("-")[0]]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_attention_and_named_arguments_are_the_same(name, taken):
    make, _ = TAKEN[name]
    layer, x = make(), torch.randn(NODES, WIDTH)
    given = {"x": x, "edge_index": EDGES, "return_attention_weights": True}
    expected, (edges, wanted) = layer(**given)
    with sparsetile.pyg.patch():
        out, (found_edges, found) = layer(**given)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert torch.equal(edges, found_edges) and taken == [name]


def test_two_sets_of_nodes(taken):
    edges = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    x = torch.randn(20, WIDTH), torch.randn(9, 6)
    for kind in (pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv):
        layer = kind((WIDTH, 6), 5)
        expected = layer(x, edges)
        with sparsetile.pyg.patch():
            torch.testing.assert_close(layer(x, edges), expected, **CLOSE)
    assert len(taken) == 3


class Own(pyg.GATConv):
    """A layer of a user's."""


def hooked() -> Any:
    layer = pyg.GATConv(WIDTH, 5)
    layer.register_edge_update_forward_hook(lambda *given: None)
    return layer


def dense() -> Tensor:
    return torch.eye(NODES).to_sparse_csr()


@pytest.mark.parametrize(
    "make, given",
    [
        (lambda: Own(WIDTH, 5), (EDGES,)),
        (hooked, (EDGES,)),
        (lambda: pyg.GATv2Conv(WIDTH, 5, aggr="median"), (EDGES,)),
        (lambda: pyg.TransformerConv(WIDTH, 5), (dense(),)),
        (lambda: pyg.GATConv(WIDTH, 5), (EDGES, FEATURES)),  # which this layer ignores
    ],
)  # fmt: skip
def test_other_calls_run_in_pyg(make, given, taken):
    layer, x = make(), torch.randn(NODES, WIDTH)
    expected = layer(x, *given)
    with sparsetile.pyg.patch():
        assert torch.equal(layer(x, *given), expected)
    assert not taken


def test_errors_are_pyg_s(taken):
    layer, x = pyg.GATConv(WIDTH, 5), torch.randn(9, WIDTH)
    with sparsetile.pyg.patch(), pytest.raises((IndexError, RuntimeError, ValueError)) as error:
        layer(x, EDGES)
    assert "sparsetile" not in str(error.value) and not taken


def test_autocast_is_left_to_pyg(taken):
    layer, x = pyg.GATv2Conv(WIDTH, 5), torch.randn(NODES, WIDTH)
    with sparsetile.pyg.patch(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, EDGES)
    assert not taken


def test_unpatch_restores_every_forward():
    before = {name: getattr(pyg, name).forward for name in forwards.LAYERS}
    with sparsetile.pyg.patch():
        assert all(getattr(pyg, name).forward is not each for name, each in before.items())
    assert {name: getattr(pyg, name).forward for name in forwards.LAYERS} == before
    assert all(hasattr(ours, name) for name in before)


def test_weights_that_are_replaced_are_used(taken):
    layer, x = pyg.GATv2Conv(WIDTH, 5), torch.randn(NODES, WIDTH)
    with sparsetile.pyg.patch():
        layer(x, EDGES)
        layer.att = nn.Parameter(torch.ones_like(layer.att))
        found = layer(x, EDGES)
    torch.testing.assert_close(found, layer(x, EDGES), **CLOSE)
    assert len(taken) == 2
