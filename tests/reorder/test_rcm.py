"""Reverse Cuthill-McKee: the band of a shuffled matrix is found again."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder import REORDERERS
from sparsetile.reorder.rcm import rcm
from tests.contracts.cases import assert_close, csr_of, random_matrix


def bandwidth(matrix: sp.csr_array) -> int:
    entries = matrix.tocoo()
    return int(np.abs(entries.row - entries.col).max())


def shuffled_band(rows: int, half: int, *, symmetric: bool = True) -> sp.csr_array:
    offsets = range(-half, half + 1) if symmetric else range(half + 1)
    band = sp.csr_array(sp.diags_array([1.0] * len(offsets), offsets=offsets, shape=(rows, rows)))
    shuffle = np.random.default_rng(0).permutation(rows)
    return sp.csr_array(band[shuffle][:, shuffle])


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_band_of_a_shuffled_matrix_is_found_again(symmetric):
    matrix = shuffled_band(600, 4, symmetric=symmetric)
    order = rcm(csr_of(matrix)).perm.numpy()
    assert bandwidth(matrix) > 400
    assert bandwidth(matrix[order][:, order]) <= 8


@pytest.mark.parametrize("window, least", [(8, 4.0), (64, 7.5)])
def test_windows_of_a_shuffled_band_share_their_columns_again(window, least):
    csr = csr_of(shuffled_band(600, 4))  # 9 entries a row: at most 9 rows share a column
    assert csr.nnz / distinct_pairs(csr, window) < 2
    assert csr.nnz / distinct_pairs(csr, window, rcm(csr).perm) > least


def test_a_rectangular_band_is_found_through_shared_columns():
    rows = 400
    band = sp.diags_array([1.0] * 6, offsets=range(6), shape=(rows, rows + 5))
    shuffle = np.random.default_rng(1).permutation(rows)
    csr = csr_of(sp.csr_array(sp.csr_array(band)[shuffle]))
    assert csr.nnz / distinct_pairs(csr, 8, rcm(csr).perm) > 2 * csr.nnz / distinct_pairs(csr, 8)


def test_values_that_cancel_still_count_as_an_edge():
    """A + Aᵀ is zero everywhere, its pattern is not."""
    upper = sp.triu(shuffled_band(200, 2), k=1)
    skew = sp.csr_array(upper - upper.T)
    order = rcm(csr_of(skew)).perm
    assert torch.equal(order, rcm(csr_of(abs(skew))).perm)
    assert bandwidth(skew[order.numpy()][:, order.numpy()]) <= 4


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (1, 1), (5, 0), (5, 5)])
def test_a_matrix_without_entries_keeps_its_order(shape):
    assert torch.equal(rcm(csr_of(sp.csr_array(shape))).perm, torch.arange(shape[0]))


def test_a_dense_column_of_a_tall_matrix_costs_no_more_than_its_entries():
    csr = csr_of(sp.csr_array(np.ones((200_000, 1))))
    rcm(csr).checked(200_000)  # all pairs of rows would not fit in memory


def test_a_plan_with_this_order_gives_the_same_product():
    csr = csr_of(random_matrix(60, 45, 0.1), dtype=torch.float64)
    B = torch.randn(45, 3, dtype=torch.float64)
    plan = st.plan((csr.indptr, csr.indices, csr.values, csr.shape), 3, reorder="rcm")
    assert plan.info["reorder"] == "rcm"
    assert_close(plan @ B, csr, B)


def test_it_is_registered_by_name():
    assert REORDERERS["rcm"] is rcm
