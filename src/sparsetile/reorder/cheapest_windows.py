"""The sequential part of the split by cost: where windows begin on the cheapest way through rows.

A dynamic program from the last row to the first. To run in NumPy, rows are cut into pieces, and all
pieces take each step together:

1. The costs at a piece's first rows are a matrix times those behind the piece, in the (min, +)
   algebra. Each piece finds its matrix without those behind it.
2. From the last piece on, products with these matrices give the costs behind each piece.
3. With these, each piece finds where its windows begin.

So 45 thousand rows take about 600 steps, and no compiler: loading numba took 1.1 s of the first
plan of a process on an H200's host (cProfile, PubMed).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

__all__ = ["cheapest_windows", "least_cost"]

# Share of all costs that a sum may be off by: far above what rounding does to a million rows.
_ROUNDING = 1e-9


def _rows_of_windows(alone: Any, window: int) -> Any:
    """What the rows of the window that begins at each row cost alone."""
    rows = alone.size
    before = np.zeros(rows + window)
    np.cumsum(alone, out=before[1 : rows + 1])
    before[rows + 1 :] = before[rows]
    return before[window:] - before[:rows]


def least_cost(alone: Any, together: Any, window: int) -> float:
    """A bound below the cost of the cheapest way, found in a few steps.

    A window's cost is shared among its rows in the proportion of their own costs, and each row
    pays the least of its own and its shares of all windows that it could be in.

    Parameters
    ----------
    alone, together : array of float64 [rows]
        As for :func:`cheapest_windows`.
    """
    if not alone.size:
        return 0.0
    rows = _rows_of_windows(alone, window)
    share = np.full(rows.size + window - 1, np.inf)
    np.divide(together, rows, out=share[window - 1 :], where=rows > 0)
    width = 1  # least of so many neighbours
    while width < window:
        step = min(width, window - width)
        share, width = np.minimum(share[step:], share[:-step]), width + step
    return float((alone * np.minimum(share, 1.0)).sum()) * (1.0 - _ROUNDING)


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
    rows = alone.size
    # A window that costs no less than its own rows alone is on no cheaper way.
    if not (together < _rows_of_windows(alone, window) + _ROUNDING * alone.sum()).any():
        return np.zeros(rows, dtype=np.bool_)
    # Steps cost more than pieces.
    length = max(math.isqrt(rows // 2), window)
    count = -(-rows // length)
    past = (0, count * length - rows)  # rows that cost nothing and begin no window
    own = _by_step(np.pad(alone, past), length)
    windows = _by_step(np.pad(together, past, constant_values=np.inf), length)
    behind = _behind(own, windows, window)
    begins, best = np.empty((length, count), dtype=np.bool_), deque(behind, maxlen=window)
    for row in range(length - 1, -1, -1):
        apart, joined = own[row] + best[0], windows[row] + best[-1]
        np.less(joined, apart, out=begins[row])
        best.appendleft(np.minimum(apart, joined))
    return _apart(begins.T.reshape(-1)[:rows], window)


def _by_step(costs: Any, length: int) -> Any:
    """Costs of the rows of all pieces, step by step."""
    return np.ascontiguousarray(costs.reshape(-1, length).T)


def _behind(own: Any, windows: Any, window: int) -> Any:
    """Return the costs from each of the ``window`` rows behind each piece on, [window, pieces]."""
    length, count = own.shape
    # The matrices' columns: as if only the k-th row behind a piece could be reached, [k, 1].
    columns = np.where(np.eye(window, dtype=np.bool_), 0.0, np.inf)[..., None]
    best = deque(columns, maxlen=window)
    for row in range(length - 1, -1, -1):
        best.appendleft(np.minimum(own[row] + best[0], windows[row] + best[-1]))
    matrices = np.ascontiguousarray(np.stack(list(best)).transpose(2, 0, 1))
    found = np.zeros((count, window))
    for piece in range(count - 1, 0, -1):
        found[piece - 1] = (matrices[piece] + found[piece]).min(1)
    return np.ascontiguousarray(found.T)


def _apart(begins: Any, window: int) -> Any:
    """Leave out windows that would begin inside of the one before."""
    rows = begins.size
    places, seen = np.flatnonzero(begins), np.cumsum(begins)
    after = seen[np.minimum(places + window, rows) - 1].tolist()  # first window behind each
    kept, at = [], 0
    while at < len(after):
        kept.append(at)
        at = after[at]
    opens = np.zeros(rows, dtype=np.bool_)
    opens[places[kept]] = True
    return opens
