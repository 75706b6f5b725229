"""The data-affinity order: rows that share columns come together, at a bounded cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder import REORDERERS
from sparsetile.reorder import affinity_communities as communities_code
from sparsetile.reorder.affinity import affinity
from tests.contracts.cases import assert_close, csr_of, random_matrix


def communities(count: int, size: int, seed: int = 0) -> sp.csr_array:
    """A symmetric graph of shuffled communities: dense inside, a few edges between."""
    rng = np.random.default_rng(seed)
    rows = count * size
    inside = sp.block_diag([random_matrix(size, size, 0.3, seed=k) for k in range(count)])
    between = random_matrix(rows, rows, 1.0 / rows, seed=seed + 1000)
    graph = sp.csr_array(inside + between)
    shuffle = rng.permutation(rows)
    return sp.csr_array(graph + graph.T)[shuffle][:, shuffle]


def shared_columns(csr: st.CSR, window: int, perm: torch.Tensor | None = None) -> float:
    """Entries per distinct (window of rows, column) pair."""
    return csr.nnz / distinct_pairs(csr, window, perm)


@pytest.fixture(scope="module")
def graph() -> st.CSR:
    return csr_of(communities(40, 48), pattern=True)


@pytest.mark.parametrize("window, factor", [(8, 1.7), (64, 4.0)])
def test_the_windows_of_a_shuffled_community_graph_share_far_more_columns(graph, window, factor):
    before = shared_columns(graph, window)
    assert shared_columns(graph, window, affinity(graph).perm) > factor * before


def test_rows_of_a_community_come_next_to_each_other():
    """Blocks that share no column at all: each must be one run of the order."""
    block = np.ones((10, 10))
    shuffle = np.random.default_rng(1).permutation(80)
    matrix = sp.csr_array(sp.csr_array(sp.block_diag([block] * 8))[shuffle][:, shuffle])
    community = torch.from_numpy(shuffle // 10)[affinity(csr_of(matrix)).perm]
    assert int((community[1:] != community[:-1]).sum()) == 7


def test_the_8_row_windows_inside_64_rows_gather_like_rows():
    """Eight kinds of rows with a column common to all: one community, eight windows."""
    kinds = np.kron(np.eye(8), np.ones((8, 12)))
    kinds[:, 0] = 1
    shuffle = np.random.default_rng(2).permutation(64)
    csr = csr_of(sp.csr_array(kinds[shuffle]))
    kind = torch.from_numpy(shuffle // 8)[affinity(csr).perm].reshape(8, 8)
    assert bool((kind == kind[:, :1]).all())


@pytest.mark.parametrize("shape", [(1200, 300), (300, 1200)], ids=["tall", "wide"])
def test_rectangular_rows_are_ordered_by_the_columns_they_share(shape):
    rows, columns = shape
    blocks = [random_matrix(rows // 20, columns // 20, 0.6, seed=k) for k in range(20)]
    shuffle = np.random.default_rng(3).permutation(rows)
    csr = csr_of(sp.csr_array(sp.csr_array(sp.block_diag(blocks))[shuffle]))
    for window in (8, 64):
        after = shared_columns(csr, window, affinity(csr).perm)
        assert after > 2 * shared_columns(csr, window)


def test_an_unsymmetric_square_matrix_is_ordered_as_a_bipartite_graph():
    """Rows i and i+1 share all columns, none of which is i or i+1."""
    rows = 512
    pairs = np.repeat(np.arange(rows // 2), 2)
    columns = (rows // 2 + 7 * pairs[:, None] + np.arange(5)) % rows
    shuffle = np.random.default_rng(4).permutation(rows)
    matrix = sp.csr_array(
        (np.ones(rows * 5), columns[shuffle].ravel(), np.arange(0, rows * 5 + 1, 5)),
        shape=(rows, rows),
    )
    csr = csr_of(matrix)
    assert shared_columns(csr, 8, affinity(csr).perm) >= 2 > 1.2 * shared_columns(csr, 8)


def test_the_same_pattern_gives_the_same_order_whatever_its_values(graph):
    first = affinity(graph).perm
    weighted = graph.with_values(torch.randn(graph.nnz))
    assert torch.equal(first, affinity(weighted).perm)
    assert torch.equal(first, affinity(graph).perm)


def test_empty_rows_come_last_in_the_given_order():
    matrix = random_matrix(200, 90, 0.01)
    csr = csr_of(matrix)
    empty = torch.nonzero(csr.row_lengths() == 0).flatten()
    assert 0 < empty.numel() < 200
    assert torch.equal(affinity(csr).perm[-empty.numel() :], empty)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_matrix_without_entries_keeps_its_order(rows):
    order = affinity(csr_of(sp.csr_array((rows, rows)))).perm
    assert torch.equal(order, torch.arange(rows))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 63, 64, 65, 129])
def test_orders_any_number_of_rows_near_a_window_size(rows):
    csr = csr_of(random_matrix(rows, rows + 3, 0.2, seed=rows))
    assert torch.equal(affinity(csr).perm.sort().values, torch.arange(rows))


def star(leaves: int) -> sp.csr_array:
    """One vertex joined to all others."""
    ends = np.arange(1, leaves + 1)
    hub = np.zeros(leaves, dtype=np.int64)
    edges = (np.concatenate([hub, ends]), np.concatenate([ends, hub]))
    return sp.csr_array((np.ones(2 * leaves), edges), shape=(leaves + 1, leaves + 1))


def dense_row(size: int) -> sp.csr_array:
    edges = (np.concatenate([np.zeros(size, int), np.arange(size)]), np.tile(np.arange(size), 2))
    return sp.csr_array((np.ones(2 * size), edges), shape=(size, size))


HEAVY = {
    "star": lambda: star(300_000),
    "dense row": lambda: dense_row(300_000),
    "dense column": lambda: sp.csr_array(dense_row(300_000).T),
    "one full column": lambda: sp.csr_array(np.ones((300_000, 1))),
    "one full row": lambda: sp.csr_array(np.ones((1, 300_000))),
    "path": lambda: sp.csr_array(sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(300_000,) * 2)),
}


def hubs(size: int, count: int = 3) -> sp.csr_array:
    """A ring with a few vertices that are joined to all others."""
    ring = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(size, size)).tolil()
    ring[:count], ring[:, :count] = 1, 1
    return sp.csr_array(ring.tocsr())


HEAVY["hubs of all rows"] = lambda: hubs(60_000)
HEAVY["a hub and short rows, directed"] = lambda: sp.csr_array(
    sp.hstack([np.ones((60_000, 1)), sp.eye_array(60_000, 59_999)])
)


@pytest.mark.parametrize("name", HEAVY)
def test_popular_rows_and_columns_do_not_cost_the_square_of_their_entries(name):
    csr = csr_of(HEAVY[name]())
    affinity(csr_of(star(10)))  # compiles
    begun = time.perf_counter()
    found = affinity(csr)
    # 0.2 s on a free core; pairs of entries would take minutes.
    assert time.perf_counter() - begun < 20
    found.checked(csr.shape[0])


def test_many_rows_joined_by_a_few_hubs_stay_bounded():
    """Each window meets columns with far more rows than may be looked at."""
    rng = np.random.default_rng(5)
    columns = np.sort(rng.choice(50, size=(40_000, 1)) * 4 + np.arange(4), axis=1)
    matrix = sp.csr_array(
        (np.ones(columns.size), columns.ravel(), np.arange(0, columns.size + 1, 4)),
        shape=(40_000, 300),
    )
    csr = csr_of(matrix)
    begun = time.perf_counter()
    perm = affinity(csr).perm
    assert time.perf_counter() - begun < 20
    assert shared_columns(csr, 64, perm) > 10 * shared_columns(csr, 64)


@pytest.fixture(scope="module")
def merging(graph):
    """Return a function that builds the dendrogram of ``graph`` with given limits."""
    pointers, neighbours = graph.indptr.numpy(), graph.indices.numpy().view(np.uint32)
    rows = graph.shape[0]

    def merge(room, most):
        order, found, touched = (np.empty(rows + k, np.uint32) for k in (0, 0, 1))
        node, links = np.empty((2, rows, 4), np.uint32)
        place, pool = np.zeros(rows + 2, np.int64), np.empty((room, 2), np.uint32)
        communities_code._walk(
            pointers, pointers, neighbours, place, order, node, links, pool, touched, found, most
        )
        return node, links[:, communities_code._SIBLING]

    return merge


@pytest.mark.parametrize("room", [1, 64, 500])
def test_growing_the_pool_does_not_change_the_order(graph, merging, room):
    expected = merging(100 * graph.nnz, 100 * graph.nnz)
    for one, other in zip(expected, merging(room, 100 * graph.nnz), strict=True):
        assert np.array_equal(one, other)


def test_merging_stops_at_the_limit_of_its_work(graph, merging):
    free, bounded = merging(graph.nnz, 100 * graph.nnz)[0], merging(graph.nnz, 50)[0]
    rows = np.arange(graph.shape[0])
    roots = [int((node[:, 0] == rows).sum()) for node in (free, bounded)]
    assert roots[0] < 100 < roots[1] < graph.shape[0]


def test_memory_does_not_depend_on_empty_columns():
    columns = 2**31 - 10
    indices = torch.tensor([5, columns - 1, 5, columns - 1], dtype=torch.int32)
    csr = st.CSR(torch.tensor([0, 1, 2, 3, 4]), indices, None, (4, columns))
    order = affinity(csr).perm.tolist()
    assert [{i % 2 for i in order[:2]}, {i % 2 for i in order[2:]}] in ([{0}, {1}], [{1}, {0}])


@pytest.mark.parametrize("name", ["affinity", "rcm"])
def test_more_vertices_than_32_bits_can_number_are_refused(name):
    rows = 2**31 - 5
    indptr = torch.zeros(1, dtype=torch.int64).expand(rows + 1)  # takes no memory
    csr = st.CSR(indptr, torch.arange(9, dtype=torch.int32), None, (rows, 9))
    with pytest.raises(ValueError) as caught:
        REORDERERS[name](csr)
    assert str(caught.value) == (
        f"{name}: A must be a matrix of fewer than 2**31 rows and columns together, "
        f'got {rows} rows and 9 columns. Plan it with reorder="identity".'
    )


def test_a_plan_with_this_order_gives_the_same_product():
    csr = csr_of(communities(6, 20), dtype=torch.float64)
    B = torch.randn(csr.shape[1], 5, dtype=torch.float64)
    matrix = (csr.indptr, csr.indices, csr.values, csr.shape)
    plan = st.plan(matrix, 5, reorder="affinity")
    assert plan.info["reorder"] == "affinity"
    assert_close(plan @ B, csr, B)


def test_it_is_registered_by_name_but_not_what_auto_takes():
    assert REORDERERS["affinity"] is affinity
    matrix = random_matrix(30, 30, 0.1)
    assert st.plan(matrix, 4, device="cpu").info["reorder"] == "identity"
