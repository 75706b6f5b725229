"""Graphs are prepared once, kept while their tensors live, and noticed when they change."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor

from sparsetile.nn import GATConv, GCNConv, GINConv, SAGEConv, cache, clear_graph_cache
from sparsetile.nn import graph as graphs
from sparsetile.plan.family import many_products
from tests.nn.cases import FLOWS, NODES, PAIRS, WIDTH, directed_graph, weights_of


@pytest.fixture(autouse=True)
def _fresh():
    clear_graph_cache()
    yield
    clear_graph_cache()


@pytest.fixture
def builds(calls_of, monkeypatch):
    """The plans that were built, in order. torch gathers nothing, however small."""
    monkeypatch.setattr(graphs, "MOST_GATHERED", -1)
    return calls_of(graphs, "plan")


@pytest.mark.parametrize("name", PAIRS)
def test_a_graph_is_planned_once(name, builds):
    layer = PAIRS[name](5)[0]
    edge_index = directed_graph()
    for _ in range(3):
        x = torch.randn(NODES, WIDTH, requires_grad=True)
        layer(x, edge_index).sum().backward()
    assert len(builds) == 1


def test_narrow_layers_of_a_network_share_a_plan(builds):
    first, second = GCNConv(WIDTH, 16), GCNConv(16, 3)
    edge_index = directed_graph()
    second(first(torch.randn(NODES, WIDTH), edge_index), edge_index)
    assert len(builds) == 1
    GCNConv(WIDTH, 64)(torch.randn(NODES, WIDTH), edge_index)  # summed at width 8
    assert len(builds) == 1
    GCNConv(64, 48)(torch.randn(NODES, 64), edge_index)
    assert len(builds) == 2


def test_layers_that_read_the_same_edges_otherwise_have_graphs_of_their_own():
    """Some add self-loops, and some walk from target to source."""
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    weight = weights_of(edge_index)
    layers = [GCNConv(WIDTH, 3, flow=flow) for flow in FLOWS]
    layers += [GCNConv(WIDTH, 3, normalize=False, add_self_loops=False)]
    found = [layer(x, edge_index, weight) for layer in layers]
    for layer, mine in zip(layers, found, strict=True):
        clear_graph_cache()
        torch.testing.assert_close(mine, layer(x, edge_index, weight))


def test_edges_changed_in_place_are_noticed(builds):
    x = torch.randn(NODES, WIDTH)
    for layer in (GCNConv(WIDTH, 5), SAGEConv(WIDTH, 5), GATConv(WIDTH, 5)):
        clear_graph_cache()
        builds.clear()
        edge_index = directed_graph()
        before = layer(x, edge_index)
        edge_index[1, 3:9] = 20
        after = layer(x, edge_index)
        assert len(builds) == 2 and len(cache._graphs) == 1
        assert not torch.allclose(after, before)
        torch.testing.assert_close(after, layer(x, edge_index.clone()))


def test_edges_that_look_as_before_are_read_no_more(builds, calls_of):
    layer, x, edge_index = GATConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    layer(x, edge_index)
    read = calls_of(cache, "edges_fingerprint")
    expected = layer(x, edge_index)
    assert not read and len(builds) == 1
    layer(torch.randn(NODES + 1, WIDTH), edge_index)  # another size
    edge_index[:, :9].fill_(3)  # through a view
    assert not torch.allclose(layer(x, edge_index), expected)
    edge_index.data = directed_graph()  # other memory, and the counter stands still
    torch.testing.assert_close(layer(x, edge_index), expected)
    assert len(read) == 3
    clear_graph_cache()
    layer(x, edge_index)
    assert len(read) == 4 and len(cache._graphs.owners()) == 1
    del edge_index
    gc.collect()
    read.clear()
    assert not cache._graphs.owners()


def test_edges_whose_counter_does_not_tell_are_read_each_time():
    layer, x, edge_index = GATConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    edge_index.share_memory_()  # other processes may write it
    before = layer(x, edge_index)
    edge_index.numpy()[1, 3:9] = 20
    after = layer(x, edge_index)
    assert not torch.allclose(after, before)
    assert "recent" not in cache._graphs.notes(edge_index)


@pytest.mark.parametrize("tracked", [False, True])
def test_weights_changed_in_place_are_noticed_and_keep_the_plan(builds, tracked):
    layer, x, edge_index = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    weight = weights_of(edge_index).requires_grad_(tracked)
    before = layer(x, edge_index, weight)
    with torch.no_grad():
        weight[3:9] *= 5
    after = layer(x, edge_index, weight)
    assert len(builds) == 1
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, layer(x, edge_index, weight.detach().clone()))


def test_what_is_kept_of_passing_weights_is_bounded(builds):
    layer, x, edge_index = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    weight = weights_of(edge_index)
    for _ in range(graphs.MAX_COUNTS + 10):
        weight *= 1.01
        layer(x, edge_index, weight)
    (kept,) = (graph for _, graph in cache._graphs.values())
    assert len(builds) == 1
    assert len(kept._values) == graphs.MAX_VALUES and len(kept._uses) <= graphs.MAX_COUNTS + 1


def test_new_weights_at_every_step_keep_the_plan(builds):
    layer, x, edge_index = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    scores = weights_of(edge_index).requires_grad_()
    for _ in range(3):
        layer(x, edge_index, scores.sigmoid()).sum().backward()
    assert len(builds) == 1 and scores.grad is not None


def test_weights_that_stay_get_a_plan_that_holds_them(builds):
    layer, x, edge_index = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    first, second = weights_of(edge_index), 3 + weights_of(edge_index)
    expected = layer(x, edge_index, first), layer(x, edge_index, second)
    for _ in range(graphs.PATIENCE + 3):
        torch.testing.assert_close(layer(x, edge_index, first), expected[0])
        torch.testing.assert_close(layer(x, edge_index, second), expected[1])
    assert len(builds) == 2


def test_two_weights_of_one_graph_differentiate_together():
    layer, edge_index = GCNConv(WIDTH, 5), directed_graph()
    x = torch.randn(NODES, WIDTH, requires_grad=True)
    first, second = weights_of(edge_index), 3 + weights_of(edge_index)
    (layer(x, edge_index, first) + layer(x, edge_index, second)).sum().backward()
    together, x.grad = x.grad, None
    layer(x, edge_index, first).sum().backward()
    layer(x, edge_index, second).sum().backward()
    torch.testing.assert_close(x.grad, together)


def test_a_graph_first_used_in_inference_mode_can_train_later():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    for name, make in PAIRS.items():
        layer = make(5)[0]
        clear_graph_cache()
        with torch.inference_mode():
            expected = layer(x, edge_index)
        own = x.clone().requires_grad_()
        result = layer(own, edge_index)
        result.sum().backward()
        torch.testing.assert_close(result.detach(), expected.clone(), msg=name)


@pytest.mark.parametrize("name", PAIRS)
def test_graphs_are_dropped_with_their_tensors(name):
    layer = PAIRS[name](5)[0]
    x, edge_index = torch.randn(NODES, WIDTH, requires_grad=True), directed_graph()
    layer(x, edge_index).sum().backward()
    assert len(cache._graphs) == 1
    del edge_index
    gc.collect()
    assert len(cache._graphs) == 0


def test_graphs_of_matrices_are_dropped_with_them():
    layer = GINConv(torch.nn.Linear(WIDTH, 5))
    for layout in (torch.sparse_csr, torch.sparse_coo):
        matrix = torch.eye(NODES).to_sparse(layout=layout)
        layer(torch.randn(NODES, WIDTH), matrix)
        assert len(cache._graphs) == 1
        del matrix
        gc.collect()
        assert len(cache._graphs) == 0


def test_matrix_values_changed_in_place_are_noticed(builds):
    matrix = torch.eye(NODES).to_sparse_csr()
    layer, x = GINConv(torch.nn.Identity()), torch.randn(NODES, WIDTH)
    torch.testing.assert_close(layer(x, matrix), 2 * x)
    matrix.values().mul_(3)
    torch.testing.assert_close(layer(x, matrix), 4 * x)
    assert len(builds) == 1


def test_only_so_many_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(cache._graphs, "most", 3)
    layer, x = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH)
    alive = [directed_graph(seed=seed) for seed in range(5)]
    for edge_index in alive:
        layer(x, edge_index)
    assert len(cache._graphs) == 3


def test_attention_stores_nothing_of_edges_times_features():
    edges, width = 20_000, 64
    edge_index = torch.randint(50, (2, edges))
    layer = GATConv(4, width)
    seen = []

    def look(tensor):
        seen.append(tensor.numel())
        return tensor

    x = torch.randn(50, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        layer(x, edge_index).sum().backward()
    assert seen and max(seen) <= 3 * edges


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("key, times", [(None, 0), ("of weights", 3)])
def test_what_replays_computes_values_of_weights_each_time(monkeypatch, key, times, captures):
    """So do the runs that prepare a capture. Values of the pattern alone are computed once."""
    edges = directed_graph()
    SAGEConv(WIDTH, 4)(torch.randn(NODES, WIDTH), edges)
    (entry,) = cache._graphs.values()
    computed: list[Tensor] = []

    def compute() -> Tensor:
        computed.append(torch.ones(entry.graph.csr.nnz))
        return computed[-1]

    entry.graph.keep_values("values", key, compute)
    monkeypatch.setattr(graphs, "capturing", lambda device: captures)
    with contextlib.nullcontext() if captures else many_products():
        for _ in range(3):
            found = entry.graph.keep_values("values", key, compute)
    assert len(computed) == 1 + times and found.values is computed[-1]
    monkeypatch.undo()
    assert entry.graph.keep_values("values", key, compute).values is computed[0]
