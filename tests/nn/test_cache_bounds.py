"""Exact bounds of what layers keep: graphs, values, plans, and calls of short-lived graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsetile.nn import GCNConv, aggregate, cache, clear_graph_cache
from sparsetile.nn import graph as module
from sparsetile.nn.graph import MAX_COUNTS, MAX_VALUES, PATIENCE, SHORT_LIVED_CALLS, Weights

NODES = 5


@pytest.fixture(autouse=True)
def cold_cache() -> Iterator[None]:
    clear_graph_cache()
    yield
    clear_graph_cache()


def edges(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(NODES, (2, 12), generator=generator)


def graph_of(edge_index: Tensor, short_lived: bool = False) -> module.Graph:
    given = cache.Given("edges", edge_index)
    found, _ = cache.find_graph("test", given, (NODES, NODES), torch.device("cpu"))
    found.short_lived = short_lived
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each plan of a graph was tuned."""
    made: list[str] = []
    plan = module.plan

    def counted(*args, **options):
        made.append(options["tune"])
        return plan(*args, **options)

    monkeypatch.setattr(module, "plan", counted)
    return made


@pytest.mark.parametrize(
    "calls, short_lived", [(SHORT_LIVED_CALLS, True), (SHORT_LIVED_CALLS + 1, False)]
)
def test_a_graph_that_ended_after_few_calls_makes_the_next_one_short_lived(calls, short_lived):
    edge_index = edges()
    for _ in range(calls):
        aggregate(torch.ones(NODES, 1), edge_index)
    del edge_index
    assert cache._Regime.short_lived is short_lived


def test_edges_are_short_lived_for_so_many_calls():
    cache._Regime.short_lived = True
    edge_index = edges()
    found = [cache.is_short_lived(edge_index) for _ in range(SHORT_LIVED_CALLS + 2)]
    assert found == [True] * SHORT_LIVED_CALLS + [False] * 2


def test_a_short_lived_graph_gets_a_chosen_plan_after_so_many_calls(planned):
    edge_index, x = edges(), torch.ones(NODES, 2)
    graph = graph_of(edge_index, short_lived=True)
    graph.calls = SHORT_LIVED_CALLS
    graph.aggregate(x)
    assert planned == ["none"]
    graph.calls += 1
    graph.aggregate(x)
    assert planned == ["none", "model"]


def test_values_get_a_plan_of_their_own_after_so_many_products(planned):
    edge_index, x = edges(), torch.ones(NODES, 2)
    graph = graph_of(edge_index)
    first, second = (Weights(name, torch.rand(graph.csr.nnz)) for name in ("first", "second"))
    graph.aggregate(x, first)
    for _ in range(PATIENCE):
        graph.aggregate(x, second)
    assert len(planned) == 1
    graph.aggregate(x, second)
    assert len(planned) == 2


def test_values_of_one_call_never_get_a_plan_beside_others(planned):
    edge_index, x = edges(), torch.ones(NODES, 2)
    graph = graph_of(edge_index)
    for _ in range(3 * PATIENCE):
        weights = Weights(None, torch.rand(graph.csr.nnz))
        expected = torch.zeros(NODES, NODES).index_put(
            (graph.rows, graph.csr.indices.long()), weights.values
        )
        torch.testing.assert_close(graph.aggregate(x, weights), expected @ x)
    assert len(planned) == 1


def test_counts_of_values_that_do_not_return_are_dropped():
    edge_index, x = edges(), torch.ones(NODES, 2)
    graph = graph_of(edge_index)
    largest = 0
    for number in range(3 * MAX_COUNTS):
        graph.aggregate(x, Weights(number, torch.rand(graph.csr.nnz)))
        largest = max(largest, len(graph._uses))
    assert largest == MAX_COUNTS + 1


def test_so_many_graphs_are_kept():
    held = [edges(seed) for seed in range(cache.MAX_GRAPHS + 3)]
    for number, edge_index in enumerate(held):
        aggregate(torch.ones(NODES, 1), edge_index)
        assert len(cache._graphs) == min(number + 1, cache.MAX_GRAPHS)


def test_so_many_sets_of_values_are_kept():
    edge_index, conv = edges(), GCNConv(2, 2)
    held = [torch.rand(12) for _ in range(MAX_VALUES + 2)]
    for number, weight in enumerate(held):
        conv(torch.ones(NODES, 2), edge_index, weight)
        ((_, graph),) = cache._graphs.values()
        assert len(graph._values) == min(number + 1, MAX_VALUES)


def test_so_many_plans_of_values_are_kept(planned):
    edge_index, x = edges(), torch.ones(NODES, 2)
    graph = graph_of(edge_index)
    for number in range(MAX_VALUES + 2):
        weights = Weights(number, torch.rand(graph.csr.nnz))
        for _ in range(PATIENCE + 1):
            graph.aggregate(x, weights)
        assert len(planned) == number + 1
        (plans,) = graph._plans.values()
        assert len(plans) == min(number + 1, MAX_VALUES) and number in plans


def test_so_many_requests_of_one_edge_index_are_remembered():
    edge_index = edges()
    for number in range(cache.MAX_GRAPHS + 2):
        given, size = cache.Given("edges", edge_index), (NODES + number, NODES)
        cache.find_graph("test", given, size, torch.device("cpu"))
        recent = cache._graphs.noted(edge_index)[cache._RECENT]
        assert len(recent) == number % cache.MAX_GRAPHS + 1


@pytest.mark.parametrize(
    "width, other, shared", [(1, 32, True), (32, 33, False), (33, 64, True), (64, 65, False)]
)
def test_widths_that_share_a_plan(planned, width, other, shared):
    edge_index = edges()
    graph = graph_of(edge_index)
    graph.aggregate(torch.ones(NODES, width))
    graph.aggregate(torch.ones(NODES, other))
    assert len(planned) == (1 if shared else 2)
