"""One graph that is new, by kernels that run on the host: what it costs, and what it leaves to its
canonical form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsetile.cache.fresh import direct_seconds
from sparsetile.nn.fresh import FreshGraph, make_fresh
from sparsetile.nn.graph import Weights
from tests.emulator.build import host_compiler
from tests.emulator.test_fresh_layers import made
from tests.nn.fresh_layers import new_edges

__all__ = ["made"]

pytestmark = [
    pytest.mark.skipif(host_compiler() is None, reason="no g++ here"),
    pytest.mark.usefixtures("made"),
]

TARGETS, SOURCES, WIDTH = 40, 60, 8


def graph_of(targets: int = TARGETS, sources: int = SOURCES) -> tuple[FreshGraph, Tensor]:
    """A graph of more sources than targets, and its matrix."""
    edges = new_edges(targets, 10 * targets, targets) % torch.tensor([[sources], [targets]])
    dense = torch.zeros(targets, sources, dtype=torch.float64)
    dense.index_put_((edges[1], edges[0]), dense.new_ones(1), accumulate=True)
    return make_fresh(
        "graph", edges, "source_to_target", "keep", (targets, sources), False, None
    ), dense


def features(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-3, 4, (rows, WIDTH)).to(dtype)


def test_a_product_costs_what_its_type_and_width_cost():
    graph, _ = graph_of()
    wanted = 0.0
    for n, dtype in ((64, torch.float32), (64, torch.float16), (32, torch.float32)):
        graph.spend(n, dtype, False)
        wanted += direct_seconds(
            TARGETS, SOURCES, graph.by_target.entries, n, dtype.itemsize, torch.device("cpu")
        )
    spent = sum(count * graph._cost(*kind) for kind, count in graph._products.items())
    assert spent == pytest.approx(wanted)


def test_the_canonical_graph_has_each_edge_once():
    graph, dense = graph_of()
    x = features(SOURCES)
    assert torch.equal(graph.aggregate(x), (dense @ x.double()).float())
    assert graph._canonical is None
    found = graph.canonical.aggregate(x)
    assert torch.equal(found, ((dense > 0).double() @ x.double()).float())
    assert torch.equal(graph.canonical.multiplicity.double(), dense[dense > 0])
    assert graph.canonical is graph.canonical


def test_the_canonical_graph_takes_what_the_kernels_do_not():
    graph, dense = graph_of()
    x = features(SOURCES, torch.float64)
    assert torch.equal(graph.aggregate(x), dense @ x) and graph._canonical is not None


def test_gradients_and_convolutions_in_both_directions():
    graph, dense = graph_of()
    x, g = features(SOURCES), features(TARGETS)
    forward, backward = (dense @ x.double()).float(), (dense.T @ g.double()).float()
    assert torch.equal(graph.gradient(g), backward)
    assert torch.equal(graph.convolve(x, False, False), forward)
    assert torch.equal(graph.convolve(g, False, True), backward)
    assert graph._canonical is None and graph.convolve(x.double(), False, False) is None
    weights = Weights(None, torch.full((graph.by_target.entries,), 2.0))
    assert torch.equal(graph.gradient(g, weights), 2 * backward)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_graphs_of_other_sizes_have_launches_of_their_own(reduce: str):
    for targets, sources in ((TARGETS, SOURCES), (4 * TARGETS, 9 * SOURCES), (TARGETS, SOURCES)):
        graph, dense = graph_of(targets, sources)
        x = features(sources, torch.float64).float().requires_grad_()
        g = torch.randint(-3, 4, (targets, WIDTH)).float()
        found = graph.aggregate(x, reduce=reduce)
        (gradient,) = torch.autograd.grad(found, x, g)
        if reduce == "sum":
            assert torch.equal(gradient, (dense.T @ g.double()).float())
            continue
        reached = (dense > 0).unsqueeze(2)
        highest = x.detach().expand(targets, -1, -1).where(reached, -torch.inf).amax(1)
        assert torch.equal(found.detach(), highest.where(reached.any(1), 0.0))
        # Each target's gradient goes to one source.
        assert torch.equal(gradient.sum(0), (g * reached.any(1)).sum(0))
        winners = (highest.unsqueeze(1) == x.detach()) & reached
        assert not gradient[~winners.any(0)].any()
