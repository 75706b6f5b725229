"""Windows by cost: those of the search row by row, and the best of all ways for few rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparsetile.reorder.cheapest_windows import cheapest_windows, least_cost


def row_by_row(alone: np.ndarray, together: np.ndarray, window: int) -> np.ndarray:
    rows = alone.size
    best, opens = np.zeros(rows + 1), np.zeros(rows, dtype=bool)
    for r in reversed(range(rows)):
        joined = together[r] + best[min(r + window, rows)]
        opens[r] = joined < alone[r] + best[r + 1]
        best[r] = min(joined, alone[r] + best[r + 1])
    for r in range(rows):
        if opens[r]:
            opens[r + 1 : r + window] = False
    return opens


def costs(rows: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """In whole units of 1/1024, so that sums in any order are the same."""
    rng = np.random.default_rng(seed)
    alone = rng.uniform(0.5, 1.5, rows)
    if kind == "whole":  # ties everywhere
        return rng.integers(1, 3, rows).astype(float), rng.integers(5, 40, rows).astype(float)
    together = rng.uniform(8.0, 30.0, rows)
    if kind == "few":
        together += 30.0 * (rng.random(rows) > 0.01)
    if kind == "parts":  # stretches where windows pay, far apart
        together += 30.0 * (np.arange(rows) // 200 % 2)
    if kind == "none":
        together += 100.0
    if kind == "free":
        together *= 0.0
    return np.round(alone * 1024) / 1024, np.round(together * 1024) / 1024


@pytest.mark.parametrize("kind", ["many", "few", "parts", "none", "whole", "free"])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 31, 32, 33, 100, 3001])
def test_pieces_agree_with_a_row_by_row_search(kind: str, rows: int):
    for seed, window in itertools.product(range(3), (2, 8, 16)):
        alone, together = costs(rows, kind, seed)
        found = cheapest_windows(alone, together, window)
        np.testing.assert_array_equal(found, row_by_row(alone, together, window))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cover_is_cheaper(seed: int):
    rows, window = 11, 3
    alone, together = costs(rows, "many", seed)
    together /= 8.0
    least = np.inf
    for starts in itertools.product((False, True), repeat=rows):
        begins = np.flatnonzero(starts)
        if begins.size < 2 or np.diff(begins).min() >= window:
            least = min(least, cost_of(begins, alone, together, window))
    found = np.flatnonzero(cheapest_windows(alone, together, window))
    assert cost_of(found, alone, together, window) == pytest.approx(least)


def cost_of(begins: np.ndarray, alone: np.ndarray, together: np.ndarray, window: int) -> float:
    left = np.ones(alone.size, dtype=bool)
    for begin in begins:
        left[begin : begin + window] = False
    return float(alone[left].sum() + together[begins].sum())


@pytest.mark.parametrize("kind", ["many", "few", "parts", "none", "whole", "free"])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 100, 3001])
def test_no_cover_costs_less_than_the_bound(kind: str, rows: int):
    for seed, window in itertools.product(range(3), (1, 2, 7, 16)):
        alone, together = costs(rows, kind, seed)
        begins = np.flatnonzero(cheapest_windows(alone, together, window))
        bound = least_cost(alone, together, window)
        assert bound <= cost_of(begins, alone, together, window) + 1e-12
        if kind == "none":
            assert bound == pytest.approx(alone.sum())


def test_the_bound_is_tight_if_all_windows_are_equal():
    rows = np.full(64, 2.0)
    assert least_cost(rows, np.full(64, 4.0), 8) == pytest.approx(8 * 4.0)
    assert least_cost(rows, np.full(64, 20.0), 8) == pytest.approx(64 * 2.0)
    rows[8:] = 0.1  # the first window alone pays
    together = np.array([4.0] + [20.0] * 63)
    assert least_cost(rows, together, 8) == pytest.approx(4.0 + 56 * 0.1)


def test_numba_is_not_loaded(interpreter):
    program = (
        "import sys, numpy as np\n"
        "from sparsetile.reorder.cheapest_windows import cheapest_windows\n"
        "assert cheapest_windows(np.ones(64), np.full(64, 4.0), 16).sum() == 4\n"
        "assert 'numba' not in sys.modules\n"
    )
    done = interpreter(program)
    assert done.returncode == 0, done.stderr
