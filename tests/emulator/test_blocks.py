"""Sampled blocks listed by ``list_block`` and multiplied as they come, thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.core.device import H200
from sparsetile.systems.base import Epilogue
from sparsetile.systems.csr import runner as csr_runner
from sparsetile.systems.csr.blocks import BlockRows
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.emulator.test_cells import run_on_host

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_on_host(monkeypatch, folder)
    load_on_host(monkeypatch, csr_runner, folder)
    monkeypatch.setattr(csr_runner, "machine", lambda device: H200)


def edges(count: int, shape: tuple[int, int], by_target: bool) -> tuple[Tensor, Tensor]:
    """Parallel edges and targets without one among them."""
    generator = torch.Generator().manual_seed(count)
    source = torch.randint(shape[1], (count,), generator=generator)
    target = torch.randint(max(shape[0] - 1, 1), (count,), generator=generator)
    if by_target:
        order = target.argsort(stable=True)
        source, target = source[order], target[order]
    return source, target


def dense(source: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    A = torch.zeros(shape, dtype=torch.float64)
    return A.index_put_((target, source), torch.ones(1, dtype=A.dtype), accumulate=True)


@pytest.mark.parametrize("by_target", [True, False])
@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (70, (12, 30)), (900, (9, 20))])
def test_products_of_both_directions(by_target: bool, count: int, shape: tuple[int, int]):
    source, target = edges(count, shape, by_target)
    rows = BlockRows.of_edges(source, target, shape)
    assert rows is not None
    ascending = bool((target.diff() >= 0).all())
    assert (rows.order is None) == ascending
    A = dense(source, target, shape)
    for each, matrix in ((rows, A), (rows.turned, A.T)):
        assert torch.equal(each.csr.indptr.diff(), matrix.sum(1).long())
        for dtype, n in ((torch.float32, 7), (torch.float16, 32), (torch.float32, 64)):
            x = torch.randint(-3, 4, (matrix.shape[1], n)).to(dtype)
            assert torch.equal(each.multiply(x, Epilogue()).double(), matrix @ x.double())
            mean = each.multiply(x, Epilogue(mean=True, relu=True)).double()
            want = matrix @ x.double() / matrix.sum(1, keepdim=True).clamp(min=1)
            torch.testing.assert_close(mean, want.relu(), rtol=1e-3, atol=1e-3)
    assert rows.turned.turned is rows
    lengths = A.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(rows.scale, 1 / lengths)


@pytest.mark.parametrize(("row", "number"), [(0, 30), (0, -1), (1, 12), (1, -7)])
def test_edges_that_name_no_node(row: int, number: int):
    given = torch.stack(edges(70, (12, 30), True))
    given[row, 40] = number
    assert BlockRows.of_edges(given[0], given[1], (12, 30)) is None


def test_strided_edges():
    given = torch.stack(edges(70, (12, 30), True)).T.contiguous()  # [E, 2]
    rows = BlockRows.of_edges(given[:, 0], given[:, 1], (12, 30))
    assert rows is not None
    assert torch.equal(rows.csr.indices.long(), given[:, 0])
