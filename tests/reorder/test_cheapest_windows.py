"""Windows by cost: the same by Python and compiled, and the best of all ways for few rows."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from sparsetile.reorder import cheapest_windows as module
from sparsetile.reorder.cheapest_windows import _by_runs, _runs, cheapest_windows
from sparsetile.reorder.cheapest_windows_numba import cheapest_windows as compiled


def in_python(alone: np.ndarray, together: np.ndarray, window: int) -> np.ndarray:
    return _by_runs(alone, together, window, _runs(alone, together, window))


def costs(rows: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
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
    return alone, together * (0.0 if kind == "free" else 1.0)


@pytest.mark.parametrize("kind", ["many", "few", "parts", "none", "whole", "free"])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 100, 3001])
def test_both_ways_agree_to_the_last_bit(kind: str, rows: int):
    for seed, window in itertools.product(range(3), (2, 16)):
        alone, together = costs(rows, kind, seed)
        np.testing.assert_array_equal(
            in_python(alone, together, window), compiled(alone, together, window)
        )


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_is_cheaper(seed: int):
    rows, window = 11, 3
    alone, together = costs(rows, "many", seed)
    together /= 8.0
    least = np.inf
    for starts in itertools.product((False, True), repeat=rows):
        begins = np.flatnonzero(starts)
        if begins.size < 2 or np.diff(begins).min() >= window:
            least = min(least, cost_of(begins, alone, together, window))
    found = np.flatnonzero(in_python(alone, together, window))
    assert cost_of(found, alone, together, window) == pytest.approx(least)


def cost_of(begins: np.ndarray, alone: np.ndarray, together: np.ndarray, window: int) -> float:
    left = np.ones(alone.size, dtype=bool)
    for begin in begins:
        left[begin : begin + window] = False
    return float(alone[left].sum() + together[begins].sum())


def test_many_rows_are_left_to_compiled_code(monkeypatch: pytest.MonkeyPatch):
    alone, together = costs(500, "many", 0)
    monkeypatch.setattr(module, "_COMPILED", "a module that nobody loaded")
    asked: list[int] = []
    monkeypatch.setattr(
        module, "_compiled", lambda *given: asked.append(given[0].size) or compiled(*given)
    )
    monkeypatch.setattr(module, "_walked", 0)
    monkeypatch.setattr(module, "MOST_ROWS", 1200)
    found = [cheapest_windows(alone, together, 16) for _ in range(3)]
    assert asked == [500], "two calls walk through 500 rows each"
    for each in found:
        np.testing.assert_array_equal(each, compiled(alone, together, 16))


def test_numba_is_not_loaded_for_few_rows():
    code = (
        "import sys, numpy as np\n"
        "from sparsetile.reorder.cheapest_windows import cheapest_windows\n"
        "assert cheapest_windows(np.ones(64), np.full(64, 4.0), 16).sum() == 4\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
