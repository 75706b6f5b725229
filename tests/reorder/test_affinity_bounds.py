"""What the compiled steps of the data-affinity order promise beyond the order itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.data.powerlaw import power_law
from sparsetile.reorder import affinity_numba as numba_code
from sparsetile.reorder import affinity_windows as windows
from sparsetile.reorder.affinity import affinity
from tests.contracts.cases import csr_of, random_matrix


def arrays(matrix: sp.csr_array) -> tuple[np.ndarray, np.ndarray]:
    csr = csr_of(matrix)
    return csr.indptr.numpy(), csr.indices.numpy().view(np.uint32)


def changed(matrix: sp.csr_array, row: int, column: int) -> sp.csr_array:
    dense = matrix.toarray() != 0
    dense[row, column] = ~dense[row, column]
    return sp.csr_array(dense.astype(float))


@pytest.mark.parametrize("size", [1, 2, 40])
def test_a_symmetric_matrix_is_its_own_graph(size):
    half = random_matrix(size, size, 0.3)
    indptr, indices = arrays(sp.csr_array(half + half.T + sp.eye_array(size)))
    pointers, neighbours = numba_code.affinity_graph(indptr, indices, size)
    assert pointers is indptr and neighbours is indices


@pytest.mark.parametrize("row, column", [(0, 39), (39, 0), (17, 18), (38, 39)])
def test_one_unsymmetric_entry_makes_the_graph_bipartite(row, column):
    half = random_matrix(40, 40, 0.2)
    matrix = changed(sp.csr_array(half + half.T), row, column)
    indptr, indices = arrays(matrix)
    pointers, neighbours = numba_code.affinity_graph(indptr, indices, 40)
    graph = sp.csr_array((np.ones(neighbours.size), neighbours.astype(int), pointers))
    pattern = (matrix.toarray() != 0).astype(float)
    nothing = 0 * pattern
    assert np.array_equal(graph.toarray(), np.block([[nothing, pattern], [pattern.T, nothing]]))


def test_a_permuted_cycle_has_the_row_and_column_lengths_of_a_symmetric_matrix_but_is_none():
    turn = sp.csr_array(np.roll(np.eye(9), 1, axis=1))
    indptr, indices = arrays(turn)
    assert numba_code.affinity_graph(indptr, indices, 9)[0].size == 19


@pytest.mark.parametrize("shape", [(700, 90), (90, 700), (400, 400)])
def test_records_of_64_bits_give_the_same_order_as_32(shape, constants):
    """Matrices with more than 2**31 entries: the same code with wider records."""
    matrix = random_matrix(*shape, 0.1)
    indptr, indices = arrays(matrix)
    turned = sp.csr_array(matrix.T)
    pointers, members = arrays(turned)
    assert (np.diff(indptr) > 0).all() and (np.diff(pointers) > 0).all()
    expected = windows.filled_windows(indptr, indices, pointers, members)
    constants(windows, MOST_NARROW=0)
    found = windows.filled_windows(indptr, indices, pointers, members)
    assert np.array_equal(found, expected)


def test_listed_candidates_and_a_pass_over_all_in_reach_have_the_same_best():
    rng = np.random.default_rng(1)
    hits = rng.integers(0, 4, 3000).astype(np.int32)
    inverse = rng.integers(0, 3, 3000).astype(np.int32)
    listed = rng.permutation(np.arange(500, 2500)).astype(np.uint32)
    one = windows._best_listed(listed, listed.size, hits, inverse, 7)
    other = windows._best_between(500, 2499, hits, inverse, 7)
    score = (hits * inverse)[500:2500]
    assert one == other == 500 + int(np.argmax(score))
    hits[:] = 0
    assert windows._best_listed(listed, listed.size, hits, inverse, 7) == 7
    assert windows._best_between(500, 2499, hits, inverse, 7) == 7


def orders_of_graphs() -> str:
    """Digest of the orders of a symmetric and of a directed graph."""
    orders = (affinity(power_law(5000, 60000, seed=3, symmetric=s)).perm for s in (True, False))
    return hashlib.sha256(b"".join(order.numpy().tobytes() for order in orders)).hexdigest()


def test_another_process_finds_the_same_orders(interpreter):
    code = "from tests.reorder.test_affinity_bounds import *; print(orders_of_graphs())"
    done = interpreter(code, path=(str(Path(__file__).parents[2]),))
    assert done.stdout.strip() == orders_of_graphs(), done.stderr


def test_the_graph_given_is_left_as_it_was():
    csr = power_law(2000, 20000, seed=1, symmetric=False)
    indptr, indices = csr.indptr.clone(), csr.indices.clone()
    affinity(csr)
    assert torch.equal(indptr, csr.indptr) and torch.equal(indices, csr.indices)


def test_rows_longer_than_a_batch_merge_like_short_ones():
    """Two shuffled halves, each full, of 1500 rows: rows are read in pieces."""
    half = np.repeat([0, 1], 1500)
    shuffle = np.random.default_rng(6).permutation(3000)
    mine = half[shuffle]
    columns = [np.flatnonzero(mine == kind) for kind in (0, 1)]
    indices = torch.from_numpy(np.concatenate([columns[k] for k in mine]).astype(np.int32))
    csr = st.CSR(torch.arange(0, 3000 * 1500 + 1, 1500), indices, None, (3000, 3000))
    kind = torch.from_numpy(mine)[affinity(csr).perm]
    assert int((kind[1:] != kind[:-1]).sum()) == 1
