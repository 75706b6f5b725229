"""Graphs that a GPU sees for the first time: no plan, PyG's results, the same bits in every run."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.kernels.grouping import MEAN, SYMMETRIC
from sparsetile.launch.grouping import group_edges
from sparsetile.nn import GCNConv, SAGEConv, cache, clear_graph_cache
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.graph import Graph
from tests.emulator.test_grouping import LONG_ROWS, SEGMENT, assert_grouped, edges_of_lengths
from tests.nn.fresh_layers import (
    FEATURES,
    LAYERS,
    assert_like_pyg,
    assert_twice_differentiable,
    new_edges,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.fixture(autouse=True)
def _no_graphs():
    clear_graph_cache()
    yield
    clear_graph_cache()


def graphs() -> list[Graph]:
    return [entry.graph for entry in cache._graphs.values()]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_are_pyg_s(name: str, dtype: torch.dtype):
    pytest.importorskip("torch_geometric")
    if name in ("sage max", "sage min") and dtype is not torch.float32:
        pytest.skip("equal features of different nodes: PyG takes others")
    if name == "gatv2" and dtype is torch.bfloat16:
        pytest.skip("rounded sums beside the bend of the leaky ReLU have the other slope")
    for nodes, edges, out, hub in (
        (30, 60, 4, False),
        (700, 9000, 64, False),
        (300, 5000, 40, True),
    ):
        assert_like_pyg(name, new_edges(nodes, edges, out, hub), nodes, out, "cuda", dtype)
    gc.collect()
    assert all(isinstance(graph, FreshGraph) and graph._canonical is None for graph in graphs())


@pytest.mark.parametrize("name", ["gcn", "sage", "sage max", "gin"])
def test_gradients_of_gradients(name: str):
    pytest.importorskip("torch_geometric")
    assert_twice_differentiable(LAYERS[name], new_edges(200, 3000, 3), 200, "cuda")


@pytest.mark.parametrize("edges", [1, 100, 2048, 5000, 300_000, 3_000_000])
@pytest.mark.parametrize("nodes", [1, 700, 20_000, 1_500_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_are_grouped_as_torch_sorts_them(edges: int, nodes: int, dtype: torch.dtype):
    generator = torch.Generator("cuda").manual_seed(edges)
    given = torch.randint(nodes, (2, edges), generator=generator, device="cuda")
    given[1, ::3] = min(5, nodes - 1)  # a hub
    for loops in (False, True):
        made = group_edges(given.to(dtype), True, (nodes, nodes), loops)
        kept = given[:, given[0] != given[1]] if loops else given
        if loops:
            kept = torch.cat([kept, torch.arange(nodes, device="cuda").repeat(2, 1)], 1)
        count = kept.shape[1]
        want, order = torch.sort(kept[1], stable=True)
        columns = kept[0][order]
        assert torch.equal(made.part("sorted", count).long(), want)
        assert torch.equal(made.part("columns", count).long(), columns)
        lengths = torch.bincount(kept[1], minlength=nodes)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        assert torch.equal(made.tensors()["indptr"], ends)
        at_once = group_edges(given.to(dtype), True, (nodes, nodes), loops, transpose=True)
        turned = made.transposed
        for rows, same in ((made, at_once), (turned, at_once.transposed)):
            assert torch.equal(rows.part("columns", count), same.part("columns", count))
            assert torch.equal(rows.tensors()["items"], same.tensors()["items"])
        sources, back = torch.sort(columns, stable=True)
        assert torch.equal(turned.part("sorted", count).long(), sources)
        assert torch.equal(turned.wide_part("order", count), back)
        assert torch.equal(turned.part("columns", count).long(), want[back])
        scale = torch.where(lengths == 0, 0.0, lengths.clamp(min=1).double().rsqrt())
        for rows, at, to in ((made, want, columns), (turned, sources, want[back])):
            found = rows.values(SYMMETRIC, torch.float32)[:count]
            torch.testing.assert_close(found.double(), scale[at] * scale[to], rtol=1e-6, atol=0)
        mean = turned.values(MEAN, torch.float32)[:count].double()
        torch.testing.assert_close(mean, 1 / lengths[want[back]].double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("lengths", LONG_ROWS, ids=str)
def test_long_rows_are_cut_and_their_pieces_do_not_meet(lengths: list[int]):
    edges = edges_of_lengths(lengths, 50).cuda()
    made = group_edges(edges, True, (len(lengths), 50), False, transpose=True)
    assert made.lists.segment == SEGMENT
    assert_grouped(made, edges[1], edges[0])
    assert_grouped(made.transposed, edges[0], edges[1])


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("number", [-1, 300, 2**40])
def test_an_edge_that_names_no_node_is_raised_later(row: int, number: int):
    layer, x = SAGEConv(FEATURES, 4).cuda(), torch.randn(300, FEATURES, device="cuda")
    edges = new_edges(300, 2000, 1)
    edges[row, 77] = number
    out = layer(x, edges.cuda())
    assert out.shape == (300, 4)
    with pytest.raises(ValueError, match=rf"edge_index must be from 0 to 299.*got {number} at"):
        st.synchronize()
    layer(x, new_edges(300, 2000, 1).cuda())
    st.synchronize()


def test_a_graph_that_comes_again_is_planned_once_that_pays():
    layer, x = GCNConv(FEATURES, 8).cuda(), torch.randn(3000, FEATURES, device="cuda")
    edges = new_edges(3000, 60_000, 2).cuda()
    expected = layer(x, edges)
    (graph,) = graphs()
    assert isinstance(graph, FreshGraph)
    steps = 0
    while isinstance(graphs()[0], FreshGraph):
        torch.testing.assert_close(layer(x, edges), expected)
        steps += 1
        assert steps < 3000
    torch.testing.assert_close(layer(x, edges), expected)
    assert steps > 50 and len(graphs()) == 1


def test_another_stream_waits_and_reads_what_the_first_made():
    layer = SAGEConv(FEATURES, 8, aggr="max").cuda()
    x = torch.randn(3000, FEATURES, device="cuda", requires_grad=True)
    edges = new_edges(3000, 60_000, 2).cuda()
    expected = torch.autograd.grad(layer(x, edges).sum(), x)[0]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = torch.autograd.grad(layer(x, edges).sum(), x)[0]
    torch.cuda.synchronize()
    assert torch.equal(found, expected) and len(graphs()) == 1


@pytest.mark.parametrize(
    "name", ["gcn", "sage max", "gat", "gatv2", "weighted gcn", "gcn with trained weights"]
)
def test_a_captured_step_reads_the_graph_of_the_steps_before(name: str):
    from sparsetile import nn as ours

    layer = LAYERS[name](ours, 8).cuda()
    x = torch.randn(500, FEATURES, device="cuda", requires_grad=True)
    edges = new_edges(500, 5000, 2).cuda()

    def step() -> Tensor:
        return torch.autograd.grad(layer(x, edges).square().sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        x.mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, step())
