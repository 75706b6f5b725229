"""Power-law graphs: counts, degree shape, communities, directions, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetile.data.powerlaw import power_law
from tests.data.matrix_checks import assert_canonical, degrees, dense, is_symmetric, row_of


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("self_loops", [True, False])
def test_nonzeros_are_met_exactly(symmetric, self_loops):
    matrix = power_law(3000, 40_000, symmetric=symmetric, self_loops=self_loops)
    assert matrix.nnz == 40_000
    diagonal = np.count_nonzero(row_of(matrix) == matrix.indices.numpy())
    assert diagonal == (3000 if self_loops else 0)
    assert is_symmetric(matrix) is symmetric


def test_an_odd_number_of_nonzeros_loses_one_where_symmetry_needs_it():
    assert power_law(100, 501).nnz == 500
    assert power_law(100, 501, symmetric=False).nnz == 501


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(0, 40), symmetric=st.booleans(), loops=st.booleans())
def test_any_attainable_count_is_met(data, rows, symmetric, loops):
    low = rows if loops else 0
    nnz = data.draw(st.integers(low, max(rows * (rows - 1), 0) + low))
    mixing = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    matrix = power_law(rows, nnz, symmetric=symmetric, self_loops=loops, mixing=mixing, seed=nnz)
    assert_canonical(matrix)
    lost = (nnz - low) % 2 if symmetric else 0
    assert matrix.nnz == nnz - lost


def test_the_complete_graph_can_be_asked_for():
    matrix = power_law(30, 30 * 29)
    assert (dense(matrix) == ~np.eye(30, dtype=bool)).all()


def test_degrees_fall_as_a_power_law():
    matrix = power_law(100_000, 1_000_000, exponent=2.2, seed=1)
    degree = np.sort(degrees(matrix))[::-1]
    assert degree[0] > 50 * degree.mean()
    assert np.median(degree) < degree.mean()
    # Between ranks 100 and 10,000 the logarithm falls by about 1/(exponent-1) per decade.
    slope = math.log(degree[100] / degree[10_000]) / math.log(10_000 / 100)
    assert abs(slope - 1 / 1.2) < 0.15


def test_a_larger_exponent_makes_smaller_hubs():
    small = degrees(power_law(20_000, 200_000, exponent=3.5)).max()
    large = degrees(power_law(20_000, 200_000, exponent=2.1)).max()
    assert large > 2 * small


def test_exponent_2_works_where_the_sum_is_a_logarithm():
    degree = degrees(power_law(20_000, 200_000, exponent=2.0))
    assert degree.max() > 50 * degree.mean()


def test_max_degree_bounds_the_hubs():
    degree = degrees(power_law(20_000, 400_000, max_degree=300))
    assert 200 < degree.max() < 400


def test_max_degree_near_the_mean_gives_nearly_equal_rows():
    degree = degrees(power_law(5_000, 100_000, max_degree=20))
    assert degree.max() < 3 * degree.mean()


def test_directed_graphs_have_power_laws_both_ways():
    matrix = power_law(20_000, 200_000, symmetric=False)
    incoming = np.bincount(matrix.indices.numpy(), minlength=20_000)
    outgoing = degrees(matrix)
    assert incoming.max() > 30 * incoming.mean() and outgoing.max() > 30 * outgoing.mean()
    assert abs(np.corrcoef(incoming, outgoing)[0, 1]) < 0.2


def far_share(matrix, communities):
    """Share of edges between nodes further apart than the largest community is wide."""
    rows = matrix.shape[0]
    largest = rows / sum(1 / math.sqrt(rank) for rank in range(1, communities + 1))
    return np.mean(np.abs(row_of(matrix) - matrix.indices.numpy()) > largest + 1)


def test_unshuffled_communities_are_contiguous_and_mixing_is_the_share_that_leaves():
    params = {"rows": 20_000, "nnz": 200_000, "communities": 100, "max_degree": 50}
    inside = far_share(power_law(**params, mixing=0.0, shuffle=False), 100)
    some = far_share(power_law(**params, mixing=0.3, shuffle=False), 100)
    all_of_it = far_share(power_law(**params, mixing=1.0, shuffle=False), 100)
    assert inside < 0.01
    assert 0.2 < some < 0.35
    assert all_of_it > 0.8


def test_shuffling_scatters_communities():
    params = {"rows": 20_000, "nnz": 200_000, "communities": 100, "max_degree": 50}
    assert far_share(power_law(**params, mixing=0.0), 100) > 0.8


def test_communities_have_different_sizes_and_none_is_empty():
    from sparsetile.data.powerlaw import _community_bounds

    sizes = np.diff(_community_bounds(1000, 40))
    assert sizes.sum() == 1000 and sizes.min() >= 1 and sizes[0] > 4 * sizes[-1]
    assert (np.diff(_community_bounds(7, 7)) == 1).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nnz": -2}, "nnz must be between 0 and 2147483647, got -2"),
        ({"nnz": 91}, "nnz must be between 0 and 90 for 10 rows, got 91. Ask for fewer"),
        ({"self_loops": True, "nnz": 9}, "nnz must be between 10 and 100 for 10 rows, got 9"),
        ({"exponent": 1}, "exponent must be above 1, got 1.0"),
        ({"exponent": 0.5}, "exponent must be a number of at least 1, got 0.5"),
        ({"exponent": math.nan}, "exponent must be a number of at least 1, got nan"),
        ({"exponent": math.inf}, "exponent must be a number of at least 1, got inf"),
        ({"mixing": -0.1}, "mixing must be between 0 and 1, got -0.1"),
        ({"mixing": 1.1}, "mixing must be between 0 and 1, got 1.1"),
        ({"communities": 0}, "communities must be at least 1, got 0"),
        ({"communities": 11}, r"communities must be at most 10 \(rows\), got 11"),
        ({"max_degree": 0}, "max_degree must be at least 1, got 0"),
        ({"max_degree": 1}, r"max_degree must be at least the mean degree 2.0, got 1. Raise it"),
    ],
)
def test_bad_parameters_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^power_law: {text}"):
        power_law(**{"rows": 10, "nnz": 20, **change})


def test_text_instead_of_a_number_is_a_type_error():
    with pytest.raises(TypeError, match=r"^power_law: mixing must be between 0 and 1, got '0.3'"):
        power_law(10, 20, mixing="0.3")
