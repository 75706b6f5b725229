"""GINEConv computes what PyG's layer computes, some edges at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.nn import edge_features
from tests.nn.cases import FLOWS, NODES, WIDTH, Largest, assert_same, directed_graph, gin_map, pyg

F32, F64 = torch.float32, torch.float64


def pair_of(dtype: torch.dtype = F64, **options: Any) -> tuple[Any, Any]:
    """Both layers with the same seed, which gives the same weights."""
    made = []
    for module in (ours, pyg):
        torch.manual_seed(4)
        made.append(module.GINEConv(gin_map(5), eps=0.25, **options).to(dtype))
    return made[0], made[1]


def features_of(edge_index: Tensor, width: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(edge_index.shape[1], width, dtype=dtype)


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_a_seed_gives_the_weights_that_pyg_draws(edge_dim):
    mine, theirs = pair_of(F32, edge_dim=edge_dim, train_eps=True)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for key, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("least", [edge_features.LEAST_CHUNK, 9])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_results_and_gradients_are_pyg_s(monkeypatch, dtype, edge_dim, flow, least):
    monkeypatch.setattr(edge_features, "LEAST_CHUNK", least)
    pair = pair_of(dtype, edge_dim=edge_dim, train_eps=True, flow=flow)
    edge_index = directed_graph()
    features = features_of(edge_index, edge_dim or WIDTH, dtype)
    assert_same(pair, torch.randn(NODES, WIDTH, dtype=dtype), edge_index, features)


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_two_sets_of_nodes(edge_dim):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    pair, features = pair_of(edge_dim=edge_dim), features_of(edge_index, edge_dim or WIDTH)
    x = torch.randn(20, WIDTH, dtype=F64), torch.randn(9, WIDTH, dtype=F64)
    assert_same(pair, x, edge_index, features)
    assert_same(pair, (x[0], None), edge_index, features, (20, 9))


def test_every_form_of_graph():
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH, dtype=F64)
    features = features_of(edge_index, WIDTH)
    layer, _ = pair_of()
    expected = layer(x, edge_index, features)
    assert torch.equal(layer(x, EdgeIndex(edge_index), features), expected)
    assert torch.equal(layer(x, Data(edge_index=edge_index, edge_attr=features)), expected)
    plan = st.plan((edge_index.flip(0), None, (NODES, NODES)), 16, dtype=F64)
    torch.testing.assert_close(layer(x, plan, features), expected)


def test_a_graph_without_edges_gives_what_pyg_gives():
    mine, theirs = pair_of()
    x, none = torch.randn(4, WIDTH, dtype=F64), torch.empty(2, 0, dtype=torch.int64)
    features = features_of(none, WIDTH)
    torch.testing.assert_close(mine(x, none, features), theirs(x, none, features))


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_gradients_pass_gradcheck(edge_dim):
    layer, _ = pair_of(edge_dim=edge_dim)
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 3, 1], [1, 1, 2, 2, 2, 0, 3]])
    x = torch.randn(5, WIDTH, dtype=F64, requires_grad=True)
    features = features_of(edge_index, edge_dim or WIDTH).requires_grad_()
    parameters = tuple(layer.parameters())

    def call(x: Tensor, features: Tensor, *_: Tensor) -> Tensor:
        return layer(x, edge_index, features)

    assert torch.autograd.gradcheck(call, (x, features, *parameters))


def test_messages_are_not_stored(monkeypatch):
    monkeypatch.setattr(edge_features, "LEAST_CHUNK", 64)
    edge_index, x = directed_graph(3000), torch.randn(NODES, WIDTH, requires_grad=True)
    layer, _ = pair_of(F32, edge_dim=1)
    features = features_of(edge_index, 1, F32)
    with Largest() as largest:
        layer(x, edge_index, features).sum().backward()
    assert 0 < largest.numbers <= 3000  # the features themselves


def test_layers_of_16_bits_and_autocast_train():
    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH)
    features = features_of(edge_index, 3, F32)
    layer, _ = pair_of(F32, edge_dim=3)
    expected = layer(x, edge_index, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(x, edge_index, features)
    half = layer.to(torch.bfloat16)
    out = half(x.bfloat16(), edge_index, features.bfloat16())
    out.sum().backward()
    scale = 0.05 * expected.abs().max().item()
    for found in (cast, out):
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=scale)


EDGES, X = directed_graph(), torch.randn(NODES, WIDTH)
LAYER, WIDE = ours.GINEConv(gin_map(5)), ours.GINEConv(gin_map(5), edge_dim=2)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, "nn must be a module", lambda: ours.GINEConv(3)),
        (ValueError, "aggr must be 'add'", lambda: ours.GINEConv(gin_map(3), aggr="mean")),
        (ValueError, "has in_features", lambda: ours.GINEConv(nn.ReLU(), edge_dim=3)),
        (TypeError, "edge_attr must be a tensor", lambda: LAYER(X, EDGES)),
        (ValueError, r"of shape \(160, 8\)", lambda: LAYER(X, EDGES, X)),
        (ValueError, "once for each", lambda: LAYER(X[None], EDGES, X)),
        (ValueError, "GINEConv: x must be", lambda: WIDE(X[:, :3], EDGES)),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(error, words, call):
    with pytest.raises(error, match=words):
        call()
