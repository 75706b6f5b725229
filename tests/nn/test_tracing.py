"""torch.compile and torch.export: whole graphs with a plan or with edges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsetile.pyg
from sparsetile.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    aggregate,
    cache,
    clear_graph_cache,
    gcn_plan,
)
from sparsetile.nn import graph as graphs
from tests.nn.cases import FLOWS, NODES, WIDTH, directed_graph, pyg, same_weights, weights_of

GCN = "GCNConv|source_to_target|convolve|replace|1.0|True"
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


def run_with_x(net, model, x, *inputs):
    """As :func:`run`, with the gradient of x."""
    x = x.clone().requires_grad_()
    return [*run(net, lambda x, *_: model(x, *inputs), x, None), x.grad]


def check_one_graph(net, backend):
    """Compiled for edges, a net gives what it gives as it is, also after they have changed."""
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    expected = run_with_x(net, net, x, edge_index)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(run_with_x(net, compiled, x, edge_index), expected, **CLOSE)
    edge_index[:, 3] = edge_index[:, 5]  # as eager layers, it notices changes
    again = run_with_x(net, net, x, edge_index)
    assert not torch.equal(again[0], expected[0])
    torch.testing.assert_close(run_with_x(net, compiled, x, edge_index), again, **CLOSE)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, gin])
def test_edges_are_one_graph_and_give_the_same(layer, backend):
    check_one_graph(Net(layer), backend)


def test_edges_are_one_graph_for_inductor():
    """Of matrix products and ours: torch takes a minute to compile its first C++ loop."""

    class Products(Net):
        def forward(self, x, graph):
            return self.second(self.first(x, graph), graph)

    check_one_graph(Products(GCNConv, bias=False), "inductor")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", [{}, {"improved": True}, {"normalize": False}])
def test_weighted_edges_are_one_graph(options, flow):
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    weight, layer = weights_of(edge_index), GCNConv(WIDTH, 5, flow=flow, **options)
    expected = run_with_x(layer, layer, x, edge_index, weight)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        run_with_x(layer, compiled, x, edge_index, weight), expected, **CLOSE
    )


def test_trained_weights_break_the_graph_and_give_the_same():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    weight, layer = weights_of(edge_index).requires_grad_(), GCNConv(WIDTH, 5)
    expected = run(layer, lambda x, g: layer(x, g, weight), x, edge_index), weight.grad
    weight.grad = None
    compiled = torch.compile(layer, backend="aot_eager")
    found = run(layer, lambda x, g: compiled(x, g, weight), x, edge_index), weight.grad
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_two_sets_of_nodes_and_batches_are_one_graph(reduce):
    edge_index = torch.stack([torch.randint(0, 9, (40,)), torch.randint(0, 5, (40,))])
    x = torch.randn(2, 9, 3, requires_grad=True)

    def product(x):
        return aggregate((x, None), edge_index, reduce=reduce, size=(9, 5))

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    expected, found = product(x), compiled(x)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, x, weight)
    torch.testing.assert_close(torch.autograd.grad(found, x, weight), wanted)


def test_maxima_break_the_graph_and_give_the_same():
    net, x, edge_index = Net(SAGEConv, aggr="max"), torch.randn(NODES, WIDTH), directed_graph()
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x, edge_index), net(x, edge_index), **CLOSE)


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv])
def test_sampled_graphs_are_one_graph(layer):
    net, x = Net(layer), torch.randn(NODES, WIDTH)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    clear_graph_cache()
    for seed in range(4):  # graphs that end after a step are taken as short-lived
        torch.manual_seed(seed)
        source = torch.randint(0, NODES - 1, (60,))
        edge_index = torch.stack([source, source + 1])  # no self-loops
        expected = run_with_x(net, net, x, edge_index.clone())
        found = run_with_x(net, compiled, x, edge_index)
        torch.testing.assert_close(found, expected, **CLOSE)
    clear_graph_cache()


def test_compiled_layers_share_the_graph_of_eager_ones():
    clear_graph_cache()
    net, x, edge_index = Net(), torch.randn(NODES, WIDTH), directed_graph()
    net(x, edge_index)
    graph = next(iter(cache._graphs.values())).graph
    torch.compile(net, backend="aot_eager", fullgraph=True)(x, edge_index).sum().backward()
    assert [entry.graph for entry in cache._graphs.values()] == [graph]


def test_wrong_edges_are_refused_when_compiled_code_runs():
    compiled = torch.compile(GCNConv(WIDTH, 5), backend="aot_eager", fullgraph=True)
    edge_index = directed_graph()
    edge_index[0, 2] = NODES
    with pytest.raises(ValueError, match=r"GCNConv: edge_index\[0\]"):
        compiled(torch.randn(NODES, WIDTH), edge_index)


@pytest.mark.parametrize("how", ["SAGEConv|source_to_target|mean|keep|1.0|True", GCN])
def test_operators_of_edges_follow_torch_s_rules(how):
    x, edge_index = torch.randn(NODES, WIDTH, requires_grad=True), directed_graph()
    for operator in (torch.ops.sparsetile.edges_product, torch.ops.sparsetile.edges_product_t):
        torch.library.opcheck(operator, (x, edge_index, None, NODES, how))


def test_gat_in_a_whole_graph_is_refused_with_the_way_out():
    net = torch.compile(Net(GATConv), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Pass a sparsetile\.Plan instead"):
        net(torch.randn(NODES, WIDTH), directed_graph())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", ["export", "jit"])
@pytest.mark.parametrize("layer", [GCNConv, SAGEConv, gin, GATConv])
def test_plans_are_exported_and_traced_by_torch_jit_and_edges_by_export(layer, tracer):
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
    if tracer == "export" and layer is not GATConv:
        net = layer(WIDTH, 5)
        torch.testing.assert_close(
            traced(net, x, edge_index)(2 * x, edge_index), net(2 * x, edge_index), **CLOSE
        )
    else:
        text = r"Conv: edge_index must be a Plan in torch\.export and torch\.jit\.trace, got edges"
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
