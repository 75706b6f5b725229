"""Road grids and unions of molecules: shape, degrees, structure, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from sparsetile.data.graphs import molecules, road_grid
from tests.data.matrix_checks import assert_canonical, degrees, row_of


def components(matrix):
    ones = np.ones(matrix.nnz)
    graph = sp.csr_matrix((ones, matrix.indices.numpy(), matrix.indptr.numpy()), matrix.shape)
    return connected_components(graph, directed=False)


def test_roads_have_the_degrees_of_road_networks():
    degree = degrees(road_grid(40_000))
    assert degree.mean() == 2.6
    assert degree.max() <= 8
    share = np.bincount(degree, minlength=9) / degree.size
    assert share[0] < 0.02 and share[2] + share[3] > 0.65 and 0 < share[5:].sum() < 0.05


@pytest.mark.parametrize("mean_degree", [0.5, 2.1, 2.8, 3.5])
def test_roads_meet_the_mean_degree(mean_degree):
    assert road_grid(10_000, mean_degree=mean_degree).nnz == round(mean_degree * 5_000) * 2


def test_roads_lead_only_to_neighbours_on_the_grid():
    rows, width = 1000, 32
    matrix = road_grid(rows, diagonals=0.1)
    source, target = row_of(matrix), matrix.indices.numpy()
    across = np.abs(source // width - target // width)
    along = np.abs(source % width - target % width)
    assert across.max() <= 1 and along.max() <= 1
    assert np.count_nonzero((across == 1) & (along == 1)) == pytest.approx(
        0.1 * matrix.nnz, rel=0.02
    )


def test_roads_without_diagonals_cross_at_most_four_ways():
    assert degrees(road_grid(5_000, diagonals=0.0)).max() <= 4


def test_most_of_the_road_network_hangs_together():
    _, label = components(road_grid(20_000, mean_degree=2.8))
    assert np.bincount(label).max() > 0.8 * 20_000


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7])
def test_tiny_grids_hold_as_many_roads_as_they_can(rows):
    matrix = road_grid(rows, mean_degree=4.0, diagonals=0.0)
    assert_canonical(matrix)
    assert matrix.nnz <= 4 * rows
    if rows == 2:
        assert matrix.nnz == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mean_degree": -1}, "mean_degree must be between 0 and 4, got -1"),
        ({"mean_degree": 4.1}, "mean_degree must be between 0 and 4, got 4.1"),
        ({"mean_degree": math.nan}, "mean_degree must be between 0 and 4, got nan"),
        ({"diagonals": 2}, "diagonals must be between 0 and 1, got 2"),
    ],
)
def test_bad_road_parameters_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^road_grid: {text}"):
        road_grid(10, **change)


@pytest.mark.parametrize("hydrogens", [0.0, 0.45, 0.9])
def test_each_molecule_is_one_connected_block(hydrogens):
    matrix = molecules(300, atoms=20.5, hydrogens=hydrogens)
    assert matrix.shape == (6150, 6150)
    count, label = components(matrix)
    assert count == 300
    assert (np.diff(label) >= 0).all(), "blocks follow each other on the diagonal"


def test_molecules_resemble_yeast_by_default():
    degree = degrees(molecules(2_000))
    assert degree.mean() == pytest.approx(2.1, abs=1e-3)
    assert degree.min() == 1 and degree.max() <= 8


def test_hydrogens_have_one_bond_each_and_come_last():
    degree = degrees(molecules(1, atoms=40, spread=0.0, hydrogens=0.5, mean_degree=2.1))
    assert (degree[20:] == 1).all()
    assert degree[:20].mean() > 2.5


def test_longer_reach_and_higher_degree_resemble_contact_graphs():
    matrix = molecules(500, atoms=39.06, spread=0.8, mean_degree=3.73, reach=12)
    degree = degrees(matrix)
    assert matrix.shape[0] == 19_530
    assert degree.mean() == pytest.approx(3.73, abs=1e-3)
    assert np.abs(row_of(matrix) - matrix.indices.numpy()).max() <= 12


def test_sizes_spread_as_asked():
    even, label_even = components(molecules(200, atoms=30, spread=0.0))
    uneven, label_uneven = components(molecules(200, atoms=30, spread=1.0))
    assert even == uneven == 200
    assert np.bincount(label_even).std() < 1 < 10 < np.bincount(label_uneven).std()


def test_a_mean_degree_that_molecules_cannot_have_gives_the_nearest():
    chains = molecules(50, atoms=10, mean_degree=0)
    assert chains.nnz == 2 * (500 - 50)
    full = molecules(5, atoms=10, spread=0, mean_degree=99, reach=9)
    # Bonds to the previous atom or the one before it, and all at distances 3 to 9.
    assert full.nnz == 5 * 2 * (9 + sum(range(1, 8)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"atoms": 0.5}, "atoms must be a number of at least 1, got 0.5"),
        ({"spread": -1}, "spread must be between 0 and 3, got -1"),
        ({"mean_degree": math.inf}, "mean_degree must be a number of at least 0, got inf"),
        ({"hydrogens": 1.0}, "hydrogens must be between 0 and 0.9, got 1.0"),
        ({"reach": 0}, "reach must be at least 1, got 0"),
        ({"atoms": 1e9}, r"count \* atoms must be between 0 and 2147483647, got 3000000000"),
    ],
)
def test_bad_molecule_parameters_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^molecules: {text}"):
        molecules(3, **change)
