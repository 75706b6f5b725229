"""A parallel numba loop over rows, as a baseline.

numba takes half a second to import, so this file is imported when the baseline is prepared. The
loop is compiled in each process, because numba's disk cache does not detect changed compiler flags.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["multiply", "use_threads"]


def use_threads(count: int) -> None:
    """Let the loop run on this many threads, or on all that numba has."""
    most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    numba.set_num_threads(min(count, most))


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def multiply(indptr: Any, indices: Any, values: Any, B: Any) -> Any:
    """Return A @ B, rows shared out among the threads by numba."""
    C = np.zeros((len(indptr) - 1, B.shape[1]), B.dtype)
    for i in numba.prange(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            for j in range(B.shape[1]):
                C[i, j] += values[e] * B[indices[e], j]
    return C
