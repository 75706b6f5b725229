"""``cheapest_windows`` compiled: for many rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetile.core.numba_cache import entry_point

__all__ = ["cheapest_windows"]


def _cheapest_windows(alone: Any, together: Any, window: int) -> Any:
    rows = alone.size
    best = np.zeros(rows + 1)
    opens = np.zeros(rows, dtype=np.bool_)
    for r in range(rows - 1, -1, -1):
        after = min(r + window, rows)
        opens[r] = together[r] + best[after] < alone[r] + best[r + 1]
        best[r] = together[r] + best[after] if opens[r] else alone[r] + best[r + 1]
    r = 0
    while r < rows:
        if opens[r]:
            after = min(r + window, rows)
            opens[r + 1 : after] = False
            r = after
        else:
            r += 1
    return opens


cheapest_windows = entry_point(_cheapest_windows)
