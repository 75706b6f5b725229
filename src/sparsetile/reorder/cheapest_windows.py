"""The sequential part of the split by cost: where windows begin on the cheapest way through rows.

In Python while that is quicker than loading numba, which took 1.1 s of the first plan of a process
on an H200's host (cProfile, PubMed): windows can only begin where they cost less than their rows
alone, and everything between such rows is added up by NumPy. Both ways add the same numbers in the
same order, so that they agree to the last bit.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

__all__ = ["cheapest_windows"]

# Rows that a process walks through in Python, at about 0.4 us each, before numba is loaded.
MOST_ROWS = 1_000_000
# Rows between two that may begin windows from which on NumPy adds them up.
_GAP = 64
# Share of all costs that a sum may be off by: far above what rounding does to a million rows.
_ROUNDING = 1e-9

_COMPILED = "sparsetile.reorder.cheapest_windows_numba"
_walked = 0
_lock = threading.Lock()


def cheapest_windows(alone: Any, together: Any, window: int) -> Any:
    """Return where windows begin on the cheapest way through the rows, as an array of bools.

    Parameters
    ----------
    alone, together : array of float64 [rows]
        Cost of each row outside of windows, and of the window that begins at it.
    window : int
        Rows of a window; the last may have fewer.

    Examples
    --------
    >>> import numpy as np
    >>> cheapest_windows(np.array([1.0, 1.0, 1.0, 1.0]), np.array([3.0, 1.5, 1.5, 3.0]), 2)
    array([False,  True, False, False])
    """
    global _walked
    if _COMPILED in sys.modules:
        return _compiled(alone, together, window)
    runs = _runs(alone, together, window)
    rows = sum(last - first + 1 for first, last in runs)
    with _lock:
        _walked += rows
        walked = _walked
    if walked > MOST_ROWS:
        return _compiled(alone, together, window)
    return _by_runs(alone, together, window, runs)


def _compiled(alone: Any, together: Any, window: int) -> Any:
    from sparsetile.reorder.cheapest_windows_numba import cheapest_windows as compiled

    return compiled(alone, together, window)


def _runs(alone: Any, together: Any, window: int) -> list[tuple[int, int]]:
    """Return the first and last row of each run in which windows may begin.

    Of two ways through the rows behind r the one that may begin a window earlier is no dearer, so
    that a window at r has to cost less than its own rows alone.
    """
    rows = alone.size
    before = np.concatenate([[0.0], np.cumsum(alone)])
    after = np.minimum(np.arange(rows) + window, rows)
    saves = before[after] - before[:-1] - together
    may = np.flatnonzero(saves > -_ROUNDING * before[-1])
    if not may.size:
        return []
    ends = np.flatnonzero(np.diff(may) > _GAP)
    firsts = may[np.concatenate([[0], ends + 1])]
    lasts = may[np.concatenate([ends, [may.size - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _by_runs(alone: Any, together: Any, window: int, runs: list[tuple[int, int]]) -> Any:
    rows = alone.size
    best, opens = np.zeros(rows + 1), np.zeros(rows, dtype=np.bool_)
    known = rows  # best[known:] is
    for first, last in reversed(runs):
        # Rows alone, from the last one on: each cost is added to the sum of those behind it.
        gap = np.concatenate([best[known : known + 1], alone[last + 1 : known][::-1]])
        best[last + 1 : known + 1] = np.add.accumulate(gap)[::-1]
        # Costs from the run's last row on to its first, after those of the window behind it. Behind
        # the last row nothing costs anything.
        behind = best[last + 1 : last + 1 + window][::-1].tolist()
        costs = [0.0] * (window - len(behind)) + behind
        begins, cost, add = list[bool](), costs[-1], costs.append
        own, windows = alone[first : last + 1][::-1], together[first : last + 1][::-1]
        for row, joined in zip(own.tolist(), windows.tolist(), strict=True):
            cost += row
            joined += costs[-window]
            begins.append(joined < cost)
            if joined < cost:
                cost = joined
            add(cost)
        best[first : last + 1] = costs[window:][::-1]
        opens[first : last + 1] = begins[::-1]
        known = first
    return _apart(opens, window)


def _apart(opens: Any, window: int) -> Any:
    """Leave out windows that would begin inside of the one before."""
    begins = np.flatnonzero(opens)
    if begins.size and (np.diff(begins) < window).any():
        free = 0
        for r in begins.tolist():
            if r < free:
                opens[r] = False
            else:
                free = r + window
    return opens
