"""Column order: columns are numbered as rows first use them; the matrix stays the same."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import sparsetile as st
from sparsetile.reorder import Permutation
from sparsetile.reorder.columns import first_use, with_columns
from tests.contracts.cases import csr_of, random_matrix


def dense_of(csr: st.CSR) -> torch.Tensor:
    full = torch.zeros(csr.shape, dtype=torch.float64)
    full[csr.row_ids(), csr.indices.long()] = csr.values.double()
    return full


matrices = some.builds(
    random_matrix,
    rows=some.integers(0, 30),
    cols=some.integers(0, 30),
    density=some.floats(0, 0.4),
    seed=some.integers(0, 2**31 - 1),
)


@settings(max_examples=60, deadline=None)
@given(matrix=matrices, shuffled=some.booleans(), seed=some.integers(0, 99))
def test_columns_first_occur_as_0_1_2_and_unused_ones_come_last(matrix, shuffled, seed):
    csr = csr_of(matrix)
    perm = torch.from_numpy(np.random.default_rng(seed).permutation(csr.shape[0]))
    permutation = Permutation("given", perm if shuffled else None)
    order = first_use(csr, permutation)
    assert torch.equal(order.sort().values, torch.arange(csr.shape[1]))
    moved, _ = with_columns(csr, order)
    seen = -1
    for row in (perm if shuffled else torch.arange(csr.shape[0])).tolist():
        held = moved.indices[moved.indptr[row] : moved.indptr[row + 1]].tolist()
        fresh = [column for column in held if column > seen]
        assert fresh == list(range(seen + 1, seen + 1 + len(fresh)))
        seen += len(fresh)
        # Columns that one row brings in stay in the given order.
        assert order[fresh].tolist() == sorted(order[fresh].tolist())
    unused = order[seen + 1 :]
    assert unused.tolist() == sorted(set(range(csr.shape[1])) - set(csr.indices.tolist()))


@settings(max_examples=60, deadline=None)
@given(matrix=matrices, seed=some.integers(0, 99))
def test_only_renumbers_columns_and_stays_canonical(matrix, seed):
    csr = csr_of(matrix)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(csr.shape[1]))
    moved, entries = with_columns(csr, order)
    assert torch.equal(dense_of(moved), dense_of(csr)[:, order])
    assert torch.equal(moved.values, csr.values[entries])
    assert moved.indices.dtype is torch.int32 and moved.shape == csr.shape
    steps = torch.diff(moved.row_ids() * max(csr.shape[1], 1) + moved.indices)
    assert bool((steps > 0).all())


def test_values_are_still_taken_in_the_order_of_the_callers_entries():
    """Unsorted, with a duplicate: the entry map leads from the caller to the new places."""
    rows, columns = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([2, 3, 0, 1, 2])
    csr = st.intake.as_csr((torch.stack([rows, columns]), torch.ones(5), (2, 4)))
    moved, _ = with_columns(csr, torch.tensor([3, 2, 1, 0]))
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    found = dense_of(moved.with_values(moved.canonical_values(values)))
    assert found.tolist() == [[2.0, 0.0, 8.0, 0.0], [0.0, 17.0, 0.0, 4.0]]


def test_a_band_with_shuffled_columns_is_a_band_again():
    band = sp.csr_array(sp.diags_array([1.0] * 5, offsets=range(-2, 3), shape=(300, 300)))
    shuffle = np.random.default_rng(0).permutation(300)
    csr = csr_of(sp.csr_array(band[:, shuffle]))
    moved, _ = with_columns(csr, first_use(csr, Permutation("identity", None)))
    apart = (moved.row_ids() - moved.indices).abs()
    assert int((csr.row_ids() - csr.indices).abs().max()) > 200 and int(apart.max()) <= 2
