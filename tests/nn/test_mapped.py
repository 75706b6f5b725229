"""Layers whose linear maps and product are one node of autograd's graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import (
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    cache,
    clear_graph_cache,
    gcn,
    two_maps,
)
from sparsetile.plan.family import Family
from sparsetile.plan.variant import Later
from tests.nn.cases import NODES, directed_graph

WIDTH = 6
# Name -> layer of one map that is narrower than its input, or wider.
LAYERS: dict[str, Any] = {
    "gcn": lambda out: GCNConv(WIDTH, out),
    "gcn-without-bias": lambda out: GCNConv(WIDTH, out, bias=False),
    "sage": lambda out: SAGEConv(WIDTH, out),
    "sage-sum": lambda out: SAGEConv(WIDTH, out, aggr="sum", bias=False),
    "sage-max": lambda out: SAGEConv(WIDTH, out, aggr="max"),
    "sage-without-root": lambda out: SAGEConv(WIDTH, out, root_weight=False),
    "graph": lambda out: GraphConv(WIDTH, out),
    "graph-min": lambda out: GraphConv(WIDTH, out, aggr="min"),
}
WIDTHS = (3, 11)


@pytest.fixture(autouse=True)
def fresh():
    clear_graph_cache()


@pytest.fixture
def edge_index() -> Tensor:
    return directed_graph().unique(dim=1)


def nodes_of(out: Tensor) -> set[str]:
    """Names of the nodes of autograd's graph, without those of leaves."""
    found, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [each for each, _ in node.next_functions]
    return {type(node).__name__ for node in found} - {"AccumulateGrad"}


def results(layer: nn.Module, x: Any, edge_index: Tensor) -> list[Tensor]:
    """The result and the gradients of everything that has one."""
    out = layer(x, edge_index)
    leaves = [*(x if isinstance(x, tuple) else (x,)), *layer.parameters()]
    leaves = [each for each in leaves if each.requires_grad]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and products are nodes of their own from now on."""
    for module in (gcn, two_maps):
        monkeypatch.setattr(module, "mapped_product", lambda *arguments: None)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_node(name, width, edge_index):
    out = LAYERS[name](width)(torch.randn(NODES, WIDTH, requires_grad=True), edge_index)
    assert nodes_of(out) == {"_MappedBackward"}


@pytest.mark.parametrize("tracked", ["all", "x", "weights", "bias"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_separate_nodes(
    name, width, tracked, edge_index, monkeypatch
):
    layer = LAYERS[name](width).double()
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=tracked in ("all", "x"))
    for own, parameter in layer.named_parameters():
        of_bias = "bias" in own
        wanted = {"all": True, "x": False, "weights": not of_bias, "bias": of_bias}
        parameter.requires_grad_(wanted[tracked])
    if not any(each.requires_grad for each in (x, *layer.parameters())):
        pytest.skip("the layer has no bias")
    found = results(layer, x, edge_index)
    apart(monkeypatch)
    torch.testing.assert_close(found, results(layer, x, edge_index))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_targets_of_their_own(aggr, width, monkeypatch):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))]).unique(dim=1)
    layer = SAGEConv((WIDTH, 4), width, aggr=aggr).double()
    x = tuple(
        torch.randn(n, w, dtype=torch.float64, requires_grad=True) for n, w in ((20, 6), (9, 4))
    )
    found = results(layer, x, edge_index)
    assert nodes_of(found[0]) == {"_MappedBackward"}
    apart(monkeypatch)
    torch.testing.assert_close(found, results(layer, x, edge_index))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gcn", "sage", "sage-max"])
def test_gradients_have_gradients(name, width, edge_index):
    layer = LAYERS[name](width).double()
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        own = copy.copy(layer)
        return torch.nn.utils.stateless._functional_call(  # the tensors as they are
            own, dict(zip(names, weights, strict=True)), (x, edge_index)
        )

    given = (x, *(each.detach().clone().requires_grad_() for each in weights))
    assert torch.autograd.gradcheck(call, given)
    # Along random directions: one element after the other would take ten times as long.
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gcn", "sage", "sage-max"])
def test_autocast_rounds_as_separate_nodes_do(name, width, edge_index, monkeypatch):
    layer, x = LAYERS[name](width), torch.randn(NODES, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(layer, x, edge_index)
        assert nodes_of(found[0]) == {"_MappedBackward"}
        apart(monkeypatch)
        expected = results(layer, x, edge_index)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            mine.float(), theirs.float(), rtol=0.02, atol=0.02 * theirs.abs().max().item()
        )


def test_hooks_of_a_map_still_run(edge_index):
    layer, x = SAGEConv(WIDTH, 3), torch.randn(NODES, WIDTH)
    seen: list[nn.Module] = []
    layer.lin_r.register_forward_hook(lambda module, *_: seen.append(module))
    layer(x, edge_index)
    assert seen == [layer.lin_r]


def test_new_edges_weights_and_types_are_noticed(edge_index):
    layer = GCNConv(WIDTH, 3)
    x, weight = torch.randn(NODES, WIDTH), torch.rand(edge_index.shape[1])
    first = layer(x, edge_index, weight)
    weight.mul_(torch.rand(weight.shape))
    second = layer(x, edge_index, weight)
    edge_index[:, 0] = edge_index[:, 1]
    third = layer(x, edge_index, weight)
    again = GCNConv(WIDTH, 3)
    again.load_state_dict(layer.state_dict())
    clear_graph_cache()
    torch.testing.assert_close(third, again(x, edge_index.clone(), weight.clone()))
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert layer.double()(x.double(), edge_index, weight.double()).dtype is torch.float64


@pytest.mark.parametrize("train_eps", [False, True])
def test_the_sum_of_gin_is_one_node_unless_eps_is_trained(train_eps, edge_index):
    layer = GINConv(nn.Identity(), eps=0.25, train_eps=train_eps)
    x = torch.randn(NODES, WIDTH, requires_grad=True)
    out = layer(x, edge_index)
    assert (nodes_of(out) == {"_ScaledBackward"}) is not train_eps
    wanted = torch.zeros(NODES, WIDTH).index_add(0, edge_index[1], x[edge_index[0]]) + 1.25 * x
    torch.testing.assert_close(out, wanted)
    grad = torch.randn(out.shape)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, grad), torch.autograd.grad(wanted, x, grad)
    )
    with torch.no_grad():
        layer.eps.fill_(1.0)
    torch.testing.assert_close(layer(x, edge_index), wanted + 0.75 * x)


def test_products_are_counted_until_the_system_is_settled(edge_index, monkeypatch):
    compared: list[int] = []

    def compare(family: Family, n: int) -> None:
        compared.append(n)
        family.settled(family.forward)

    monkeypatch.setattr(Family, "_compare", compare)
    layer, x = GCNConv(WIDTH, 3), torch.randn(NODES, WIDTH)
    layer(x, edge_index)
    ((graph,),) = [[graph for _, graph in cache._graphs.values()]]
    (pair,) = graph._pairs.values()
    later = pair.variant.later = Later(3, False)
    for left in (2, 1, 0):
        assert nodes_of(layer(x, edge_index)) == {"_MappedBackward"}
        assert later.left == left
    assert len(compared) == 1 and pair.variant.later is None
    layer(x, edge_index)
    assert len(compared) == 1 and list(graph._pairs.values()) == [pair]


def test_new_values_of_a_plan_end_its_pairs(edge_index):
    layer, x = GCNConv(WIDTH, 3), torch.randn(NODES, WIDTH)
    layer(x, edge_index)
    ((graph,),) = [[graph for _, graph in cache._graphs.values()]]
    (pair,) = graph._pairs.values()
    pair.family.set_values(pair.variant.values * 2)
    assert not pair.current()
    with pytest.raises(RuntimeError, match="A's values must stay as they are"):
        pair.gradient(torch.randn(NODES, 3), None)
