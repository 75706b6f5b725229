"""The locality order by hashing: rows with the same columns come together."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder.lsh import hashed, lsh
from tests.contracts.cases import csr_of, random_matrix


def test_equal_rows_come_together_in_the_given_order():
    kinds = random_matrix(50, 200, 0.1, seed=1)
    kind = np.random.default_rng(2).integers(0, 50, 400)
    csr = csr_of(sp.csr_array(kinds[kind]))
    order = lsh(csr).perm.numpy()
    found = kind[order]
    changes = np.flatnonzero(found[1:] != found[:-1]) + 1
    assert changes.size + 1 == np.unique(kind).size
    for run in np.split(order, changes):
        assert np.array_equal(run, np.sort(run))


def test_rows_that_share_most_columns_are_nearer_than_others():
    """Ten kinds of rows, each with one column in ten left out."""
    rng = np.random.default_rng(3)
    rows = np.kron(np.eye(10), np.ones((16, 30))) * (rng.random((160, 300)) < 0.9)
    csr = csr_of(sp.csr_array(rows[rng.permutation(160)]))
    before, after = (csr.nnz / distinct_pairs(csr, 8, perm) for perm in (None, lsh(csr).perm))
    assert after > 2 * before


def test_two_rows_agree_in_a_signature_as_often_as_their_jaccard_similarity():
    numbers = torch.arange(90)
    left, right = numbers[:60], numbers[30:]  # 30 of 90 in common
    agree = sum(
        int(hashed(left, seed).min()) == int(hashed(right, seed).min()) for seed in range(3000)
    )
    assert abs(agree / 3000 - 1 / 3) < 4 * (1 / 3 * 2 / 3 / 3000) ** 0.5


def test_hashes_have_31_bits_and_hardly_meet():
    hashes = hashed(torch.arange(200_000), 0)
    assert int(hashes.min()) >= 0 and 2**30 < int(hashes.max()) < 2**31
    assert torch.unique(hashes).numel() > 200_000 - 40  # 9 are expected to meet


def test_a_wide_matrix_is_ordered_like_the_same_with_fewer_columns():
    narrow = csr_of(random_matrix(300, 40, 0.2), pattern=True)
    wide = st.CSR(narrow.indptr, narrow.indices, None, (300, 2**31 - 1))
    assert torch.equal(lsh(wide).perm, lsh(narrow).perm)


def test_more_signatures_tell_rows_apart_that_fewer_do_not(constants):
    """Twelve kinds of rows with two columns of their own and eight that all of them have."""
    kinds = np.hstack([np.kron(np.eye(12), np.ones((8, 2))), np.ones((96, 8))])
    shuffle = np.random.default_rng(4).permutation(96)
    csr = csr_of(sp.csr_array(kinds[shuffle]))
    pairs = {}
    module = importlib.import_module("sparsetile.reorder.lsh")  # not the function of that name
    for count in (2, 8):
        constants(module, SIGNATURES=count)
        pairs[count] = distinct_pairs(csr, 8, lsh(csr).perm)
    assert pairs[8] < pairs[2]


def test_empty_rows_come_last_in_the_given_order():
    csr = csr_of(random_matrix(200, 90, 0.01))
    empty = torch.nonzero(csr.row_lengths() == 0).flatten()
    assert 0 < empty.numel() < 200
    assert torch.equal(lsh(csr).perm[-empty.numel() :], empty)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (5, 0), (5, 5)])
def test_a_matrix_without_entries_keeps_its_order(shape):
    assert torch.equal(lsh(csr_of(sp.csr_array(shape))).perm, torch.arange(shape[0]))


def test_the_order_is_found_on_the_device_of_the_matrix_and_the_same_everywhere(device):
    csr = csr_of(random_matrix(5000, 3000, 0.01), pattern=True)
    found = lsh(csr.to(device)).perm
    assert found.device == device and torch.equal(found.cpu(), lsh(csr).perm)
    assert found[:5].tolist() == [846, 3876, 2086, 3158, 4581]
