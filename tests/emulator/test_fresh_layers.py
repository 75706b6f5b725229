"""Layers of graphs that are new in each call, by kernels that run on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.engines.rows import runner
from sparsetile.kernels import grouping as kernels
from sparsetile.launch import columns, faults, grouping
from sparsetile.layers import edge_attention, gat, gat_launches, gat_layer, grouped_rows
from sparsetile.nn import cache, clear_graph_cache, fresh, heads
from sparsetile.nn.fresh import FreshGraph
from tests.contracts.cases import MATRICES, csr_of
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import h200, one_processor, unread_scratch
from tests.nn.fresh_layers import (
    LAYERS,
    assert_like_pyg,
    assert_twice_differentiable,
    new_edges,
)
from tools import checked_products

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

NODES, EDGES = 60, 500


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, folder: Path, torch_cuda) -> Iterator[list[FreshGraph]]:
    """Edges of the host are grouped, as those of a GPU are. Yields the graphs that are made."""
    words = torch.zeros(4, dtype=torch.int64)
    modules = (
        grouping, grouped_rows, columns, fresh, gat, gat_layer, gat_launches, edge_attention,
        runner,
    )  # fmt: skip
    load_on_host(
        monkeypatch, folder, *modules, processors=one_processor, machine=h200,
        scratch=unread_scratch, faults_address=lambda device: words.data_ptr(),
    )  # fmt: skip
    torch_cuda(synchronize=None)
    monkeypatch.setattr(
        faults, "_words", [(faults.ctypes.c_int64 * 4).from_address(words.data_ptr())]
    )
    monkeypatch.setattr(kernels, "BLOCKS_PER_SM", 1)
    monkeypatch.setattr(kernels, "_MOST_TILE", 256)
    monkeypatch.setattr(heads, "FUSED_ON", "cpu")
    monkeypatch.setattr(fresh, "GROUPED_ON", "cpu")
    found: list[FreshGraph] = []

    def noted(layer: str, edges: Tensor, *given: object) -> FreshGraph:
        found.append(fresh.make_fresh(layer, edges, *given))
        return found[-1]

    monkeypatch.setattr(cache, "make_fresh", noted)
    clear_graph_cache()
    yield found
    clear_graph_cache()


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_pyg_s(made: list[FreshGraph], name: str):
    pytest.importorskip("torch_geometric")
    for out, hub in ((4, False), (16, True)):
        edges = new_edges(NODES, EDGES, out, hub)
        assert_like_pyg(name, edges, NODES, out, "cpu", torch.float32)
    assert len(made) == 4 and all(graph._canonical is None for graph in made)


@pytest.mark.parametrize("name", ["gcn", "sage", "sage max", "gin"])
def test_gradients_of_gradients(made: list[FreshGraph], name: str):
    pytest.importorskip("torch_geometric")
    assert_twice_differentiable(LAYERS[name], new_edges(NODES, EDGES, 3), NODES, "cpu")
    assert len(made) == 1


@pytest.mark.parametrize("name", ["one by one", "one row", "one column", "odd sizes", "no entries"])
def test_what_the_checkers_watch_is_right(name: str):
    matrix = checked_products._Matrix(csr_of(MATRICES[name]()))
    want, seen = matrix.expected(False), checked_products.Watched()
    for dtype in (torch.float32, torch.bfloat16):
        given = st.plan(matrix.given.with_values(None), 7, dtype=dtype, system="cpu")
        checked_products._new_graph(given, matrix, 7, seen, want)
    assert seen.products == (16 if matrix.given.nnz else 0)
