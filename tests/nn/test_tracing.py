"""torch.compile: whole graphs with a plan, graph breaks with an ``edge_index``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsetile.pyg
from sparsetile.nn import GATConv, GCNConv, GINConv, SAGEConv, gcn_plan
from sparsetile.nn import graph as graphs
from tests.nn.cases import FLOWS, NODES, WIDTH, directed_graph, pyg, same_weights, weights_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    def __init__(self, layer=GCNConv, **options):
        super().__init__()
        self.first, self.second = layer(WIDTH, 16, **options), layer(16, 3, **options)

    def forward(self, x, graph):
        return self.second(self.first(x, graph).relu(), graph)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(net, model, x, graph):
    """Return the result of ``model`` and the gradients of ``net``'s parameters."""
    net.zero_grad()
    out = model(x, graph)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", [{}, {"improved": True}, {"add_self_loops": False}])
def test_a_gcn_with_its_plan_gives_what_it_gives_with_edges(options, flow):
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    weight = weights_of(edge_index)
    mine, theirs = same_weights(
        (GCNConv(WIDTH, 5, **options), pyg.GCNConv(WIDTH, 5, flow=flow, **options))
    )
    plan = gcn_plan(edge_index, NODES, 5, weight, flow=flow, **options)
    torch.testing.assert_close(mine(x, plan), theirs(x, edge_index, weight), **CLOSE)


def test_a_gcn_s_plan_takes_matrices_and_planning_options():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph().unique(dim=1)
    dense = torch.zeros(NODES, NODES)
    dense[edge_index[1], edge_index[0]] = weights_of(edge_index)
    adj_t = dense.to_sparse_csr()
    plan = gcn_plan(adj_t, NODES, 8, reorder="rcm")
    layer = GCNConv(WIDTH, 5)
    assert plan.reorder == "rcm"
    torch.testing.assert_close(layer(x, plan), layer(x, adj_t), **CLOSE)
    with pytest.raises(TypeError, match="gcn_plan: edge_index must be a graph, got a Plan"):
        gcn_plan(plan, NODES, 8)


def gin(width, out):
    return GINConv(nn.Linear(width, out))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, gin, GATConv])
def test_two_layers_with_a_plan_are_one_graph(layer, backend):
    options = {"add_self_loops": False} if layer is GATConv else {}
    net, x = Net(layer, **options), torch.randn(NODES, WIDTH)
    plan = gcn_plan(directed_graph(), NODES, 16)
    expected = run(net, net, x, plan)
    found = run(net, torch.compile(net, fullgraph=True, backend=backend), x, plan)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_edges_break_the_graph_and_give_the_same():
    net, x, edge_index = Net(), torch.randn(NODES, WIDTH), directed_graph()
    expected = run(net, net, x, edge_index)
    compiled = torch.compile(net, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(net, compiled, x, edge_index), expected, **CLOSE)


def test_edges_in_a_whole_graph_are_refused_with_the_way_out():
    net = torch.compile(Net(), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Pass a sparsetile\.Plan instead"):
        net(torch.randn(NODES, WIDTH), directed_graph())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", ["export", "jit"])
@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, gin, GATConv])
def test_edges_are_neither_exported_nor_traced_by_torch_jit_and_plans_are(layer, tracer):
    def traced(net, *inputs):
        if tracer == "export":
            return torch.export.export(net, inputs, strict=False).module()
        with torch.no_grad():  # the first product with gradients plans the transpose
            return torch.jit.trace(net, inputs)

    class WithPlan(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.plan = layer(WIDTH, 5, **options), plan

        def forward(self, x):
            return self.layer(x, self.plan)

    options = {"add_self_loops": False} if layer is GATConv else {}
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    plan = gcn_plan(edge_index, NODES, 5)
    text = r"Conv: edge_index must be a Plan in torch\.export and torch\.jit\.trace, got edges\. "
    with pytest.raises(ValueError, match=text):
        traced(layer(WIDTH, 5), x, edge_index)
    net = WithPlan()
    torch.testing.assert_close(traced(net, x)(2 * x), net(2 * x), **CLOSE)


def test_what_is_traced_under_the_patch_is_pyg_s(monkeypatch):
    layer, x, edge_index = pyg.GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    expected = layer(x, edge_index)
    monkeypatch.delattr(graphs.Graph, "aggregate")  # sparsetile's product would fail
    with sparsetile.pyg.patch():
        found = torch.compile(layer, fullgraph=True, backend="eager")(x, edge_index)
    torch.testing.assert_close(found, expected, **CLOSE)
