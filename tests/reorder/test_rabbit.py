"""The Rabbit order: the leaves of a dendrogram of communities, from left to right."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder import REORDERERS
from sparsetile.reorder.affinity import affinity
from sparsetile.reorder.rabbit import rabbit
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.reorder.test_louvain import planted, runs


def order_of_the_paper(graph: np.ndarray) -> list[int]:
    """Merge and walk a symmetric graph as the paper has it, in plain Python.

    Exact where the number of edges is a power of two.
    """
    total = int(graph.sum())
    edges = [{int(u): 1 for u in np.flatnonzero(row)} for row in graph]
    strength = [len(row) for row in edges]
    tree: list[object] = list(range(len(edges)))
    roots = []
    for v in sorted(range(len(edges)), key=lambda v: (strength[v], v)):
        gains = {u: w - strength[u] * strength[v] / total for u, w in edges[v].items() if u != v}
        best = min(gains, key=lambda u: (-gains[u], u), default=v)
        if best == v or gains[best] <= 0:
            roots.append(v)
            continue
        for u, w in edges[v].items():
            if u not in (v, best):
                edges[best][u] = edges[best].get(u, 0) + w
                edges[u][best] = edges[u].get(best, 0) + w
                del edges[u][v]
        del edges[best][v]
        strength[best] += strength[v]
        tree[best] = (tree[best], tree[v])
    leaves = []
    stack = [tree[v] for v in reversed(roots)]
    while stack:
        top = stack.pop()
        if isinstance(top, tuple):
            stack += [top[1], top[0]]
        else:
            leaves.append(top)
    return leaves


def random_cells(cells: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Choose ``count`` of the numbers of cells, none twice."""
    return np.random.default_rng(seed).choice(cells, count, replace=False)


@pytest.mark.parametrize("rows, pairs", [(40, 64), (100, 256), (100, 2048), (900, 1024)])
@pytest.mark.parametrize("seed", range(3))
def test_a_symmetric_matrix_is_ordered_as_the_paper_has_it(rows, pairs, seed):
    graph = np.zeros((rows, rows))
    above = np.flatnonzero(np.triu(np.ones((rows, rows)), 1))
    graph.flat[random_cells(above, pairs, seed)] = 1
    graph += graph.T
    expected = order_of_the_paper(graph)
    filled = [v for v in expected if graph[v].any()]
    empty = [v for v in range(rows) if not graph[v].any()]
    assert rabbit(csr_of(sp.csr_array(graph))).perm.tolist() == filled + empty


@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (90, 90)])
@pytest.mark.parametrize("entries", [128, 1024])
def test_other_matrices_are_ordered_as_the_graph_of_their_rows_and_columns(shape, entries):
    rows, columns = shape
    matrix = np.zeros(shape)
    matrix.flat[random_cells(np.arange(matrix.size), entries, seed=7)] = 1
    graph = np.block([[np.zeros((rows, rows)), matrix], [matrix.T, np.zeros((columns, columns))]])
    expected = [v for v in order_of_the_paper(graph) if v < rows]
    filled = [v for v in expected if matrix[v].any()]
    empty = [v for v in range(rows) if not matrix[v].any()]
    assert rabbit(csr_of(sp.csr_array(matrix))).perm.tolist() == filled + empty


@pytest.mark.parametrize("name", MATRICES)
def test_every_row_of_an_odd_matrix_comes_once(name):
    csr = csr_of(MATRICES[name]())
    order = rabbit(csr)
    assert order.name == "rabbit"
    assert torch.equal(order.perm.sort().values, torch.arange(csr.shape[0]))


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_planted_community_come_together_and_so_do_those_of_a_group(seed):
    """A community that merged into a vertex of another early may lie inside of that one."""
    matrix, shuffle = planted(size=10, inner=6, outer=12, seed=seed)
    order = rabbit(csr_of(matrix)).perm.numpy()
    assert runs(shuffle // 10) > 600
    assert runs(shuffle[order] // 10) < 76  # 72 communities
    assert runs(shuffle[order] // 60) == 12


def test_complete_graphs_without_edges_between_them_are_one_run_each():
    shuffle = np.random.default_rng(4).permutation(60)
    blocks = sp.csr_array(sp.block_diag([np.ones((5, 5))] * 12))
    order = rabbit(csr_of(sp.csr_array(blocks[shuffle][:, shuffle]))).perm.numpy()
    assert runs(shuffle[order] // 5) == 12


@pytest.mark.parametrize("shape", [(800, 200), (200, 800), (400, 400)])
def test_rows_of_an_unsymmetric_matrix_are_joined_by_the_columns_they_share(shape):
    rows, columns = shape
    blocks = [random_matrix(rows // 20, columns // 20, 0.6, seed=k) for k in range(20)]
    rng = np.random.default_rng(3)
    matrix = sp.csr_array(sp.block_diag(blocks))[rng.permutation(rows)][:, rng.permutation(columns)]
    csr = csr_of(sp.csr_array(matrix))
    assert 2 * distinct_pairs(csr, 16, rabbit(csr).perm) < distinct_pairs(csr, 16)


def test_rows_are_not_moved_into_windows_as_the_affinity_order_does():
    csr = csr_of(random_matrix(500, 500, 0.02))
    assert not torch.equal(rabbit(csr).perm, affinity(csr).perm)


def test_the_same_pattern_gives_the_same_order_whatever_its_values():
    csr = csr_of(random_matrix(500, 500, 0.01))
    first = rabbit(csr).perm
    assert torch.equal(first, rabbit(csr).perm)
    assert torch.equal(first, rabbit(csr.with_values(None)).perm)


def test_empty_rows_come_last_in_the_given_order():
    csr = csr_of(random_matrix(200, 90, 0.01))
    empty = torch.nonzero(csr.row_lengths() == 0).flatten()
    assert 0 < empty.numel() < 200
    assert torch.equal(rabbit(csr).perm[-empty.numel() :], empty)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (5, 0), (5, 5)])
def test_a_matrix_without_entries_keeps_its_order(shape):
    assert torch.equal(rabbit(csr_of(sp.csr_array(shape))).perm, torch.arange(shape[0]))


def test_rows_without_neighbours_keep_their_order():
    assert torch.equal(rabbit(csr_of(sp.csr_array(np.eye(50)))).perm, torch.arange(50))


@pytest.mark.parametrize(
    "matrix",
    [np.ones((200_000, 1)), np.ones((1, 200_000))],
    ids=["one full column", "one full row"],
)
def test_a_popular_row_or_column_costs_no_more_than_its_entries(matrix):
    csr = csr_of(sp.csr_array(matrix))
    rabbit(csr).checked(csr.shape[0])  # all pairs of rows would not fit in memory


def test_more_vertices_than_32_bits_can_number_are_refused():
    rows = 2**31 - 5
    indptr = torch.zeros(1, dtype=torch.int64).expand(rows + 1)  # takes no memory
    csr = st.CSR(indptr, torch.arange(9, dtype=torch.int32), None, (rows, 9))
    with pytest.raises(ValueError) as caught:
        rabbit(csr)
    assert str(caught.value) == (
        "rabbit: A must be a matrix of fewer than 2**31 rows and columns together, "
        f'got {rows} rows and 9 columns. Plan it with reorder="identity".'
    )


def test_a_plan_takes_it_by_name():
    assert REORDERERS["rabbit"] is rabbit
    plan = st.plan(random_matrix(30, 30, 0.1), 4, device="cpu", reorder="rabbit")
    assert plan.info["reorder"] == "rabbit"
