"""The order by merging: similar rows become pairs, pairs fours, up to groups of 64."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder.lsh import lsh
from sparsetile.reorder.merging import merging
from tests.contracts.cases import csr_of, random_matrix

module = importlib.import_module(
    "sparsetile.reorder.merging"
)  # the package has a function so named


def _families(families: int, size: int, columns: int, kept: float, seed: int) -> sp.csr_array:
    """Rows of ``families`` column sets, ``size`` of each in a random order, thinned out."""
    rng = np.random.default_rng(seed)
    sets = rng.random((families, columns)) < 20 / columns
    rows = np.repeat(sets, size, axis=0) & (rng.random((families * size, columns)) < kept)
    return sp.csr_array(rows[rng.permutation(families * size)].astype(np.float32))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 63, 64, 65, 127, 200])
def test_every_row_appears_once(rows):
    order = merging(csr_of(random_matrix(rows, 30, 0.1, seed=rows))).perm
    assert torch.equal(order.sort().values, torch.arange(rows))


def test_windows_of_families_hold_one_family_each():
    csr = csr_of(_families(20, 64, 2000, 1.0, seed=0))
    order = merging(csr).perm
    for window in (8, 16, 64):
        assert distinct_pairs(csr, window, order) == csr.nnz // window


def test_similar_rows_share_more_than_in_lsh_and_far_more_than_as_given():
    csr = csr_of(_families(40, 32, 3000, 0.7, seed=1))
    given, hashed, merged = (
        csr.nnz / distinct_pairs(csr, 16, perm) for perm in (None, lsh(csr).perm, merging(csr).perm)
    )
    assert merged > 1.2 * hashed > 1.2 * given


def test_empty_rows_come_last_and_take_no_place_in_a_window():
    dense = _families(10, 16, 500, 1.0, seed=2).toarray()
    with_empty = np.zeros((320, 500), np.float32)
    with_empty[::2] = dense
    csr = csr_of(sp.csr_array(with_empty))
    order = merging(csr).perm
    assert order[160:].tolist() == list(range(1, 320, 2))
    assert distinct_pairs(csr, 16, order) == csr.nnz // 16


def test_a_group_that_is_not_whole_is_the_last():
    """One row like no other, and the first: it does not shift the window of the others."""
    family = _families(1, 64, 1000, 1.0, seed=3)
    other = sp.csr_array(([1.0], [999], [0, 1]), shape=(1, 1000))
    csr = csr_of(sp.csr_array(sp.vstack([other, family])))
    assert merging(csr).perm[-1] == 0


def test_temporary_arrays_of_any_size_give_the_same_order(monkeypatch):
    csr = csr_of(random_matrix(300, 80, 0.05, seed=5))
    before = merging(csr).perm
    monkeypatch.setattr(module, "_CHUNK", 7 * module.SIGNATURES)
    assert torch.equal(merging(csr).perm, before)


def test_a_wide_matrix_is_ordered_like_the_same_with_fewer_columns():
    narrow = csr_of(random_matrix(300, 40, 0.2), pattern=True)
    wide = st.CSR(narrow.indptr, narrow.indices, None, (300, 2**31 - 1))
    assert torch.equal(merging(wide).perm, merging(narrow).perm)


def test_a_plan_multiplies_in_this_order():
    matrix = random_matrix(100, 60, 0.1, seed=6)
    plan = st.plan(matrix, 4, reorder="merging")
    B = torch.randn(60, 4, dtype=torch.float64)
    assert plan.reorder == "merging"
    expected = torch.from_numpy(matrix.toarray()).to(torch.float64) @ B
    torch.testing.assert_close(plan @ B.to(plan.dtype), expected.to(plan.dtype))
