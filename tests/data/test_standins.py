"""Stand-ins: names, sizes against the papers' tables, scaling, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsetile.data.standins import STAND_INS, stand_in
from tests.data.matrix_checks import assert_canonical, degrees, is_symmetric, same

names = pytest.mark.parametrize("name", STAND_INS)

# As the papers' tables print them.
PUBLISHED = {
    "reddit-like": (232_965, 114_848_857),
    "protein-like": (132_534, 79_255_038),
    "yelp-like": (717_000, 14_000_000),
    "yeasth-like": (3_138_114, 6_487_230),
    "roadnet-ca-like": (1_971_281, 5_533_214),
    "roadnet-pa-like": (1_090_920, 3_083_796),
    "ovcar-8h-like": (1_889_542, 3_946_402),
    "web-berkstan-like": (685_230, 7_600_595),
    "ogbn-arxiv-like": (169_000, 1_160_000),
    "flickr-like": (89_000, 899_000),
}


@names
def test_the_name_says_that_it_is_a_stand_in_and_where_its_size_comes_from(name):
    entry = STAND_INS[name]
    assert entry.name == name and name.endswith("-like") and "table" in entry.source


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_within_2_percent_of_the_published_ones(name):
    rows, nnz = PUBLISHED[name]
    assert STAND_INS[name].rows == pytest.approx(rows, rel=0.02)
    assert STAND_INS[name].nnz == pytest.approx(nnz, rel=0.02)


@pytest.mark.parametrize("name", [n for n, entry in STAND_INS.items() if entry.nnz < 2_500_000])
def test_small_stand_ins_have_their_size(name):
    entry, matrix = STAND_INS[name], stand_in(name)
    assert_canonical(matrix)
    assert matrix.shape == (entry.rows, entry.rows)
    assert abs(matrix.nnz - entry.nnz) <= 1


@names
def test_a_scaled_stand_in_keeps_the_mean_degree(name):
    entry = STAND_INS[name]
    # Small, but such that rows of that length fill less than half of the matrix.
    scale = max(0.02 if entry.nnz > 10_000_000 else 0.1, 3 * entry.nnz / entry.rows**2)
    matrix = stand_in(name, scale)
    assert_canonical(matrix)
    assert matrix.shape[0] == pytest.approx(entry.rows * scale, rel=0.02)
    assert matrix.nnz == pytest.approx(entry.nnz * scale, rel=0.02)
    assert is_symmetric(matrix) is bool(entry.params.get("symmetric", True))


@names
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e-3])
def test_a_tiny_scale_still_gives_a_matrix(name, scale):
    matrix = stand_in(name, scale)
    assert_canonical(matrix)
    assert matrix.shape[0] >= 1


@pytest.mark.parametrize(
    "name", [n for n, e in STAND_INS.items() if e.generator == "power_law" and e.nnz < 2_500_000]
)
def test_the_longest_row_is_near_the_one_set_and_far_above_the_mean(name):
    degree = degrees(stand_in(name))
    limit = STAND_INS[name].params["max_degree"]
    assert 0.5 * limit < degree.max() < 1.3 * limit
    assert degree.max() > 3 * degree.mean()


def test_the_seed_matters():
    assert same(stand_in("ppi-like", 0.1, seed=7), stand_in("ppi-like", 0.1, seed=7))
    assert not same(stand_in("ppi-like", 0.1, seed=7), stand_in("ppi-like", 0.1, seed=8))


def test_molecules_with_hydrogens_have_about_half_their_atoms_on_one_bond():
    share = np.mean(degrees(stand_in("yeasth-like", 0.02)) == 1)
    assert 0.4 < share < 0.6


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (0, "scale must be above 0, got 0"),
        (-1, "scale must be between 0 and 4, got -1"),
        (math.nan, "scale must be between 0 and 4, got nan"),
        (5, "scale must be between 0 and 4, got 5"),
    ],
)
def test_a_bad_scale_is_refused(scale, text):
    with pytest.raises(ValueError, match=f"^stand_in: {text}"):
        stand_in("ddi-like", scale)


def test_an_unknown_stand_in_is_refused():
    with pytest.raises(ValueError, match=r"^stand_in: name must be one of \['reddit-like'.*'redit"):
        stand_in("redit-like")
