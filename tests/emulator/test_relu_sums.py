"""Sums of relu(x + edge) by the kernel, run on the host, against float64; and GINEConv with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.engines.rows import lengths as rows
from sparsetile.layers import relu_sums as module
from sparsetile.layers.relu_sums import relu_sums
from sparsetile.nn import GINEConv, clear_graph_cache, gine
from sparsetile.nn.graph import Graph
from tests.emulator.attention import attention_on_host, flat_plan, pattern
from tests.emulator.build import host_compiler
from tests.emulator.test_edge_attention import compare, drawn, entries_of
from tests.emulator.test_gat import BF16, F16, F32, UNEVEN
from tests.nn.cases import (
    FLOWS,
    NODES,
    WIDTH,
    assert_same,
    directed_graph,
    pyg,
    same_weights,
    without_parallel_edges,
)

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    attention_on_host(monkeypatch, folder)


def wide_sums(csr: st.CSR, given: dict[str, Tensor]) -> Tensor:
    edge = given["features"].double()
    if "weight" in given:
        edge = edge @ given["weight"].double().t() + given["bias"].double()
    messages = (given["x"].double()[csr.indices.long()] + edge).relu()
    zeros = messages.new_zeros(csr.shape[0], messages.shape[1])
    return zeros.index_add(0, csr.row_ids(), messages)


def inputs(csr: st.CSR, n: int, dtype: torch.dtype, dims: int | None) -> dict[str, Tensor]:
    given = {"x": drawn(csr.shape[1], n, dtype=dtype)}
    if dims is None:
        return given | {"features": drawn(csr.nnz, n, dtype=dtype, seed=2)}
    return given | {
        "features": drawn(csr.nnz, dims, seed=2),
        "weight": drawn(n, dims, seed=3),
        "bias": drawn(n, seed=4),
    }


def check(csr: st.CSR, n: int, dtype: torch.dtype = F32, dims: int | None = None) -> None:
    given = inputs(csr, n, dtype, dims)
    out = relu_sums(
        entries_of(csr), given["x"], given["features"], given.get("weight"), given.get("bias")
    )
    wanted = wide_sums(csr, given)
    leaves = list(given.values())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(out, leaves, grad)
    right = torch.autograd.grad(wanted, leaves, grad.double())
    compare([out, *found], [wanted, *right], dtype)


@pytest.mark.parametrize("dims", [None, 1, 5])
@pytest.mark.parametrize("n", [1, 7, 32, 40, 130, 300])
def test_sums_and_gradients_of_every_width(n, dims):
    check(pattern(UNEVEN, 50), n, dims=dims)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("dims", [None, 3])
@pytest.mark.parametrize("n", [7, 64])
def test_rows_of_16_bits_are_summed_in_float32(dtype, dims, n):
    check(pattern(UNEVEN, 50), n, dtype, dims)


@pytest.mark.parametrize("dims", [None, 3])
def test_hubs_are_cut_and_joined(monkeypatch, dims):
    monkeypatch.setattr(rows, "segment_length", lambda units, row_bytes: 16)
    monkeypatch.setattr(rows, "SHARED_UNCUT", 16)
    csr = pattern([300, 0, 3, 40, 17], 400)
    check(csr, 32, dims=dims)
    check(csr.transposed(), 32, dims=dims)


def test_gradients_of_edges_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(module, "LEAST_CHUNK", 1)
    csr = pattern([40] * 6, 50)  # more entries than nodes
    check(csr, 8)
    check(csr, 8, dims=3)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_graphs_without_edges(shape):
    csr = pattern([0] * shape[0], shape[1])
    check(csr, 8)
    check(csr, 8, dims=3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spreads_as_in_torch(value):
    csr = pattern(UNEVEN, 50)
    given = {name: each.detach() for name, each in inputs(csr, 8, F32, None).items()}
    given["x"][3], given["features"][40] = value, value
    found = relu_sums(entries_of(csr), given["x"], given["features"], None, None)
    compare([found], [wide_sums(csr, given)], F32)
    assert bool(found.isfinite().all(1).any()), "other rows are untouched"


# -- the layer ---------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []

    def rows_plan(graph: Graph, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        calls.append(differentiable)
        return flat_plan(graph.pattern)

    monkeypatch.setattr(gine, "FUSED_ON", "cpu")
    monkeypatch.setattr(Graph, "rows_plan", rows_plan)
    clear_graph_cache()
    return calls


def pair_of(**options: Any) -> tuple[Any, Any]:
    maps = (torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.ReLU()) for _ in range(2))
    mine, theirs = GINEConv(next(maps), **options), pyg.GINEConv(next(maps), **options)
    return same_weights((mine, theirs))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_a_layer_gives_pyg_s_results_and_gradients(fused, edge_dim, flow):
    edge_index = without_parallel_edges(directed_graph())
    features = torch.randn(edge_index.shape[1], edge_dim or WIDTH)
    pair = pair_of(train_eps=True, edge_dim=edge_dim, flow=flow)
    assert_same(pair, torch.randn(NODES, WIDTH), edge_index, features)
    assert fused == [True]


def test_calls_that_the_kernel_does_not_serve(fused):
    layer, x, edge_index = pair_of()[0], torch.randn(NODES, WIDTH), directed_graph()
    features = torch.randn(edge_index.shape[1], WIDTH)
    layer(x, edge_index, features)  # with parallel edges
    unique = without_parallel_edges(edge_index)
    some = features[: unique.shape[1]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, unique, some)
    torch.func.grad(lambda x: layer(x, unique, some).sum())(x)
    layer.double()(x.double(), unique, some.double())
    assert fused == []
    layer.float()(x, unique, some)
    assert fused == [False]
