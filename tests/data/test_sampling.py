"""The sampling tools under the generators: uniform, distinct, sorted, in bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsetile.data.sampling import (
    csr_from_keys,
    distinct,
    distinct_integers,
    merge_disjoint,
    missing_from,
    real,
    symmetric_keys,
    without,
)
from tests.data.matrix_checks import assert_canonical, is_symmetric


@given(data=st.data(), total=st.integers(0, 300))
def test_distinct_integers_are_as_many_as_asked_sorted_and_in_range(data, total):
    count = data.draw(st.integers(0, total))
    drawn = distinct_integers(np.random.default_rng(count), total, count)
    assert drawn.size == count and (np.diff(drawn) > 0).all()
    assert count == 0 or (drawn[0] >= 0 and drawn[-1] < total)


@pytest.mark.parametrize("count", [3, 8])
def test_distinct_integers_are_uniform_when_few_and_when_many(count):
    rng = np.random.default_rng(0)
    hits = np.zeros(10)
    for _ in range(4000):
        hits[distinct_integers(rng, 10, count)] += 1
    # Six standard deviations of a binomial count.
    spread = 6 * (4000 * count / 10 * (1 - count / 10)) ** 0.5
    assert np.abs(hits - 400 * count).max() < spread


def test_distinct_integers_need_memory_for_the_count_alone():
    assert distinct_integers(np.random.default_rng(0), 2**62, 1000).size == 1000


keys = st.lists(st.integers(0, 60), unique=True).map(lambda items: np.array(sorted(items), int))


@given(keys, keys)
def test_missing_from_and_merge_are_set_difference_and_union(have, candidates):
    fresh = missing_from(have, candidates)
    assert fresh.tolist() == sorted(set(candidates.tolist()) - set(have.tolist()))
    union = merge_disjoint(have, fresh)
    assert union.tolist() == sorted(set(candidates.tolist()) | set(have.tolist()))


@given(st.lists(st.integers(0, 20)))
def test_distinct_is_the_sorted_set(items):
    assert distinct(np.array(items, dtype=np.int64)).tolist() == sorted(set(items))


@given(keys, st.data())
def test_without_drops_as_many_as_asked_and_keeps_order(items, data):
    excess = data.draw(st.integers(0, items.size))
    kept = without(items, excess, np.random.default_rng(0))
    assert kept.size == items.size - excess
    assert (np.diff(kept) > 0).all() and set(kept.tolist()) <= set(items.tolist())


def test_symmetric_keys_complete_the_pattern():
    rng = np.random.default_rng(0)
    upper = np.array([0 * 5 + 3, 2 * 5 + 4])
    bare = csr_from_keys(symmetric_keys(upper, 5), (5, 5), weighted=False, rng=rng)
    full = csr_from_keys(symmetric_keys(upper, 5, diagonal=True), (5, 5), weighted=False, rng=rng)
    for matrix, entries in ((bare, 4), (full, 9)):
        assert_canonical(matrix)
        assert is_symmetric(matrix) and matrix.nnz == entries


def test_real_refuses_what_is_no_number():
    with pytest.raises(TypeError, match=r"^f: x must be between 0 and 2, got True. Give a plain"):
        real("f", "x", True, 0, 2)
    assert real("f", "x", np.float32(1.5), 0, 2) == 1.5
