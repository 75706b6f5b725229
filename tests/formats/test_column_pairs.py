"""Distinct (window, column) pairs, counted by hand and against dense arrays."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile import CSR
from sparsetile.formats.column_pairs import distinct_pairs, window_pairs
from tests.contracts.cases import MATRICES, csr_of


def ladder() -> CSR:
    """70 rows: rows r and r+1 share column r; 139 entries, 70 columns used of 100."""
    rows = np.concatenate([np.arange(70), np.arange(1, 70)])
    columns = np.concatenate([np.arange(70), np.arange(69)])
    return csr_of(sp.csr_array((np.ones(139), (rows, columns)), shape=(70, 100)))


def test_distinct_pairs_of_a_ladder_are_counted_by_hand():
    # 16-row windows begin at rows 0, 16, 32, 48, 64; each but the first also uses the column
    # before its own first row: 16 + 17 + 17 + 17 + 7.
    assert distinct_pairs(ladder(), 16) == 74
    assert distinct_pairs(ladder(), 64) == 64 + 7
    assert distinct_pairs(ladder(), 1) == 139


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("window", [1, 3, 16, 64])
def test_distinct_pairs_agree_with_a_dense_count(name, window):
    matrix = MATRICES[name]()
    csr = csr_of(matrix)
    order = torch.randperm(csr.shape[0])
    for perm in (None, order):
        dense = np.zeros(csr.shape, dtype=bool)
        dense[csr.row_ids().numpy(), csr.indices.numpy()] = True
        dense = dense if perm is None else dense[perm.numpy()]
        starts = range(0, csr.shape[0], window)
        expected = sum(int(dense[at : at + window].any(0).sum()) for at in starts)
        assert distinct_pairs(csr, window, perm) == expected


@pytest.mark.parametrize("name", MATRICES)
def test_pairs_of_tall_windows_come_from_those_of_the_windows_inside(name):
    csr = csr_of(MATRICES[name]())
    order = (csr.row_ids(), csr.indices, csr.shape[1])
    for window, owner in window_pairs(*order, (4, 8, 16, 64)):
        ((_, alone),) = window_pairs(*order, (window,))
        assert torch.equal(owner, alone) and owner.numel() == distinct_pairs(csr, window)
        assert torch.equal(owner, owner.sort().values)


def test_a_column_count_beyond_32_bits_does_not_mix_windows():
    rows, cols = torch.tensor([0, 8, 8]), torch.tensor([2**31 - 2, 0, 2**31 - 2], dtype=torch.int32)
    ((_, owner),) = window_pairs(rows, cols, 2**31 - 1, (8,))
    assert owner.tolist() == [0, 1, 1]
