"""Results, gradients and state dicts of the layers are those of PyG's."""

from __future__ import annotations

import copy

import pytest
import torch

from sparsetile import nn as ours
from tests.nn.cases import (
    FLOWS,
    NODES,
    PAIRS,
    WIDTH,
    directed_graph,
    pyg,
    same_weights,
    weights_of,
    without_parallel_edges,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def assert_same(mine, theirs, x, *graph):
    """Compare results, and gradients of x and of every parameter."""
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    results = [layer(own, *graph) for layer, own in zip((mine, theirs), inputs, strict=True)]
    torch.testing.assert_close(results[0], results[1], **CLOSE)
    slope = torch.randn_like(results[0])
    for result in results:
        result.backward(slope)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **CLOSE)
    named = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, **CLOSE)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("out", [5, 12])  # narrower and wider than x
@pytest.mark.parametrize("name", PAIRS)
def test_results_and_gradients_are_those_of_pyg(name, out, flow):
    mine, theirs = same_weights(PAIRS[name](out, flow=flow))
    assert_same(mine, theirs, torch.randn(NODES, WIDTH), directed_graph())


@pytest.mark.parametrize("name", PAIRS)
def test_a_graph_without_edges_gives_what_pyg_gives(name):
    mine, theirs = same_weights(PAIRS[name](5))
    assert_same(mine, theirs, torch.randn(4, WIDTH), torch.empty(2, 0, dtype=torch.int64))


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_go_both_ways(name):
    mine, theirs = PAIRS[name](5)
    assert list(mine.state_dict()) != []
    assert {key: value.shape for key, value in mine.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("out", [5, 12])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"bias": False},
    ],
)
def test_gcn_uses_edge_weights_as_pyg_does(options, out, flow):
    # PyG gives a gradient to each of a node's parallel self-loops though one alone has a part.
    edge_index = directed_graph()
    edge_index[:, 30] = torch.tensor([9, 10])
    mine, theirs = same_weights(
        (
            ours.GCNConv(WIDTH, out, flow=flow, **options),
            pyg.GCNConv(WIDTH, out, flow=flow, **options),
        )
    )
    x = torch.randn(NODES, WIDTH)
    weights = [weights_of(edge_index).requires_grad_() for _ in range(2)]
    results = [layer(x, edge_index, w) for layer, w in zip((mine, theirs), weights, strict=True)]
    torch.testing.assert_close(results[0], results[1], **CLOSE)
    slope = torch.randn_like(results[0])
    for result in results:
        result.backward(slope)
    torch.testing.assert_close(weights[0].grad, weights[1].grad, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(mine(x, edge_index, weights[0]), results[0], **CLOSE)


def test_of_parallel_self_loops_the_last_one_s_weight_counts():
    edge_index = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    weight = torch.tensor([0.5, 7.0, 3.0, 2.0])
    mine, theirs = same_weights((ours.GCNConv(WIDTH, 4), pyg.GCNConv(WIDTH, 4)))
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(mine(x, edge_index, weight), theirs(x, edge_index, weight), **CLOSE)


def test_gcn_applies_relu_on_either_side():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    for out in (5, 12):
        layer = ours.GCNConv(WIDTH, out)
        result = layer(x, edge_index, relu=True)
        assert (result == 0).any()
        torch.testing.assert_close(result, layer(x, edge_index).relu())


def test_improved_without_weights_is_what_pyg_does():
    mine, theirs = same_weights(
        (ours.GCNConv(WIDTH, 5, improved=True), pyg.GCNConv(WIDTH, 5, improved=True))
    )
    assert_same(mine, theirs, torch.randn(NODES, WIDTH), directed_graph())


@pytest.mark.parametrize("aggr", ["mean", "max", "min", "sum", "add"])
def test_sage_between_two_sets_of_nodes(aggr):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    edge_index[:, 0] = edge_index[:, 1]
    pair = ours.SAGEConv((WIDTH, 6), 5, aggr), pyg.SAGEConv((WIDTH, 6), 5, aggr)
    mine, theirs = same_weights(pair)
    x = torch.randn(20, WIDTH), torch.randn(9, 6)
    torch.testing.assert_close(mine(x, edge_index), theirs(x, edge_index), **CLOSE)
    alone = x[0], None
    torch.testing.assert_close(
        mine(alone, edge_index, size=(20, 9)), theirs(alone, edge_index, size=(20, 9)), **CLOSE
    )


@pytest.mark.parametrize("channels", [WIDTH, (WIDTH, WIDTH)])
def test_gat_between_two_sets_of_nodes(channels):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    mine, theirs = same_weights(
        (ours.GATConv(channels, 5, heads=2), pyg.GATConv(channels, 5, heads=2))
    )
    x = torch.randn(20, WIDTH), torch.randn(9, WIDTH)
    torch.testing.assert_close(mine(x, edge_index), theirs(x, edge_index), **CLOSE)
    alone = x[0], None
    torch.testing.assert_close(
        mine(alone, edge_index, size=(20, 9)), theirs(alone, edge_index, size=(20, 9)), **CLOSE
    )


@pytest.mark.parametrize("flow", FLOWS)
def test_gat_returns_attention_in_pyg_s_order(flow):
    mine, theirs = same_weights(PAIRS["gat"](5, flow=flow))
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    _, (edges, attention) = mine(x, edge_index, return_attention_weights=True)
    _, (expected_edges, expected) = theirs(x, edge_index, return_attention_weights=True)
    assert torch.equal(edges, expected_edges)
    torch.testing.assert_close(attention, expected, **CLOSE)


def test_gat_attends_with_scores_beyond_the_range_of_exp():
    mine, theirs = same_weights(PAIRS["gat"](5))
    x, edge_index = 1000 * torch.randn(NODES, WIDTH), directed_graph()
    result = mine(x, edge_index)
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result, theirs(x, edge_index), rtol=1e-3, atol=1e-1)


def test_gat_drops_attention_in_training_alone():
    pair = ours.GATConv(WIDTH, 5, dropout=0.5), pyg.GATConv(WIDTH, 5, dropout=0.5)
    mine, theirs = same_weights(pair)
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    results = []
    for layer in (mine, theirs):  # the same draws: edges are numbered as PyG numbers them
        torch.manual_seed(5)
        results.append(layer(x, edge_index))
    torch.testing.assert_close(results[0], results[1], **CLOSE)
    mine.eval(), theirs.eval()
    torch.testing.assert_close(mine(x, edge_index), theirs(x, edge_index), **CLOSE)
    assert not torch.allclose(mine(x, edge_index), results[0])


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "sage-max", "gin"])
def test_features_may_have_batch_dimensions(name):
    mine, _ = PAIRS[name](5)
    x, edge_index = torch.randn(2, 3, NODES, WIDTH), directed_graph()
    result = mine(x, edge_index)
    assert result.shape == (2, 3, NODES, 5)
    torch.testing.assert_close(result[1, 2], mine(x[1, 2], edge_index), **CLOSE)


@pytest.mark.parametrize("name", PAIRS)
def test_autocast_gives_results_near_those_of_float32(name):
    mine, _ = PAIRS[name](5)
    x, edge_index = torch.randn(NODES, WIDTH, requires_grad=True), directed_graph()
    expected = mine(x, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = mine(x, edge_index)
    scale = expected.abs().max().item()
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05 * scale)
    result.float().sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRS)
def test_layers_of_16_bits_train(name, dtype):
    mine, _ = PAIRS[name](5)
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    expected = mine(x, edge_index).detach()
    mine.to(dtype)
    own = x.to(dtype).requires_grad_()
    result = mine(own, edge_index)
    assert result.dtype is dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05 * scale)
    result.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (own, *mine.parameters()))


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_pass_gradcheck_in_double_precision(name):
    layer = PAIRS[name](3)[0].double()
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 3, 1], [1, 1, 2, 2, 2, 0, 3]])
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    parameters = tuple(layer.parameters())

    def call(x, *_):
        return layer(x, edge_index)

    assert torch.autograd.gradcheck(call, (x, *parameters))


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"add_self_loops": False}])
def test_gradients_of_edge_weights_pass_gradcheck(options):
    layer = ours.GCNConv(3, 4, **options).double()
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 3, 1], [1, 1, 2, 2, 2, 0, 3]])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = weights_of(edge_index, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: layer(x, edge_index, w), (x, weight))


def test_weights_of_0_have_finite_gradients():
    layer = ours.GCNConv(WIDTH, 4, add_self_loops=False)
    weight = torch.zeros(2, requires_grad=True)
    layer(torch.randn(3, WIDTH), torch.tensor([[0, 1], [1, 2]]), weight).sum().backward()
    assert bool(weight.grad.isfinite().all())


def test_layers_can_be_copied_and_reset():
    ours.clear_graph_cache()  # a short-lived graph is summed in another order until it stays
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    for name, make in PAIRS.items():
        layer = make(5)[0].eval()
        before = layer(x, edge_index)
        assert torch.equal(copy.deepcopy(layer)(x, edge_index), before)
        layer.reset_parameters()
        assert not torch.allclose(layer(x, edge_index), before), name
        assert type(layer).__name__ in repr(layer)


def test_sparse_tensors_are_adj_t_as_in_pyg():
    edge_index = without_parallel_edges(directed_graph())
    dense = torch.zeros(NODES, NODES)
    dense[edge_index[1], edge_index[0]] = weights_of(edge_index)
    x = torch.randn(NODES, WIDTH)
    for name, options in [("gcn", {}), ("gcn", {"improved": True}), ("gin", {}), ("gat", {})]:
        mine, theirs = same_weights(PAIRS[name](5, **options))
        for adj_t in (dense.to_sparse_csr(), dense.to_sparse_coo()):
            torch.testing.assert_close(mine(x, adj_t), theirs(x, adj_t), **CLOSE)
    for aggr in ("sum", "mean", "max"):
        mine, theirs = same_weights((ours.SAGEConv(WIDTH, 5, aggr), pyg.SAGEConv(WIDTH, 5, aggr)))
        adj_t = dense.to_sparse_csr()
        with torch.no_grad():
            torch.testing.assert_close(mine(x, adj_t), theirs(x, adj_t), **CLOSE)
