"""Sums and dot products by head, all heads in one launch, run on the host against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.layers import head_sums as by_head
from sparsetile.layers.edge_attention import Entries
from sparsetile.layers.head_sums import head_dots, head_sums
from tests.emulator.attention import attention_on_host, flat_plan, pattern
from tests.emulator.build import host_compiler
from tests.emulator.test_gat import UNEVEN

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

LAYOUTS = [(8, 16), (1, 5), (3, 7), (4, 1), (2, 40)]


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    attention_on_host(monkeypatch, folder)
    monkeypatch.setattr(by_head, "LEAST_CHUNK", 16)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def entries_and_edges(csr: st.CSR) -> tuple[Entries, Tensor]:
    """Entries whose edges were given in another order."""
    edges = torch.randperm(csr.nnz, generator=torch.Generator().manual_seed(7)).to(torch.int32)
    return Entries(flat_plan(csr), csr.row_ids()), edges


def compare(out: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    right = [wanted, *torch.autograd.grad(wanted, leaves, grad.double())]
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-4)


def wide_sums(csr: st.CSR, weight: Tensor, of_entry: Tensor) -> Tensor:
    """[entries, heads] times [entries, heads, width], summed by target in float64."""
    messages = (weight.double().unsqueeze(-1) * of_entry).flatten(1)
    zeros = torch.zeros(csr.shape[0], messages.shape[1], dtype=torch.float64)
    return zeros.index_add(0, csr.row_ids(), messages)


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_sums_of_the_features_of_edges(heads, width):
    csr = pattern(UNEVEN, 50)
    entries, edges = entries_and_edges(csr)
    weight, rows = drawn(csr.nnz, heads, seed=1), drawn(csr.nnz, width, seed=2)
    of_entry = rows.double()[edges.long()].unsqueeze(1).expand(-1, heads, -1)
    compare(
        head_sums(entries, weight, rows, edges), wide_sums(csr, weight, of_entry), [weight, rows]
    )


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_sums_of_the_rows_of_sources(heads, width):
    csr = pattern(UNEVEN, 50)
    entries, _ = entries_and_edges(csr)
    weight, rows = drawn(csr.nnz, heads, seed=1), drawn(50, heads * width, seed=2)
    of_entry = rows.double()[csr.indices.long()].unflatten(1, (heads, width))
    compare(
        head_sums(entries, weight, rows, None), wide_sums(csr, weight, of_entry), [weight, rows]
    )


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_dot_products_with_the_features_of_edges(heads, width):
    csr = pattern(UNEVEN, 50)
    entries, edges = entries_and_edges(csr)
    left, rows = drawn(csr.shape[0], heads * width, seed=1), drawn(csr.nnz, width, seed=2)
    of_target = left.double()[csr.row_ids()].unflatten(1, (heads, width))
    wanted = (of_target * rows.double()[edges.long()].unsqueeze(1)).sum(-1)
    compare(head_dots(entries, left, rows, edges, heads), wanted, [left, rows])
