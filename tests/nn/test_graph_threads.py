"""What several threads ask of one graph at the same time is made once."""

from __future__ import annotations

import pytest
import torch

from sparsetile.nn import GCNConv, SAGEConv, cache, clear_graph_cache
from sparsetile.nn import graph as graphs
from sparsetile.nn.graph import Graph
from sparsetile.nn.sampled import SampledGraph
from tests.locks import Slow, at_once, slowed, waits_for
from tests.nn.cases import NODES, WIDTH, directed_graph, without_parallel_edges


@pytest.fixture(autouse=True)
def _fresh():
    clear_graph_cache()
    yield
    clear_graph_cache()


@pytest.fixture
def graph() -> Graph:
    edges = without_parallel_edges(directed_graph())
    SAGEConv(WIDTH, 4)(torch.randn(NODES, WIDTH), edges)
    (entry,) = cache._graphs.values()
    return entry.graph


def test_one_graph_for_layers_that_start_together(monkeypatch):
    slow, layer, edges = slowed(monkeypatch, cache, "building"), GCNConv(WIDTH, 4), directed_graph()
    x = torch.randn(NODES, WIDTH)
    one, other = at_once(lambda: layer(x, edges))
    assert slow.calls == 1
    torch.testing.assert_close(one, other)


def test_one_plan_for_products_of_one_width(graph: Graph, monkeypatch):
    slow, x = slowed(monkeypatch, graphs, "plan"), torch.randn(NODES, 100)
    one, other = at_once(lambda: graph._plan(x.shape[-1], x.dtype, None)[0])
    assert one is other is not None and slow.calls == 1


def test_one_plan_of_rows_for_attention(graph: Graph, monkeypatch):
    slow = slowed(monkeypatch, graphs, "plan")
    one, other = at_once(lambda: graph._make_row_plan(8))
    assert one is other is not None and slow.calls == 1


def test_tensors_of_a_pattern_are_made_once(graph: Graph):
    slow = Slow(lambda: (torch.ones(graph.csr.nnz),))
    one, other = at_once(lambda: graph.derived("ones", slow))
    assert one is other is not None and slow.calls == 1


def test_values_of_a_name_are_computed_once(graph: Graph):
    slow = Slow(lambda: torch.ones(graph.csr.nnz))
    one, other = at_once(lambda: graph.keep_values("ones", None, slow).values)
    assert one is other is not None and slow.calls == 1


def test_one_map_of_weights_prepared_by_one_thread_after_the_other(graph: Graph, monkeypatch):
    slow = slowed(monkeypatch, graphs.WeightMap, "prepare_gradients")
    graph.weight_map(differentiable=False)
    one, other = at_once(lambda: graph.weight_map(differentiable=True))
    assert one is other is not None and slow.most == 1


def test_what_was_built_is_never_replaced(graph: Graph):
    """Another thread may use it already, on a stream of its own."""
    first, second = torch.ones(1), torch.ones(1)
    graph._edge_of = None
    graph._publish("_edge_of", first)
    graph._publish("_edge_of", second)
    assert graph._edge_of is first
    assert waits_for(graphs.lock, lambda: graph._publish("_edge_of", second))


def test_each_thread_has_its_own_block_of_a_graph_that_passes_by(monkeypatch):
    """Products of a block read, sort and transpose it."""
    slow, edges = slowed(monkeypatch, cache, "make_sampled"), directed_graph()
    monkeypatch.setattr(cache._Regime, "short_lived", True)
    layer, x = SAGEConv(WIDTH, 4), torch.randn(NODES, WIDTH)
    one, other = at_once(lambda: layer(x, edges))
    assert torch.equal(one, other) and slow.calls == 2
    first, second = (entry.graph for entry in cache._graphs.values())
    assert (
        isinstance(first, SampledGraph) and isinstance(second, SampledGraph) and first is not second
    )
