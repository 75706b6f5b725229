"""GATConv by the kernels of graph attention, run on the host, against PyG and torch's path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.nn import GATConv, clear_graph_cache, heads
from sparsetile.nn.graph import Graph
from tests.contracts import cases
from tests.emulator.attention import attention_on_host, flat_plan
from tests.emulator.build import host_compiler
from tests.nn.cases import FLOWS, NODES, PAIRS, WIDTH, directed_graph, pyg, same_weights
from tools import checked_products

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
ROWS_PLAN = Graph.rows_plan
GATS = [name for name in PAIRS if name.startswith("gat")]


@pytest.fixture(autouse=True)
def fused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None, constants
) -> list[tuple[int, bool]]:
    """Tensors of the CPU count as a GPU's; returns the calls that took the kernels."""
    calls: list[tuple[int, bool]] = []

    def rows_plan(graph: Graph, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        calls.append((n, differentiable))
        return flat_plan(graph.pattern)

    attention_on_host(monkeypatch, folder)
    constants(heads, FUSED_ON="cpu")
    monkeypatch.setattr(Graph, "rows_plan", rows_plan)
    clear_graph_cache()
    return calls


def results(layer: Any, x: Any, edge_index: Any, **more: Any) -> list[Tensor]:
    """Output, and gradients of the features and of all parameters."""
    leaves = [t.detach().requires_grad_() for t in (x if isinstance(x, tuple) else (x,))]
    given = tuple(leaves) if isinstance(x, tuple) else leaves[0]
    layer.zero_grad()
    out = layer(given, edge_index, **more)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves), *(each.grad for each in layer.parameters())]


def assert_close(found: list[Tensor], wanted: list[Tensor], **tolerance: Any) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or CLOSE))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", GATS)
def test_results_and_gradients_are_pyg_s(fused, name, flow):
    mine, theirs = same_weights(PAIRS[name](5, flow=flow))
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()  # with parallel edges
    found = results(mine, x, edge_index)
    assert len(fused) == 1 and fused[0][1]
    expected = results(theirs, x, edge_index)
    named = dict(theirs.named_parameters())
    right = [expected[0], expected[1], *(named[key].grad for key, _ in mine.named_parameters())]
    assert_close(found, right)


@pytest.mark.parametrize("channels", [WIDTH, (WIDTH, WIDTH)])
def test_two_sets_of_nodes(channels):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    pair = GATConv(channels, 5, heads=2), pyg.GATConv(channels, 5, heads=2)
    mine, theirs = same_weights(pair)
    x = torch.randn(20, WIDTH), torch.randn(9, WIDTH)
    torch.testing.assert_close(mine(x, edge_index), theirs(x, edge_index), **CLOSE)
    alone = x[0], None
    torch.testing.assert_close(
        mine(alone, edge_index, size=(20, 9)), theirs(alone, edge_index, size=(20, 9)), **CLOSE
    )


def test_dropout_draws_what_pyg_draws():
    pair = GATConv(WIDTH, 5, heads=2, dropout=0.5), pyg.GATConv(WIDTH, 5, heads=2, dropout=0.5)
    mine, theirs = same_weights(pair)
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    found = []
    for layer in (mine, theirs):
        torch.manual_seed(5)
        found.append(results(layer, x, edge_index))
    named = dict(theirs.named_parameters())
    gradients = [named[key].grad for key, _ in mine.named_parameters()]
    assert_close(found[0], [*found[1][:2], *gradients])
    mine.eval(), theirs.eval()
    torch.testing.assert_close(mine(x, edge_index), theirs(x, edge_index), **CLOSE)


@pytest.mark.parametrize("training", [False, True])
def test_a_given_plan_with_parallel_edges(fused, training):
    source, target = directed_graph()
    plan = st.plan((torch.stack([target, source]), None, (NODES, NODES)), 16)
    layer = GATConv(WIDTH, 5, heads=2, dropout=0.5, add_self_loops=False).train(training)
    x = torch.randn(NODES, WIDTH)
    torch.manual_seed(5)
    found = results(layer, x, plan)
    assert len(fused) == 1
    torch.manual_seed(5)
    layer._fuses = lambda *given: False  # type: ignore[method-assign]
    assert_close(found, results(layer, x, plan))


def test_another_type_than_a_given_plan_s_is_refused():
    plan = st.plan(torch.eye(NODES).to_sparse_csr(), 16)
    layer = GATConv(WIDTH, 5, add_self_loops=False).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"B must be torch\.float32 like the plan"):
        layer(torch.randn(NODES, WIDTH, dtype=torch.bfloat16), plan)


@pytest.mark.parametrize("name", GATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_results_near_those_of_float32(fused, name, dtype):
    mine, _ = PAIRS[name](5)
    x, edge_index = torch.randn(NODES, WIDTH, requires_grad=True), directed_graph()
    expected = mine(x, edge_index)
    with torch.autocast("cpu", dtype=dtype):
        result = mine(x, edge_index)
    scale = expected.abs().max().item()
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05 * scale)
    result.float().sum().backward()
    assert len(fused) == 2 and bool(x.grad.isfinite().all())


def test_attention_that_is_returned_is_torch_s(fused):
    mine, theirs = same_weights(PAIRS["gat"](5))
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    out, (_, attention) = mine(x, edge_index, return_attention_weights=True)
    assert not fused
    torch.testing.assert_close(out, mine(x, edge_index), **CLOSE)
    _, (_, expected) = theirs(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(attention, expected, **CLOSE)


def test_calls_that_the_kernels_do_not_serve(fused):
    layer, x, edge_index = GATConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    expected = layer(x, edge_index)
    assert len(fused) == 1
    double = copy.deepcopy(layer).double()(x.double(), edge_index)
    torch.testing.assert_close(double.float(), expected, **CLOSE)
    _, tangent = torch.func.jvp(lambda x: layer(x, edge_index), (x,), (torch.ones_like(x),))
    assert bool(tangent.isfinite().all())
    gradient = torch.func.grad(lambda x: layer(x, edge_index).sum())(x)
    assert bool(gradient.isfinite().all())
    assert len(fused) == 1


def test_without_gradients_nothing_is_kept(fused):
    layer, x = GATConv(WIDTH, 5), torch.randn(NODES, WIDTH)
    with torch.no_grad():
        layer(x, directed_graph())
    layer.requires_grad_(False)(x, directed_graph())
    assert fused == [(5, False), (5, False)]


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_may_be_changed_in_place(bias):
    layer, x, edge_index = GATConv(WIDTH, 5, bias=bias), torch.randn(NODES, WIDTH), directed_graph()
    layer(x, edge_index).relu_().sum().backward()
    found = layer.att_src.grad.clone()
    layer.zero_grad()
    layer(x, edge_index).relu().sum().backward()
    assert torch.equal(found, layer.att_src.grad)


def test_a_compiled_layer_with_a_plan_is_one_graph(monkeypatch):
    edge_index = directed_graph()
    layer, x = GATConv(WIDTH, 5, heads=2, add_self_loops=False), torch.randn(NODES, WIDTH)
    plan = ours.gcn_plan(edge_index, NODES, 16)
    plan._variant.both = flat_plan(plan._csr)  # both directions, as prepared for gradients
    monkeypatch.setattr(Graph, "rows_plan", ROWS_PLAN)
    expected = results(layer, x, plan)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    out = compiled(leaf, plan)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert_close([out, leaf.grad, *(each.grad for each in layer.parameters())], expected)


EVERY = ["no rows", "no columns", "no entries", "empty rows", "one row", "equal rows"]


@pytest.mark.parametrize(
    "name, n, dtype",
    [
        *((name, 32, torch.float32) for name in [*EVERY, "one dense row"]),
        *((name, 130, torch.float16) for name in EVERY),
    ],
)
def test_products_for_the_checkers_are_right(name, n, dtype):
    matrix = checked_products._Matrix(cases.csr_of(cases.MATRICES[name]()))
    plan = st.plan(matrix.given.with_values(None), n, dtype=dtype)
    plan._variant.both = flat_plan(plan._csr)
    seen = checked_products.Watched()
    for weighted in (False, True):
        checked_products._attention(plan, matrix, n, weighted, seen)
    assert seen.products == 8


@pytest.mark.parametrize("n, dtype", [(7, torch.float32), (130, torch.float16)])
def test_steps_for_the_checkers_are_right(n, dtype):
    square = [(name, cases.csr_of(make())) for name, make in cases.MATRICES.items()]
    square = [(name, csr) for name, csr in square if csr.shape[0] == csr.shape[1] and csr.nnz < 500]
    assert square
    seen = checked_products.Watched()
    for _, csr in square:
        plan = st.plan(csr.with_values(None), n, dtype=dtype)
        plan._variant.both = flat_plan(plan._csr)
        checked_products._attention_step(plan, checked_products._Matrix(csr), n, seen)
    assert seen.products == 5 * len(square)
