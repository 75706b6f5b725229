"""The split by cost: a dynamic program that finds the cheapest cover of the rows by windows.

It runs from the last row to the first. For NumPy, rows are cut into pieces, and all pieces take
each step together:

1. The costs at a piece's first rows are a (min, +) matrix times those behind the piece. Each piece
   finds its matrix without knowing the costs behind it.
2. From the last piece on, products with these matrices give the costs behind each piece.
3. With these, each piece finds the beginnings of its windows.

So 45 thousand rows take about 600 steps, and a plan need not import numba, which takes longer.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

__all__ = ["cheapest_windows", "least_cost"]

# Error of a sum relative to all costs: far above the rounding of a million rows.
_ROUNDING = 1e-9


def _rows_of_windows(alone: Any, window: int) -> Any:
    """Cost, outside of windows, of the rows of the window that begins at each row."""
    rows = alone.size
    before = np.zeros(rows + window)
    np.cumsum(alone, out=before[1 : rows + 1])
    before[rows + 1 :] = before[rows]
    return before[window:] - before[:rows]


def least_cost(alone: Any, together: Any, window: int) -> float:
    """A lower bound of the least cost, found in a few steps; see :func:`cheapest_windows`.

    A window's cost is shared among its rows in proportion to their own costs. Each row pays the
    least of its own cost and its shares of all windows that may contain it.
    """
    if not alone.size:
        return 0.0
    rows = _rows_of_windows(alone, window)
    share = np.full(rows.size + window - 1, np.inf)
    np.divide(together, rows, out=share[window - 1 :], where=rows > 0)
    width = 1  # neighbours of which this is the least
    while width < window:
        step = min(width, window - width)
        share, width = np.minimum(share[step:], share[:-step]), width + step
    return float((alone * np.minimum(share, 1.0)).sum()) * (1.0 - _ROUNDING)


def cheapest_windows(alone: Any, together: Any, window: int) -> Any:
    """Return at which rows the windows of the cheapest cover begin, as an array of bools.

    ``alone`` is the cost of each row outside of windows, ``together`` that of the window of
    ``window`` rows that begins at it; the last may have fewer.

    >>> import numpy as np
    >>> cheapest_windows(np.array([1.0, 1.0, 1.0, 1.0]), np.array([3.0, 1.5, 1.5, 3.0]), 2)
    array([False,  True, False, False])
    """
    rows = alone.size
    # Without a window cheaper than its own rows, no cover with windows is cheaper.
    if not (together < _rows_of_windows(alone, window) + _ROUNDING * alone.sum()).any():
        return np.zeros(rows, dtype=np.bool_)
    # Steps cost more than pieces.
    length = max(math.isqrt(rows // 2), window)
    count = -(-rows // length)
    past = (0, count * length - rows)  # padding rows, which cost nothing and begin no window
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
    """Return the costs from each of the ``window`` rows behind each piece, [window, pieces]."""
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
    """Drop windows that would begin inside the previous one."""
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
