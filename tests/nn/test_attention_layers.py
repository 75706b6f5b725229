"""GATv2Conv, TransformerConv and edge features of GATConv compute what PyG's layers compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.nn import edge_features
from tests.nn.cases import (
    FLOWS,
    NODES,
    WIDTH,
    Largest,
    assert_same,
    directed_graph,
    pyg,
    same_weights,
    without_parallel_edges,
)

F64 = torch.float64
EDGE_DIM = 3
NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
NEAR = {"rtol": 1e-8, "atol": 1e-8}


def pair_of(name: str, *arguments: Any, **named: Any) -> tuple[Any, Any]:
    """Both layers in double precision with the same weights."""
    mine = getattr(ours, name)(*arguments, **named)
    theirs = getattr(pyg, name)(*arguments, **named)
    same_weights((mine, theirs))
    return mine.double(), theirs.double()


def features_of(edge_index: Tensor, width: int = EDGE_DIM) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(edge_index.shape[1], width, generator=generator, dtype=F64)


def nodes(count: int = NODES, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, dtype=F64)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("GATConv", {}),
    ("GATConv", {"concat": False, "residual": True, "add_self_loops": False}),
    ("GATv2Conv", {}),
    ("GATv2Conv", {"share_weights": True, "bias": False}),
    ("GATv2Conv", {"concat": False, "residual": True, "negative_slope": 0.4}),
    ("GATv2Conv", {"add_self_loops": False}),
    ("TransformerConv", {}),
    ("TransformerConv", {"beta": True, "bias": False}),
    ("TransformerConv", {"concat": False, "beta": True}),
    ("TransformerConv", {"root_weight": False}),
]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("name, options", OPTIONS)
def test_every_option_gives_results_and_gradients_of_pyg(name, options, edge_dim, flow):
    pair = pair_of(name, WIDTH, 5, heads=3, edge_dim=edge_dim, flow=flow, **options)
    edge_index = directed_graph()  # with parallel edges, whose features differ
    more = () if edge_dim is None else (features_of(edge_index),)
    assert_same(pair, nodes(), edge_index, *more, close=NEAR)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_edges_give_the_same_result(monkeypatch, name):
    monkeypatch.setattr(edge_features, "LEAST_CHUNK", 7)
    edge_index = directed_graph()
    pair = pair_of(name, WIDTH, 5, heads=2, edge_dim=EDGE_DIM)
    assert_same(pair, nodes(), edge_index, features_of(edge_index), close=NEAR)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("fill", ["mean", "add", "max", "min", "mul", 2.0, torch.ones(3)], ids=str)
@pytest.mark.parametrize("name", NAMES[:2])
def test_self_loops_get_features_as_in_pyg(name, fill, flow):
    edge_index = directed_graph()
    pair = pair_of(name, WIDTH, 5, heads=2, edge_dim=EDGE_DIM, fill_value=fill, flow=flow)
    assert_same(pair, nodes(), edge_index, features_of(edge_index), close=NEAR)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("name", NAMES)
def test_two_sets_of_nodes(name, edge_dim):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    pair = pair_of(name, (WIDTH, 6), 5, heads=2, edge_dim=edge_dim)
    more = () if edge_dim is None else (features_of(edge_index),)
    for layer in pair:
        layer.fill_value = 0.5
    assert_same(pair, (nodes(20), nodes(9, 6)), edge_index, *more, close=NEAR)


@pytest.mark.parametrize("name", NAMES)
def test_features_of_one_number_may_be_a_vector(name):
    edge_index, x = directed_graph(), nodes()
    layer, _ = pair_of(name, WIDTH, 5, edge_dim=1)
    vector = features_of(edge_index, 1).squeeze(1)
    assert torch.equal(layer(x, edge_index, vector), layer(x, edge_index, vector[:, None]))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_returned_in_pyg_s_order(name, flow):
    edge_index, x = directed_graph(), nodes()
    mine, theirs = pair_of(name, WIDTH, 5, heads=2, edge_dim=EDGE_DIM, flow=flow)
    given = (x, edge_index, features_of(edge_index))
    out, (edges, attention) = mine(*given, return_attention_weights=True)
    expected, (expected_edges, wanted) = theirs(*given, return_attention_weights=True)
    assert torch.equal(edges, expected_edges)
    torch.testing.assert_close(attention, wanted, **NEAR)
    torch.testing.assert_close(out, expected, **NEAR)
    asked = mine(*given, return_attention_weights=False)
    assert isinstance(asked, tuple) == (name == "TransformerConv")


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_draws_what_pyg_draws(name, edge_dim):
    edge_index, x = directed_graph(), nodes()
    mine, theirs = pair_of(name, WIDTH, 5, heads=2, edge_dim=edge_dim, dropout=0.5)
    more = () if edge_dim is None else (features_of(edge_index),)
    results = []
    for layer in (mine, theirs):
        torch.manual_seed(5)
        results.append(layer(x, edge_index, *more))
    torch.testing.assert_close(*results, **NEAR)
    mine.eval(), theirs.eval()
    torch.testing.assert_close(mine(x, edge_index, *more), theirs(x, edge_index, *more), **NEAR)
    assert not torch.allclose(mine(x, edge_index, *more), results[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_graph(name):
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    edge_index, x = directed_graph(), nodes()
    features = features_of(edge_index)
    layer, _ = pair_of(name, WIDTH, 5, heads=2, edge_dim=EDGE_DIM)
    expected = layer(x, edge_index, features)
    assert torch.equal(layer(x, EdgeIndex(edge_index), features), expected)
    assert torch.equal(layer(x, Data(edge_index=edge_index, edge_attr=features)), expected)
    assert not torch.allclose(layer(x, Data(edge_index=edge_index, edge_attr=-features)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_with_features_of_its_edges(name):
    edge_index, x = directed_graph(), nodes()
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    layer, _ = pair_of(name, WIDTH, 5, heads=2, edge_dim=EDGE_DIM, **options)
    plan = st.plan((edge_index.flip(0), None, (NODES, NODES)), 16, dtype=F64)
    features = features_of(edge_index)
    torch.testing.assert_close(layer(x, plan, features), layer(x, edge_index, features), **NEAR)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_sparse_tensor_is_a_pattern(name):
    edge_index, x = without_parallel_edges(directed_graph()), nodes()
    adj_t = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.rand(edge_index.shape[1]), (NODES, NODES)
    ).to_sparse_csr()
    layer, _ = pair_of(name, WIDTH, 5, heads=2)
    torch.testing.assert_close(layer(x, adj_t), layer(x, edge_index), **NEAR)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_features_pass_gradcheck(name):
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 3, 1], [1, 1, 2, 2, 2, 0, 3]])
    layer, _ = pair_of(name, 3, 2, heads=2, edge_dim=2)
    x = nodes(5, 3).requires_grad_()
    features = features_of(edge_index, 2).requires_grad_()
    parameters = tuple(layer.parameters())
    call = lambda x, features, *_: layer(x, edge_index, features)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, features, *parameters))


@pytest.mark.parametrize("name", NAMES)
def test_scores_beyond_the_range_of_exp(name):
    mine, theirs = pair_of(name, WIDTH, 5, heads=2)
    x, edge_index = 1000 * nodes(), directed_graph()
    result = mine(x, edge_index)
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result, theirs(x, edge_index), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_edges_times_features_is_made(monkeypatch, name, edge_dim):
    monkeypatch.setattr(edge_features, "LEAST_CHUNK", 64)
    edge_index, x = directed_graph(3000), nodes().requires_grad_()
    layer, _ = pair_of(name, WIDTH, 16, heads=2, edge_dim=edge_dim)
    more = () if edge_dim is None else (features_of(edge_index),)
    with Largest() as largest:
        layer(x, edge_index, *more).sum().backward()
    # Features, or numbers of edges and heads, in float64.
    assert 0 < largest.numbers <= (3000 + NODES) * EDGE_DIM < 3000 * 32 / 10


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_and_torch_func(name):
    edge_index, x = directed_graph(), nodes()
    layer, _ = pair_of(name, WIDTH, 5, edge_dim=EDGE_DIM)
    features = features_of(edge_index)
    call = lambda x: layer(x, edge_index, features)  # noqa: E731
    direction = torch.randn_like(x)
    _, tangent = torch.func.jvp(call, (x,), (direction,))
    gradient = torch.func.grad(lambda x: call(x).sum())(x)
    torch.testing.assert_close((gradient * direction).sum(), tangent.sum())
    leaf = x.clone().requires_grad_()
    call(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, gradient)


EDGES, X = directed_graph(), torch.randn(NODES, WIDTH)
FEATURES = torch.randn(EDGES.shape[1], EDGE_DIM)
PLAN = st.plan((EDGES.flip(0), None, (NODES, NODES)), 8)
V2 = ours.GATv2Conv(WIDTH, 5, edge_dim=EDGE_DIM)
TRANSFORMER = ours.TransformerConv(WIDTH, 5, edge_dim=EDGE_DIM)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (ValueError, "edge_dim must be at least 1", lambda: ours.GATv2Conv(2, 3, edge_dim=0)),
        (ValueError, "edge_dim must be at least", lambda: ours.TransformerConv(2, 3, edge_dim=-2)),
        (ValueError, "aggr must be 'add'", lambda: ours.GATv2Conv(2, 3, aggr="mean")),
        (ValueError, "None without edge_dim", lambda: ours.GATv2Conv(8, 3)(X, EDGES, FEATURES)),
        (ValueError, r"of shape \(160, 3\)", lambda: V2(X, EDGES, FEATURES[:, :2])),
        (TypeError, "edge_attr must be a float tensor", lambda: V2(X, EDGES, EDGES[0])),
        (TypeError, "edge_attr must be a tensor with edge_dim", lambda: TRANSFORMER(X, EDGES)),
        (
            ValueError,
            "None with a sparse matrix",
            lambda: V2(X, torch.eye(NODES).to_sparse_csr(), FEATURES),
        ),
        (
            ValueError,
            "fill_value must be",
            lambda: ours.GATv2Conv(8, 3, edge_dim=3, fill_value="std")(X, EDGES, FEATURES),
        ),
        (ValueError, "once for each", lambda: V2(X[None], EDGES, FEATURES)),
        (TypeError, "scores depend on them", lambda: V2((X, None), EDGES, FEATURES)),
        (ValueError, "add_self_loops=False", lambda: V2(X, PLAN)),
    ],
)
def test_errors_say_what_to_do(error, words, call):
    with pytest.raises(error, match=words):
        call()
