"""The transpose's order: stable by columns, and the same whether sorted at once or in parts."""

from __future__ import annotations

import importlib

import pytest
import torch

from sparsetile.intake import as_csr

module = importlib.import_module("sparsetile.intake.csr")


@pytest.mark.parametrize("at_once", [1, 7, 100, 999, 10**6])
def test_many_entries_are_transposed_in_parts(at_once: int, constants):
    generator = torch.Generator().manual_seed(at_once)
    full = torch.rand(60, 45, generator=generator)
    full[full < 0.6] = 0
    full[:, 7] = 0
    made = as_csr(full.to_sparse_csr(), function="plan")
    expected = torch.argsort(made.indices, stable=True)
    constants(module, SORTED_AT_ONCE=at_once)
    assert torch.equal(made.transpose_order(), expected)
    turned = made.transposed()
    assert turned.shape == (45, 60) and turned.indices.dtype is torch.int32
    back = torch.zeros(45, 60)
    back[turned.row_ids(), turned.indices.long()] = turned.values
    assert torch.equal(back, full.T)
