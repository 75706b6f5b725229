"""FEM blocks, bands, uniform noise, dense lines, pruned weights: structure and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsetile.data.matrices import (
    banded,
    fem_blocks,
    one_dense_column,
    one_dense_row,
    pruned_weights,
    random,
)
from tests.data.matrix_checks import assert_canonical, degrees, dense, row_of, same


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("dofs", [1, 2, 6])
def test_fem_is_made_of_full_square_blocks(dimensions, dofs):
    matrix = fem_blocks(50, dofs, dimensions=dimensions, drop=0.3)
    assert matrix.shape == (50 * dofs, 50 * dofs)
    blocks = dense(matrix).reshape(50, dofs, 50, dofs).sum(axis=(1, 3))
    assert set(np.unique(blocks)) == {0, dofs * dofs}
    assert (np.diagonal(blocks) > 0).all()


@pytest.mark.parametrize(("dimensions", "nodes", "neighbours"), [(2, 25, 9), (3, 27, 27)])
def test_a_whole_mesh_node_touches_all_around_it(dimensions, nodes, neighbours):
    degree = degrees(fem_blocks(nodes, 1, dimensions=dimensions, drop=0.0))
    assert degree[nodes // 2] == neighbours == degree.max()
    assert degree[0] == 2**dimensions


def test_dropping_all_mesh_edges_leaves_the_diagonal_blocks():
    assert fem_blocks(10, 3, drop=1.0).nnz == 10 * 9


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 9, 28])
def test_meshes_of_any_size_are_canonical(nodes):
    for dimensions in (2, 3):
        assert_canonical(fem_blocks(nodes, 2, dimensions=dimensions, drop=0.0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dofs": 0}, "dofs must be at least 1, got 0"),
        ({"dimensions": 1}, "dimensions must be 2 or 3, got 1"),
        ({"drop": -0.1}, "drop must be between 0 and 1, got -0.1"),
        ({"dofs": 10**9}, r"nodes \* dofs must be between 0 and 2147483647"),
    ],
)
def test_bad_fem_parameters_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^fem_blocks: {text}"):
        fem_blocks(**{"nodes": 10, **change})


def test_the_full_band_is_everything_within_the_bandwidth():
    row, column = np.indices((30, 30))
    assert (dense(banded(30, 4)) == (np.abs(row - column) <= 4)).all()
    assert (dense(banded(5, 99)) == np.ones((5, 5), dtype=bool)).all()
    assert (dense(banded(5, 0)) == np.eye(5, dtype=bool)).all()


def test_a_band_has_the_density_asked_for_and_nothing_outside():
    matrix = banded(2000, 10, 0.25)
    cells = 2000 * 21 - 10 * 11
    assert matrix.nnz == round(0.25 * cells)
    assert np.abs(row_of(matrix) - matrix.indices.numpy()).max() <= 10


@pytest.mark.parametrize("bad", [-0.1, 1.01, math.nan, math.inf])
def test_a_density_outside_0_to_1_is_refused(bad):
    with pytest.raises(ValueError, match=r"^banded: density must be between 0 and 1, got"):
        banded(10, 2, bad)
    with pytest.raises(ValueError, match=r"^random: density must be between 0 and 1, got"):
        random(10, 10, density=bad)


def test_a_negative_bandwidth_is_refused():
    with pytest.raises(ValueError, match=r"^banded: bandwidth must be between 0 and 2147483647"):
        banded(10, -1)


def test_more_nonzeros_than_can_be_indexed_are_refused():
    with pytest.raises(ValueError, match=r"^banded: nonzeros must be between 0 and 2147483647"):
        banded(100_000, 99_999, 0.9)


@pytest.mark.parametrize("nnz", [0, 1, 77, 399, 400])
def test_random_meets_its_count(nnz):
    matrix = random(20, 20, nnz=nnz)
    assert_canonical(matrix)
    assert matrix.nnz == nnz


def test_random_fills_every_cell_equally_often():
    hits = sum(dense(random(4, 6, nnz=6, seed=seed)).astype(int) for seed in range(800))
    # 800 draws of probability 1/4: five standard deviations are 61.
    assert np.abs(hits - 200).max() < 61


def test_random_takes_sizes_whose_cells_cannot_be_listed():
    matrix = random(3, 2**31 - 1, nnz=1000)
    assert_canonical(matrix)
    assert matrix.nnz == 1000


@pytest.mark.parametrize(("given", "got"), [({}, "neither"), ({"nnz": 1, "density": 0.5}, "both")])
def test_random_wants_density_or_nnz(given, got):
    with pytest.raises(
        ValueError, match=f"density or nnz must be given, one of the two, got {got}"
    ):
        random(3, 3, **given)


def test_random_refuses_more_nonzeros_than_cells():
    with pytest.raises(ValueError, match=r"^random: nnz must be at most rows \* cols = 9, got 10"):
        random(3, 3, nnz=10)


def test_one_row_is_full_and_the_others_are_short():
    degree = degrees(one_dense_row(1001, 300, background=4.0))
    assert degree[500] == 300
    assert np.delete(degree, 500).mean() == pytest.approx(4.0, abs=0.2)
    assert np.delete(degree, 500).max() < 25


def test_one_column_is_full_and_the_others_are_sparse():
    counts = np.bincount(one_dense_column(1000, 301).indices.numpy(), minlength=301)
    assert counts[150] == 1000
    assert np.delete(counts, 150).max() < 60


def test_the_dense_line_can_be_placed():
    assert degrees(one_dense_row(10, 50, dense_row=0, background=0)).tolist() == [50] + [0] * 9
    assert one_dense_column(10, 50, dense_column=49, background=0).indices.tolist() == [49] * 10


def test_a_background_beyond_the_row_fills_it():
    assert one_dense_row(4, 5, background=100).nnz == 20
    assert one_dense_column(4, 5, background=100).nnz == 20


@pytest.mark.parametrize(
    ("function", "argument"), [(one_dense_row, "dense_row"), (one_dense_column, "dense_column")]
)
def test_bad_dense_lines_are_refused(function, argument):
    with pytest.raises(
        ValueError, match=f"^{function.__name__}: {argument} must be below 4, got 4"
    ):
        function(4, 4, **{argument: 4})
    with pytest.raises(ValueError, match=f"^{function.__name__}: background must be a number of"):
        function(4, 4, background=math.nan)


@pytest.mark.parametrize("method", ["random", "magnitude"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_pruning_leaves_the_share_asked_for(method, sparsity):
    matrix = pruned_weights(128, 96, sparsity, method=method)
    assert_canonical(matrix)
    assert matrix.nnz == round((1 - sparsity) * 128 * 96)


@pytest.mark.parametrize("method", ["random", "magnitude"])
def test_block_pruning_keeps_whole_squares(method):
    matrix = pruned_weights(64, 96, 0.75, block=8, method=method)
    squares = dense(matrix).reshape(8, 8, 12, 8).sum(axis=(1, 3))
    assert set(np.unique(squares)) == {0, 64}
    assert np.count_nonzero(squares) == 24


def test_magnitude_pruning_keeps_more_in_some_rows_than_random_pruning_does():
    uneven = degrees(pruned_weights(512, 512, 0.9, method="magnitude")).std()
    even = degrees(pruned_weights(512, 512, 0.9, method="random")).std()
    assert uneven > 2 * even


def test_methods_differ():
    first, second = (pruned_weights(32, 32, 0.5, method=m) for m in ("random", "magnitude"))
    assert not same(first, second)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sparsity": 1.5}, "sparsity must be between 0 and 1, got 1.5"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"block": 3}, "out_features must be a multiple of block = 3, got 8"),
        ({"out_features": 9, "block": 3}, "in_features must be a multiple of block = 3, got 8"),
        ({"method": "topk"}, r"method must be one of \['random', 'magnitude'\], got 'topk'"),
        (
            {
                "out_features": 10**5,
                "in_features": 10**5,
                "sparsity": 1 - 1e-6,
                "method": "magnitude",
            },
            "number of blocks must be between 0 and 2147483647, got 10000000000",
        ),
    ],
)
def test_bad_pruning_parameters_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^pruned_weights: {text}"):
        pruned_weights(**{"out_features": 8, "in_features": 8, "sparsity": 0.5, **change})
