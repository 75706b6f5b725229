"""GATv2Conv, TransformerConv and GATConv with edge features by the kernels, run on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.layers import edge_attention
from sparsetile.nn import clear_graph_cache, heads
from sparsetile.nn.graph import Graph
from tests.emulator.attention import attention_on_host, flat_plan
from tests.emulator.build import host_compiler
from tests.nn.cases import (
    FLOWS,
    NODES,
    PAIRS,
    WIDTH,
    assert_same,
    directed_graph,
    pyg,
    same_weights,
    without_parallel_edges,
)

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
PLAIN = [name for name in PAIRS if name.startswith(("v2", "transformer"))]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> list[bool]:
    """Tensors of the CPU count as a GPU's; returns whether each plan's transpose was asked for."""
    calls: list[bool] = []

    def rows_plan(graph: Graph, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        calls.append(differentiable)
        return flat_plan(graph.pattern)

    attention_on_host(monkeypatch, folder)
    monkeypatch.setattr(heads, "FUSED_ON", "cpu")
    monkeypatch.setattr(Graph, "rows_plan", rows_plan)
    clear_graph_cache()
    return calls


def pair_of(name: str, *arguments: Any, **named: Any) -> tuple[Any, Any]:
    mine = getattr(ours, name)(*arguments, **named)
    return same_weights((mine, getattr(pyg, name)(*arguments, **named)))


def features_of(edge_index: Tensor, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(edge_index.shape[1], width, generator=generator)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", PLAIN)
def test_results_and_gradients_are_pyg_s(fused, name, flow):
    pair = same_weights(PAIRS[name](5, flow=flow))
    assert_same(pair, torch.randn(NODES, WIDTH), directed_graph())  # with parallel edges
    assert fused == [True]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", NAMES)
def test_features_of_edges_and_their_gradients(fused, name, flow):
    edge_index = without_parallel_edges(directed_graph())
    pair = pair_of(name, WIDTH, 5, heads=3, edge_dim=3, flow=flow)
    assert_same(pair, torch.randn(NODES, WIDTH), edge_index, features_of(edge_index))
    assert fused == [True]


@pytest.mark.parametrize("name", NAMES)
def test_features_of_parallel_edges(fused, name):
    edge_index = directed_graph()
    pair = pair_of(name, WIDTH, 5, heads=2, edge_dim=3)
    assert_same(pair, torch.randn(NODES, WIDTH), edge_index, features_of(edge_index))
    assert bool(fused) == (name == "TransformerConv")  # whose features are no part of the kernels


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_two_sets_of_nodes(name, edge_dim):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))]).unique(dim=1)
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    pair = pair_of(name, (WIDTH, 6), 5, heads=2, edge_dim=edge_dim, **options)
    more = () if edge_dim is None else (features_of(edge_index),)
    assert_same(pair, (torch.randn(20, WIDTH), torch.randn(9, 6)), edge_index, *more)


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_draws_what_pyg_draws(name, edge_dim):
    edge_index, x = without_parallel_edges(directed_graph()), torch.randn(NODES, WIDTH)
    mine, theirs = pair_of(name, WIDTH, 5, heads=2, edge_dim=edge_dim, dropout=0.5)
    more = () if edge_dim is None else (features_of(edge_index),)
    results = []
    for layer in (mine, theirs):
        torch.manual_seed(5)
        results.append(layer(x, edge_index, *more))
        results[-1].square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    named = dict(theirs.named_parameters())
    for key, each in mine.named_parameters():
        torch.testing.assert_close(each.grad, named[key].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_16_bits_and_autocast(fused, name, edge_dim, dtype):
    edge_index, x = without_parallel_edges(directed_graph()), torch.randn(NODES, WIDTH)
    layer, _ = pair_of(name, WIDTH, 5, heads=2, edge_dim=edge_dim)
    features = None if edge_dim is None else features_of(edge_index)
    expected = layer(x, edge_index, features)
    scale = 0.05 * expected.abs().max().item()
    with torch.autocast("cpu", dtype=dtype):
        cast = layer(x, edge_index, features)
    cast.float().sum().backward()
    torch.testing.assert_close(cast.float(), expected, rtol=0.05, atol=scale)
    half = layer.to(dtype)
    given = None if features is None else features.to(dtype)
    out = half(x.to(dtype), edge_index, given)
    assert out.dtype is dtype
    out.sum().backward()
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=scale)
    assert all(bool(each.grad.isfinite().all()) for each in half.parameters())
    assert len(fused) == 3


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_nothing_is_kept(fused, name):
    edge_index, x = without_parallel_edges(directed_graph()), torch.randn(NODES, WIDTH)
    layer, _ = pair_of(name, WIDTH, 5, edge_dim=3)
    with torch.no_grad():
        layer(x, edge_index, features_of(edge_index))
    layer.requires_grad_(False)(x, edge_index, features_of(edge_index))
    assert fused == [False, False]


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_given_plan_with_parallel_edges(fused, name):
    source, target = directed_graph()
    plan = st.plan((torch.stack([target, source]), None, (NODES, NODES)), 16)
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    layer, _ = pair_of(name, WIDTH, 5, heads=2, **options)
    x = torch.randn(NODES, WIDTH)
    found = layer(x, plan)
    assert fused == [True]
    layer._fuses = lambda *given: False
    torch.testing.assert_close(found, layer(x, plan), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES[1:])
def test_calls_that_the_kernels_do_not_serve(fused, name):
    layer, _ = pair_of(name, WIDTH, 5)
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    expected = layer(x, edge_index)
    out, _ = layer(x, edge_index, return_attention_weights=True)
    count = len(fused)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    _, tangent = torch.func.jvp(lambda x: layer(x, edge_index), (x,), (torch.ones_like(x),))
    gradient = torch.func.grad(lambda x: layer(x, edge_index).sum())(x)
    assert bool(tangent.isfinite().all()) and bool(gradient.isfinite().all())
    double = layer.double()(x.double(), edge_index)
    torch.testing.assert_close(double.float(), expected, rtol=1e-4, atol=1e-5)
    assert len(fused) == count


def test_features_that_need_no_gradient_cost_no_launch(monkeypatch):
    modes: list[int] = []
    launch = edge_attention.launch_scores
    monkeypatch.setattr(
        edge_attention,
        "launch_scores",
        lambda e, mode, *a, **k: modes.append(mode) or launch(e, mode, *a, **k),
    )
    edge_index, x = without_parallel_edges(directed_graph()), torch.randn(NODES, WIDTH)
    layer, _ = pair_of("GATv2Conv", WIDTH, 5, edge_dim=3)
    layer(x, edge_index, features_of(edge_index)).sum().backward()
    assert modes == [edge_attention.BENT, edge_attention.GRADIENT]
