"""Edges of short-lived graphs are sorted on a GPU."""

from __future__ import annotations

import pytest
import torch

from sparsetile.layers.edge_rows import EdgeRows
from tests.emulator.test_blocks import dense, edges
from tests.emulator.test_transpose_block import COLUMNS, EDGES, KINDS, assert_sorted, columns_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_sorted_as_torch_sorts_them(kind: str):
    for many in (1, 31, 32, 33, 1025, EDGES - 1, EDGES):
        for count in (1, 256, 257, COLUMNS):
            assert_sorted(columns_of(kind, many, count).cuda(), count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_are_multiplied_in_both_directions(by_row: bool, dtype: torch.dtype):
    shape = (40, 90)
    given = edges(3000, shape, by_row)
    given[1, 5::2] = 3 if not by_row else given[1, 5::2]  # a long row
    A, rows = dense(given, shape), EdgeRows.of_edges(given.cuda(), True, shape)
    lengths = A.sum(1, keepdim=True).clamp(min=1)
    close = {"rtol": 4e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {}
    for n in (1, 7, 64):
        x = torch.randint(-3, 4, (shape[1], n)).to(dtype)
        g = torch.randint(-3, 4, (shape[0], n)).to(dtype)
        assert rows.read()
        mean = rows.multiply(x.cuda(), "rows")
        torch.testing.assert_close(mean.cpu(), (A @ x.double() / lengths).to(dtype), **close)
        turned = rows.transposed.multiply(g.cuda(), "columns")
        want = A.T @ (g.double() / lengths)
        torch.testing.assert_close(turned.cpu(), want.to(dtype), **close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_edges_that_descend_by_one_or_name_no_node_are_found():
    shape = (40, 90)
    given = edges(300, shape, True)
    first = int((given[1].diff() == 1).nonzero()[0])  # the last entry of its row
    given[:, [first, first + 1]] = given[:, [first + 1, first]]
    x = torch.randint(-3, 4, (shape[1], 8)).float()
    rows = EdgeRows.of_edges(given.cuda(), True, shape)
    assert torch.equal(rows.multiply(x.cuda()).cpu().double(), dense(given, shape) @ x.double())
    given[1, 7] = shape[0]
    assert EdgeRows.of_edges(given.cuda(), True, shape).multiply(x.cuda()) is None
