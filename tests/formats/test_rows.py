"""Plain rows: A's own arrays, and units in the order asked for."""

from __future__ import annotations

import torch

from sparsetile.formats import Rows
from tests.contracts.cases import MATRICES, csr_of


def test_arrays_are_those_of_the_matrix():
    csr = csr_of(MATRICES["odd sizes"]())
    rows = Rows.pack(csr)
    assert rows.indptr is csr.indptr and torch.equal(rows.columns, csr.indices)
    assert rows.bytes == 8 * (csr.shape[0] + 1) + 4 * csr.nnz


def test_values_are_not_copied():
    csr = csr_of(MATRICES["odd sizes"]())
    assert Rows.pack(csr).pack_values(csr.values) is csr.values


def test_units_are_rows_in_their_order():
    csr = csr_of(MATRICES["odd sizes"]())
    order = torch.randperm(csr.shape[0])
    units = Rows.pack(csr, order).units()
    assert torch.equal(units.label, order) and units.offsets is None
    assert torch.equal(units.begin, csr.indptr[order])
    assert torch.equal(units.length, csr.row_lengths()[order])
    assert torch.equal(Rows.pack(csr).units().offsets, csr.indptr)
