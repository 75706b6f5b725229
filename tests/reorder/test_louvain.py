"""The Louvain order: communities lie together, and so do communities of communities."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder.louvain import louvain
from tests.contracts.cases import csr_of, random_matrix


def planted(size: int, inner: int, outer: int, seed: int = 0) -> tuple[sp.csr_array, np.ndarray]:
    """A shuffled graph of ``outer`` groups of ``inner`` communities of ``size`` vertices.

    Communities are complete; each two of a group are joined by four edges, groups by one.
    """
    rows = size * inner * outer
    graph = sp.lil_array((rows, rows))
    for c in range(inner * outer):
        graph[c * size : (c + 1) * size, c * size : (c + 1) * size] = 1
        begin = c // inner * inner  # of the group
        for other in range(begin, c):
            for k in range(4):
                graph[c * size + k, other * size + k] = 1
        if c % inner == 0:
            graph[c * size, (c + inner) % (inner * outer) * size] = 1
    shuffle = np.random.default_rng(seed).permutation(rows)
    both = sp.csr_array(((graph + graph.T) > 0).astype(np.float64))
    return sp.csr_array(both[shuffle][:, shuffle]), shuffle


def runs(labels: np.ndarray) -> int:
    """Number of runs of equal labels."""
    return 1 + int((labels[1:] != labels[:-1]).sum())


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_community_come_together_and_so_do_communities_of_a_group(seed):
    matrix, shuffle = planted(size=10, inner=6, outer=12, seed=seed)
    order = louvain(csr_of(matrix)).perm.numpy()
    assert runs(shuffle // 10) > 600
    assert runs(shuffle[order] // 10) == 72
    assert runs(shuffle[order] // 60) == 12


@pytest.mark.parametrize("shape", [(800, 200), (200, 800), (400, 400)])
def test_rows_of_an_unsymmetric_matrix_are_joined_by_the_columns_they_share(shape):
    rows, columns = shape
    blocks = [random_matrix(rows // 20, columns // 20, 0.6, seed=k) for k in range(20)]
    rng = np.random.default_rng(3)
    matrix = sp.csr_array(sp.block_diag(blocks))[rng.permutation(rows)][:, rng.permutation(columns)]
    csr = csr_of(sp.csr_array(matrix))
    after = csr.nnz / distinct_pairs(csr, 8, louvain(csr).perm)
    assert after > 2 * csr.nnz / distinct_pairs(csr, 8)


def test_inside_a_community_rows_keep_the_given_order():
    order = louvain(csr_of(sp.csr_array(np.ones((40, 40))))).perm
    assert torch.equal(order, torch.arange(40))


def test_the_same_pattern_gives_the_same_order_whatever_its_values():
    csr = csr_of(random_matrix(500, 500, 0.01))
    first = louvain(csr).perm
    assert torch.equal(first, louvain(csr).perm)
    assert torch.equal(first, louvain(csr.with_values(None)).perm)


def test_empty_rows_come_last_in_the_given_order():
    csr = csr_of(random_matrix(200, 90, 0.01))
    empty = torch.nonzero(csr.row_lengths() == 0).flatten()
    assert 0 < empty.numel() < 200
    assert torch.equal(louvain(csr).perm[-empty.numel() :], empty)


def test_complete_graphs_without_edges_between_them_are_one_run_each():
    pairs = [np.ones((5, 5))] * 12
    shuffle = np.random.default_rng(4).permutation(60)
    matrix = sp.csr_array(sp.csr_array(sp.block_diag(pairs))[shuffle][:, shuffle])
    order = louvain(csr_of(matrix)).perm.numpy()
    assert runs(shuffle[order] // 5) == 12


@pytest.mark.parametrize(
    "matrix",
    [np.ones((200_000, 1)), np.ones((1, 200_000))],
    ids=["one full column", "one full row"],
)
def test_a_popular_row_or_column_costs_no_more_than_its_entries(matrix):
    csr = csr_of(sp.csr_array(matrix))
    louvain(csr).checked(csr.shape[0])  # all pairs of rows would not fit in memory


def test_more_vertices_than_32_bits_can_number_are_refused():
    rows = 2**31 - 5
    indptr = torch.zeros(1, dtype=torch.int64).expand(rows + 1)  # takes no memory
    csr = st.CSR(indptr, torch.arange(9, dtype=torch.int32), None, (rows, 9))
    with pytest.raises(ValueError) as caught:
        louvain(csr)
    assert str(caught.value) == (
        "louvain: A must be a matrix of fewer than 2**31 rows and columns together, "
        f'got {rows} rows and 9 columns. Plan it with reorder="identity".'
    )
