"""Sampled graphs multiplied by ``spmm_block`` and transposed by ``transpose_block``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.kernels import blocks as kernel_blocks
from sparsetile.layers import edge_rows as blocks
from sparsetile.layers.edge_rows import EdgeRows
from sparsetile.nn import GCNConv, SAGEConv, aggregate, cache, clear_graph_cache
from sparsetile.nn import sampled as nn_sampled
from tests.contracts.cases import MATRICES, csr_of
from tests.emulator.build import HostKernel, host_compiler
from tests.emulator.products import load_on_host
from tests.host import one_processor
from tools import checked_products

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


def host_blocks(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> list[HostKernel]:
    """Launch the kernels of blocks on the host; return those that are loaded."""
    return load_on_host(
        monkeypatch, folder, blocks, options=options, processors=one_processor,
        unused_flag=lambda *where: torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    host_blocks(monkeypatch, folder)


def edges(count: int, shape: tuple[int, int], by_row: bool) -> Tensor:
    """Columns and rows, with parallel edges and rows without one among them."""
    generator = torch.Generator().manual_seed(count)
    columns = torch.randint(shape[1], (count,), generator=generator)
    rows = torch.randint(max(shape[0] - 1, 1), (count,), generator=generator)
    found = torch.stack([columns, rows])
    return found[:, rows.argsort(stable=True)] if by_row else found


def dense(edge_index: Tensor, shape: tuple[int, int]) -> Tensor:
    A = torch.zeros(shape, dtype=torch.float64)
    return A.index_put_((edge_index[1], edge_index[0]), A.new_ones(1), accumulate=True)


def assert_products(rows: EdgeRows, A: Tensor, widths: tuple[int, ...] = (1, 7, 32, 50)) -> None:
    """Both directions, with everything that a product may do beside its sum."""
    lengths = A.sum(1, keepdim=True).clamp(min=1)
    assert rows.read()
    mirror = rows.transposed
    assert mirror.transposed is rows
    for dtype in (torch.float32, torch.float16, torch.float64):
        close = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {}
        for n in widths:
            x = torch.randint(-3, 4, (A.shape[1], n)).to(dtype)
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            bias = torch.randint(-5, 6, (n,)).to(wide)
            want = A @ x.double()
            assert torch.equal(rows.multiply(x).double(), want)
            found = rows.multiply(x, bias=bias, relu=True)
            assert torch.equal(found.double(), (want + bias).relu())
            mean = rows.multiply(x, "rows")
            torch.testing.assert_close(mean, (want / lengths).to(dtype), **close)
            g = torch.randint(-3, 4, (A.shape[0], n)).to(dtype)
            assert torch.equal(mirror.multiply(g).double(), A.T @ g.double())
            turned = mirror.multiply(g, "columns")
            torch.testing.assert_close(turned, (A.T @ (g / lengths)).to(dtype), **close)
    assert torch.equal(rows.row_lengths().long(), A.sum(1).long())


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (70, (12, 30)), (300, (90, 20))])
def test_products_of_both_directions(by_row: bool, count: int, shape: tuple[int, int]):
    edge_index = edges(count, shape, by_row)
    rows = EdgeRows.of_edges(edge_index, True, shape)
    assert rows.read()
    assert (rows.given_as is None) == bool((edge_index[1].diff() >= 0).all())
    assert rows.has_loops == bool((edge_index[0] == edge_index[1]).any())
    lengths = torch.bincount(edge_index[1], minlength=shape[0])
    assert rows._lengths_at and torch.equal(rows.row_lengths().long(), lengths)
    assert_products(rows, dense(edge_index, shape))
    flipped = edge_index.flip(0)
    other = EdgeRows.of_edges(flipped, False, shape)
    x = torch.randint(-3, 4, (shape[1], 8)).float()
    assert torch.equal(other.multiply(x), rows.multiply(x))


@pytest.mark.parametrize("by_row", [True, False])
def test_long_rows_are_shared_by_a_thread_block(by_row: bool, constants):
    constants(kernel_blocks, _ALONE=32)
    shape = (70, 9)
    edge_index = edges(900, shape, False)
    edge_index[1, :300], edge_index[1, 300:433], edge_index[1, 433:465] = 5, 6, 68
    if by_row:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    rows = EdgeRows.of_edges(edge_index, True, shape)
    assert_products(rows, dense(edge_index, shape), (5, 40))


def test_edges_from_a_node_to_itself_are_noticed():
    edge_index = torch.tensor([[1, 2, 0, 3], [0, 1, 2, 2]])
    for last, found in ((2, True), (3, False)):
        edge_index[0, 3] = last
        rows = EdgeRows.of_edges(edge_index, True, (3, 4))
        assert rows.read() and rows.has_loops == found


@pytest.mark.parametrize(("row", "number"), [(0, 30), (0, -1), (1, 12), (1, -7), (0, 2**40)])
def test_edges_that_name_no_node(row: int, number: int):
    edge_index = edges(70, (12, 30), True)
    edge_index[row, 40] = number
    rows = EdgeRows.of_edges(edge_index, True, (12, 30))
    assert rows.multiply(torch.ones(30, 8)) is None and not rows.read()
    flipped = edge_index.flip(0)
    turned = EdgeRows.of_edges(flipped, False, (12, 30))
    assert not turned.read() and turned.unread is not None


@pytest.mark.parametrize("layout", ["as given", "strided"])
def test_edges_may_end_before_they_are_read(layout: str):
    kept = edges(70, (12, 30), True)
    given = kept.clone() if layout == "as given" else kept.T.contiguous().T
    rows, ended = EdgeRows.of_edges(given, True, (12, 30)), weakref.ref(given)
    assert rows.unread is not given  # caches watch for the end of the caller's tensor
    del given
    assert ended() is None
    torch.full((2, 70), -1)  # would take the place of memory that was freed
    x = torch.randint(-3, 4, (30, 8)).float()
    assert torch.equal(rows.multiply(x).double(), dense(kept, (12, 30)) @ x.double())
    assert rows.unread is None


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (500, (3, 4)), (700, (9, 2000))])
def test_columns_are_sorted_as_they_come(count: int, shape: tuple[int, int]):
    edge_index = edges(count, shape, True)
    rows = EdgeRows.of_edges(edge_index, True, shape)
    assert rows.read()
    found, order = rows.transposed._halves()
    want, want_order = torch.sort(edge_index[0], stable=True)
    assert torch.equal(found.long(), want) and torch.equal(order.long(), want_order)


@pytest.mark.parametrize("by_row", [True, False])
def test_many_edges_are_sorted_by_torch(
    by_row: bool, monkeypatch: pytest.MonkeyPatch, folder: Path, constants
):
    edge_index = edges(70, (12, 30), by_row)
    rows = EdgeRows.of_edges(edge_index, True, (12, 30))
    constants(blocks, MAX_TRANSPOSED=(69, 100))
    loaded = host_blocks(monkeypatch, folder)
    assert_products(rows, dense(edge_index, (12, 30)), (8,))
    assert loaded and not any(kernel.name == "transpose_block" for kernel in loaded)


def test_operands_that_lie_anyhow():
    shape = (12, 30)
    edge_index = edges(70, shape, True).T.contiguous().T  # columns of [E, 2]
    rows = EdgeRows.of_edges(edge_index, True, shape)
    wide = torch.randint(-3, 4, (30, 19)).float()
    want = dense(edge_index, shape)
    for x in (wide[:, 1:9], wide[:, :8], wide.T.contiguous().T, torch.ones(1, 8).expand(30, 8)):
        assert torch.equal(rows.multiply(x).double(), want @ x.double())
    assert rows.multiply(wide[:, :0]).shape == (12, 0)


def test_the_matrix_of_a_block():
    edge_index = edges(70, (12, 30), False)
    rows = EdgeRows.of_edges(edge_index, True, (12, 30))
    assert rows.read()
    for each, A in ((rows, dense(edge_index, (12, 30))), (rows.transposed, None)):
        csr = each.csr
        found = torch.zeros(csr.shape, dtype=torch.float64)
        found.index_put_((csr.row_ids(), csr.indices.long()), found.new_ones(1), accumulate=True)
        want = dense(edge_index, (12, 30)).T if A is None else A
        assert torch.equal(found, want)


def test_a_transpose_outlives_what_it_came_from():
    edge_index = edges(70, (12, 30), True)
    rows = EdgeRows.of_edges(edge_index, True, (12, 30))
    assert rows.read()
    mirror = rows.transposed
    del rows
    A, g = dense(edge_index, (12, 30)), torch.randint(-3, 4, (12, 8)).float()
    want = A.T @ (g / A.sum(1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(mirror.multiply(g, "columns"), want.float())
    x = torch.randint(-3, 4, (30, 8)).float()
    assert torch.equal(mirror.transposed.multiply(x).double(), A @ x.double())


@pytest.mark.parametrize("name", ["one by one", "one row", "one column", "odd sizes", "no entries"])
def test_what_the_checkers_watch_is_right(name: str):
    matrix = checked_products._Matrix(csr_of(MATRICES[name]()))
    want, seen = matrix.expected(False), checked_products.Watched()
    for dtype in (torch.float32, torch.bfloat16):
        made = st.plan(matrix.given.with_values(None), 7, dtype=dtype, system="cpu")
        checked_products._sampled_graph(made, matrix, 7, seen, want)
    assert seen.products == (16 if matrix.given.nnz else 0)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers on the host multiply sampled graphs as they do on a GPU."""
    clear_graph_cache()
    monkeypatch.setattr(nn_sampled, "HostRows", EdgeRows)
    cache._Regime.short_lived = True
    yield
    clear_graph_cache()


def same_as_pyg(mine: torch.nn.Module, theirs: torch.nn.Module, x: Any, given: Tensor) -> None:
    theirs.load_state_dict(mine.state_dict())
    found = []
    for layer in (mine, theirs):
        cache._Regime.short_lived = True
        out = layer(x, given)
        leaves = (x[0] if isinstance(x, tuple) else x, *layer.parameters())
        grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("how", ["by target", "unsorted", "int32", "strided"])
def test_layers_on_blocks_of_a_gpu_are_pyg_s(how: str):
    pyg = pytest.importorskip("torch_geometric.nn")
    given = edges(90, (12, 30), how != "unsorted")
    given = given.int() if how == "int32" else given.T.contiguous().T if how == "strided" else given
    x = torch.randn(30, 6, requires_grad=True)
    for wide in (4, 9):
        for aggr in ("mean", "sum"):
            pair = SAGEConv(6, wide, aggr=aggr), pyg.SAGEConv(6, wide, aggr=aggr)
            same_as_pyg(*pair, (x, x[:12]), given.long() if how == "int32" else given)
        square = given[:, given[0] != given[1]].long()
        same_as_pyg(GCNConv(6, wide), pyg.GCNConv(6, wide), x, square)
    mine = aggregate((x, x[:12]), given, reduce="mean")
    A = dense(given.long(), (12, 30))
    want = A @ x.double() / A.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("row", "number"), [(0, 30), (1, -2)])
def test_layers_refuse_edges_that_name_no_node(row: int, number: int):
    given = edges(90, (30, 30), True)
    given[row, 40] = number
    for layer in (SAGEConv(6, 4), GCNConv(6, 4)):
        mine = given.clone()
        for _ in range(2):
            cache._Regime.short_lived = True
            with pytest.raises(ValueError, match=rf"{type(layer).__name__}: edge_index\[{row}\]"):
                layer(torch.randn(30, 6), mine)
