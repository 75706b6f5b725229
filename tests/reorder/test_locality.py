"""The locality-aware order: a walk along the most similar rows, then refined, at a bounded cost."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.data.powerlaw import power_law
from sparsetile.formats import BitTCF
from sparsetile.reorder.locality import locality
from tests.contracts.cases import csr_of, random_matrix

module = importlib.import_module("sparsetile.reorder.locality")  # not the function of that name


def runs(labels: np.ndarray) -> int:
    """Number of runs of equal labels."""
    return 1 + int((labels[1:] != labels[:-1]).sum())


def tile_entries(csr: st.CSR, perm: torch.Tensor | None) -> float:
    return BitTCF.pack(csr, perm).mean_tile_entries


def weighted_jaccard(csr: st.CSR, alpha: float) -> np.ndarray:
    """Similarities of all pairs of rows, in float64."""
    pattern = np.zeros(csr.shape)
    rows = np.repeat(np.arange(csr.shape[0]), csr.row_lengths().numpy())
    pattern[rows, csr.indices.numpy()] = 1
    weighted = pattern * np.maximum(pattern.sum(axis=0), 1) ** -alpha
    total = weighted.sum(axis=1)
    common = weighted @ pattern.T
    return common / np.maximum(total[:, None] + total[None, :] - common, 1e-30)


def path_cost(csr: st.CSR, order: torch.Tensor, alpha: float = 0.25) -> float:
    """Return what the algorithm minimises: the dissimilarities of neighbours, summed."""
    order = order[csr.row_lengths()[order] > 0]
    return float((1 - weighted_jaccard(csr, alpha)[order[:-1], order[1:]]).sum())


def arrays_of(csr: st.CSR, alpha: float = 0.25) -> tuple[np.ndarray, ...]:
    """Return (indptr, indices, weight, total) as the steps take them."""
    indptr, indices = csr.indptr.numpy(), csr.indices.numpy()
    degree = np.maximum(np.bincount(indices, minlength=csr.shape[1]), 1)
    weight = (degree**-alpha).astype(np.float32)
    return indptr, indices, weight, np.add.reduceat(weight[indices], indptr[:-1])


def test_two_interleaved_groups_of_equal_rows_come_out_grouped():
    kinds = np.kron(np.eye(2), np.ones(12))
    kind = np.arange(64) % 2
    order = locality(csr_of(sp.csr_array(kinds[kind]))).perm.numpy()
    assert runs(kind) == 64
    assert runs(kind[order]) == 2


def test_rows_of_shuffled_groups_that_share_no_column_are_one_run_each():
    shuffle = np.random.default_rng(1).permutation(160)
    matrix = sp.csr_array(sp.block_diag([random_matrix(16, 20, 0.7, seed=k) for k in range(10)]))
    order = locality(csr_of(sp.csr_array(matrix[shuffle]))).perm.numpy()
    assert runs(shuffle[order] // 16) == 10


@pytest.mark.parametrize("shape", [(800, 200), (200, 800), (400, 400)])
def test_tiles_of_shuffled_blocks_hold_twice_as_many_entries(shape):
    rows, columns = shape
    blocks = [random_matrix(rows // 20, columns // 20, 0.6, seed=k) for k in range(20)]
    rng = np.random.default_rng(3)
    matrix = sp.csr_array(sp.block_diag(blocks))[rng.permutation(rows)][:, rng.permutation(columns)]
    csr = csr_of(sp.csr_array(matrix))
    assert tile_entries(csr, locality(csr).perm) > 2 * tile_entries(csr, None)


def test_rows_along_a_shuffled_band_are_walked_along_it():
    """Row i has columns i to i + 9: the tree is a path, entered where row 0 of the shuffle lies."""
    rows = np.arange(300)
    band = sp.csr_array((np.ones(3000), (np.repeat(rows, 10), (rows[:, None] + range(10)).ravel())))
    shuffle = np.random.default_rng(2).permutation(300)
    order = locality(csr_of(sp.csr_array(band[shuffle]))).perm.numpy()
    steps = np.abs(np.diff(shuffle[order]))
    assert (steps == 1).sum() >= 290


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_neighbours_are_those_of_largest_weighted_jaccard_similarity(alpha):
    csr = csr_of(random_matrix(120, 60, 0.1, seed=5))
    assert int(csr.row_lengths().min()) > 0
    nearest, similarity = module._nearest(*arrays_of(csr, alpha), 6)
    expected = weighted_jaccard(csr, alpha)
    np.fill_diagonal(expected, 0)
    best = -np.sort(-expected, axis=1)[:, :6]
    assert np.allclose(similarity, best, atol=1e-5)
    found = np.take_along_axis(expected, np.maximum(nearest, 0), axis=1) * (nearest >= 0)
    assert np.allclose(found, similarity, atol=1e-5)
    assert all(np.unique(row[row >= 0]).size == (row >= 0).sum() for row in nearest)


def test_a_rare_column_in_common_outweighs_two_popular_ones():
    """Row 0 shares one rare column with row 1 and two popular ones with row 2."""
    dense = np.zeros((30, 10))
    dense[0, [0, 1, 2]] = 1
    dense[1, [0, 3, 4]] = 1
    dense[2:, [1, 2]] = 1
    dense[2, 5] = 1
    csr = csr_of(sp.csr_array(dense))
    best = {a: int(module._nearest(*arrays_of(csr, a), 1)[0][0, 0]) for a in (0.0, 2.0)}
    assert best[0.0] != 1 and best[2.0] == 1
    assert 1 in np.abs(np.diff(np.flatnonzero(locality(csr, alpha=2.0).perm.numpy() <= 1)))


def test_a_popular_column_gives_a_row_only_the_rows_around_it(constants):
    csr = csr_of(sp.csr_array(np.ones((100, 1))))
    constants(module, BOUND_LEAST=6, BOUND_MOST=6)
    nearest, similarity = module._nearest(*arrays_of(csr), 100)
    known = nearest >= 0
    distance = np.where(known, np.abs(nearest - np.arange(100)[:, None]), 0)
    assert distance.max() == 3
    assert (known.sum(axis=1)[3:-3] == 6).all() and (similarity[known] == 1).all()


@pytest.mark.parametrize(
    "matrix",
    [np.ones((200_000, 1)), np.ones((1, 200_000))],
    ids=["one full column", "one full row"],
)
def test_a_popular_row_or_column_costs_a_bounded_time_per_entry(matrix):
    csr = csr_of(sp.csr_array(matrix))
    locality(csr).checked(csr.shape[0])  # all pairs of rows would take minutes


@pytest.mark.parametrize("seed", range(3))
def test_two_opt_lowers_the_dissimilarity_of_neighbours(seed):
    csr = csr_of(random_matrix(300, 80, 0.08, seed=seed))
    walked = locality(csr, two_opt=False, isolation=False).perm
    refined = locality(csr, isolation=False).perm
    assert path_cost(csr, refined) < 0.99 * path_cost(csr, walked)


def test_two_opt_moves_rows_across_the_borders_of_the_kernels_windows():
    """Exchanges inside the windows of 8 rows that become tiles would change no tile."""
    csr = csr_of(random_matrix(300, 80, 0.08))
    walked = locality(csr, two_opt=False, isolation=False).perm.numpy()
    refined = locality(csr, isolation=False).perm.numpy()
    window = np.empty(300, int)
    window[walked] = np.arange(300) // 8
    assert (window[refined] != np.arange(300) // 8).any()


def test_two_opt_sorts_a_shuffled_window():
    from sparsetile.reorder.locality_numba import refine_windows

    rows = np.arange(8)
    band = sp.csr_array((np.ones(40), (np.repeat(rows, 5), (rows[:, None] + range(5)).ravel())))
    indptr, indices, weight, total = arrays_of(csr_of(band), 0.0)
    order = np.array([0, 3, 2, 1, 4, 6, 5, 7], np.int32)
    mark = np.zeros(12, np.float32)
    refine_windows(indptr, indices, weight, total, mark, 8, 8, order)
    assert order.tolist() == list(range(8))
    assert not mark.any()


def three_groups_and_a_row_without_match() -> st.CSR:
    """Rows 0 to 3, 4 to 7 and 8 to 11 are alike; row 12 has a column of its own."""
    return csr_of(sp.csr_array(sp.block_diag([np.ones((4, 6))] * 3 + [np.ones((1, 1))])))


def joined(csr: st.CSR, order: list[int]) -> list[int]:
    arrays = arrays_of(csr)
    near = module._nearest(*arrays, 8)
    mark = np.zeros(csr.shape[1], np.float32)
    return module._joined(*arrays, mark, *near, np.array(order, np.int32)).tolist()


def test_isolation_moves_a_lone_row_next_to_its_match():
    csr = three_groups_and_a_row_without_match()
    found = joined(csr, [0, 1, 2, 4, 5, 3, 6, 7, 8, 9, 10, 11, 12])
    assert found == [0, 3, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_isolation_moves_a_row_without_match_to_the_end():
    csr = three_groups_and_a_row_without_match()
    assert joined(csr, [0, 1, 12, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == list(range(13))


def test_isolation_leaves_a_row_whose_matches_are_all_isolated():
    csr = csr_of(sp.csr_array(sp.block_diag([np.ones((2, 6))] * 2)))
    assert joined(csr, [0, 2, 1, 3]) == [0, 2, 1, 3]


def test_each_refinement_can_be_switched_off():
    csr = csr_of(random_matrix(500, 200, 0.02))
    orders = {
        tuple(locality(csr, two_opt=two_opt, isolation=isolation).perm.tolist())
        for two_opt in (False, True)
        for isolation in (False, True)
    }
    assert len(orders) == 4


def test_siblings_with_smaller_subtrees_are_walked_first_then_nearer_ones():
    from sparsetile.reorder.locality_numba import walk_tree

    # 0 has children 1 (with child 4, which has child 5), 2 and 3; 7 and 6 are a tree of their own.
    left, right = np.array([[0, 1, 0, 4, 0, 7], [1, 4, 3, 5, 2, 6]], np.int32)
    order = np.empty(8, np.int32)
    work = [np.empty(8, np.int32) for _ in range(3)]
    walk_tree(
        left, right, np.zeros(9, np.int64), np.empty(12, np.int32), *work,
        np.zeros(10, np.int32), np.empty(8, np.int32), order,
    )  # fmt: skip
    assert order.tolist() == [0, 3, 2, 1, 4, 5, 6, 7]


def test_empty_rows_come_last_in_the_given_order():
    csr = csr_of(random_matrix(200, 90, 0.01))
    empty = torch.nonzero(csr.row_lengths() == 0).flatten()
    assert 0 < empty.numel() < 200
    assert torch.equal(locality(csr).perm[-empty.numel() :], empty)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (5, 0), (5, 5)])
def test_a_matrix_without_entries_keeps_its_order(shape):
    assert torch.equal(locality(csr_of(sp.csr_array(shape))).perm, torch.arange(shape[0]))


def test_rows_that_share_no_column_keep_their_order():
    assert torch.equal(locality(csr_of(sp.csr_array(np.eye(50)))).perm, torch.arange(50))


@pytest.mark.parametrize("alpha, neighbours", [(1000.0, 8), (0.0, 1), (0.25, 10_000)])
def test_extreme_parameters_give_an_order(alpha, neighbours):
    """At alpha = 1000 weights vanish in floating point."""
    csr = csr_of(random_matrix(300, 40, 0.2))
    locality(csr, alpha=alpha, neighbours=neighbours).checked(300)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"alpha": -0.5}, "alpha must be a finite number >= 0, got -0.5. Omit alpha."),
        ({"alpha": float("nan")}, "alpha must be a finite number >= 0, got nan. Omit alpha."),
        ({"neighbours": 0}, "neighbours must be >= 1, got 0. Omit neighbours."),
    ],
)
def test_rejects_parameters_out_of_range(options, text):
    with pytest.raises(ValueError) as caught:
        locality(csr_of(random_matrix(9, 9, 0.3)), **options)
    assert str(caught.value) == f"locality: {text}"


def test_more_vertices_than_32_bits_can_number_are_refused():
    rows = 2**31 - 5
    indptr = torch.zeros(1, dtype=torch.int64).expand(rows + 1)  # takes no memory
    csr = st.CSR(indptr, torch.arange(9, dtype=torch.int32), None, (rows, 9))
    with pytest.raises(ValueError, match="locality: A must be a matrix of fewer than"):
        locality(csr)


def orders_of_graphs() -> str:
    """Digest of the orders of a symmetric and of a directed graph."""
    orders = (locality(power_law(5000, 60000, seed=3, symmetric=s)).perm for s in (True, False))
    return hashlib.sha256(b"".join(order.numpy().tobytes() for order in orders)).hexdigest()


def test_another_process_with_another_number_of_threads_finds_the_same_orders(interpreter):
    code = (
        "torch.set_num_threads(1)\n"
        "from tests.reorder.test_locality import *; print(orders_of_graphs())"
    )
    done = interpreter(
        f"import torch; {code}", path=(str(Path(__file__).parents[2]),), NUMBA_NUM_THREADS="1"
    )
    assert done.stdout.strip() == orders_of_graphs(), done.stderr


def test_values_do_not_change_the_order():
    csr = csr_of(random_matrix(500, 500, 0.01))
    assert torch.equal(locality(csr).perm, locality(csr.with_values(None)).perm)
