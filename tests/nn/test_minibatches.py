"""Sampled graphs, new at every step: cheap plans, nothing kept, results as PyG's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import sparsetile
from sparsetile.nn import GCNConv, SAGEConv, aggregate, cache, clear_graph_cache, sampled
from sparsetile.nn import graph as graphs
from sparsetile.nn.graph import SHORT_LIVED_CALLS
from tests.examples import load_example
from tests.nn.cases import NODES, PAIRS, WIDTH, directed_graph, pyg, same_weights

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _fresh():
    clear_graph_cache()
    yield
    clear_graph_cache()


@pytest.fixture
def tunes(monkeypatch):
    """How the systems of the plans that were built were chosen, in order."""
    made = []
    plan = graphs.plan

    def counted(*arguments, **options):
        made.append(options.get("tune", "model"))
        return plan(*arguments, **options)

    monkeypatch.setattr(graphs, "plan", counted)
    return made


@pytest.fixture(params=["blocks", "plans"])
def passed(request, constants):
    """Short-lived graphs: sampled ones, or untuned plans if these are not supported."""
    if request.param == "plans":
        constants(sampled, SAMPLED_DEVICES=())
    return [] if request.param == "blocks" else ["none"]


def test_a_plan_without_tuning_takes_the_exact_system():
    A = torch.eye(6).to_sparse_csr()
    plan = sparsetile.plan(A, 8, tune="none")
    assert plan.system == "cpu" and plan.reorder == "identity"
    assert plan.info["considered"] == {} and plan.info["rejected"] == {}
    assert "cpu       the device's exact system, compared with no other" in plan.explain()
    B = torch.randn(6, 8)
    assert torch.equal(plan @ B, B)


def test_a_plan_without_tuning_takes_a_system_that_is_named():
    plan = sparsetile.plan(torch.eye(6).to_sparse_csr(), 8, tune="none", system="dense")
    assert plan.system == "dense" and "asked for by name" in plan.explain()


def test_a_plan_without_tuning_says_what_the_exact_system_cannot():
    with pytest.raises(NotImplementedError, match="cpu: "):
        sparsetile.plan(torch.eye(6).to_sparse_csr(), 8, tune="none", dtype=torch.float8_e4m3fn)


def test_graphs_that_pass_by_are_not_tuned(tunes, passed):
    layer, x = SAGEConv(WIDTH, 5), torch.randn(NODES, WIDTH, requires_grad=True)
    for seed in range(4):
        layer(x, directed_graph(seed=seed)).sum().backward()
    assert tunes == ["model", *3 * passed]


def test_a_graph_that_is_short_lived_has_one_plan_for_all_widths(tunes, passed):
    first, second = SAGEConv(WIDTH, 64), SAGEConv(64, 100)
    for seed in range(2):
        edge_index = directed_graph(seed=seed)
        second(first(torch.randn(NODES, WIDTH), edge_index), edge_index)
        del edge_index
    assert tunes == ["model", "model", *passed]


def test_a_graph_that_stays_gets_its_own_plan_after_all(tunes):
    layer, x = GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH)
    layer(x, directed_graph(seed=1))
    edge_index = directed_graph()
    expected = layer(x, edge_index)
    for _ in range(2 * SHORT_LIVED_CALLS):
        torch.testing.assert_close(layer(x, edge_index), expected, **CLOSE)
    assert tunes == ["model", "none", "model"]
    del edge_index
    layer(x, directed_graph(seed=2))  # the last graph stayed: this one may
    assert tunes[3:] == ["model"]


def _parts(graph):
    """The plans of a graph, or the rows of a sampled graph."""
    if isinstance(graph, sampled.SampledGraph):
        held = [graph._by_target, graph._by_target.transposed]
        canonical = graph._canonical
        return held if canonical is None else [*held, canonical, *_parts(canonical)]
    return [plan for kept in graph._plans.values() for plan in kept.values()]


@pytest.mark.usefixtures("passed")
@pytest.mark.parametrize("name", PAIRS)
def test_a_block_s_memory_goes_with_it_at_once(name, monkeypatch):
    """Nothing waits for the garbage collector, which knows nothing of a GPU's memory."""
    monkeypatch.setattr("sparsetile.nn.graph.MOST_GATHERED", -1)  # tiny graphs have plans, too
    layer = PAIRS[name](5)[0]
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            edge_index = directed_graph(seed=seed)
            x = torch.randn(NODES, WIDTH, requires_grad=True)
            layer(x, edge_index).sum().backward()
            graphs = [graph for _, graph in cache._graphs.values()]
            watched = [weakref.ref(part) for each in graphs for part in [each, *_parts(each)]]
            assert len(watched) > 1
            del edge_index, graphs
            assert not len(cache._graphs) and not cache._graphs.owners()
            assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_buffer_that_is_filled_anew_leaves_nothing_behind():
    layer, x, edge_index = SAGEConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    for seed in range(20):
        edge_index.copy_(directed_graph(seed=seed))
        torch.testing.assert_close(
            layer(x, edge_index), layer(x, directed_graph(seed=seed)), **CLOSE
        )
        assert len(cache._graphs) == 1
    assert [owner is edge_index for owner in cache._graphs.owners()] == [True]
    assert weakref.getweakrefcount(edge_index) <= 2  # one of cache.py, one of identity.py


def test_blocks_of_two_sets_of_nodes_train_as_in_pyg():
    example = load_example("graphsage_minibatch")
    graph, labels = example.community_graph()
    torch.manual_seed(0)
    x = torch.randn(labels.numel(), example.WIDTH)
    widths = [(example.WIDTH, 16), (16, 4)]
    pairs = [same_weights((SAGEConv(a, b), pyg.SAGEConv(a, b))) for a, b in widths]
    for step in range(3):
        seeds = torch.randperm(labels.numel())[:64]
        nodes, drawn = example.sample_graphs(graph, seeds)
        results = []
        for which in (0, 1):
            h = x[nodes]
            for pair, block in zip(pairs, drawn, strict=True):
                h = pair[which]((h, h[: block.targets]), block.edge_index).tanh()
            results.append(h)
        torch.testing.assert_close(results[0], results[1], **CLOSE)
        for result in results:
            result.square().sum().backward()
        for mine, theirs in pairs:
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
        del nodes, drawn, block
        assert not len(cache._graphs), step


def test_batches_trimmed_layer_by_layer_as_pyg_s_loaders_ask_for():
    from torch_geometric.utils import trim_to_layer

    # As NeighborLoader numbers them: seeds, then each hop's new nodes; edges hop by hop.
    nodes, edges = [3, 6, 12], [8, 20]
    torch.manual_seed(0)
    first = torch.stack([torch.randint(9, (8,)), torch.randint(3, (8,))])
    second = torch.stack([torch.randint(21, (20,)), torch.randint(3, 9, (20,))])
    whole = torch.cat([first, second], 1)
    layers = [same_weights((SAGEConv(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, WIDTH))) for _ in range(2)]
    start, results = torch.randn(21, WIDTH), []
    for which in (0, 1):
        x, edge_index = start, whole
        for depth, pair in enumerate(layers):
            x, edge_index, _ = trim_to_layer(depth, nodes, edges, x, edge_index)
            x = pair[which](x, edge_index)
        results.append(x[: nodes[0]])
    torch.testing.assert_close(results[0], results[1], **CLOSE)


def test_one_call_aggregates_a_fresh_block_each_time(tunes, passed):
    x = torch.randn(NODES, WIDTH)
    for seed in range(3):
        edge_index = directed_graph(seed=seed)
        found = aggregate(x, edge_index, reduce="mean")
        torch.testing.assert_close(found, pyg.SimpleConv("mean")(x, edge_index), **CLOSE)
        del edge_index
    assert tunes == ["model", *2 * passed] and not len(cache._graphs)


def test_the_example_learns_from_sampled_blocks(capsys):
    accuracy = load_example("graphsage_minibatch").main(epochs=1)
    assert accuracy > 0.9
    assert "accuracy" in capsys.readouterr().out
