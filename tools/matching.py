"""Maximum matchings of bipartite graphs, by Hopcroft and Karp, for tools/exchange_volumes.py.

scipy's takes minutes on graphs cut from meshes; this one starts from a greedy matching and searches
without recursion.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["matching_size"]

_FAR = np.int64(2**62)


@numba.njit(cache=False)  # type: ignore[untyped-decorator]
def matching_size(
    indptr: NDArray[np.int64], indices: NDArray[np.int64], right: int
) -> int:  # fmt: skip
    """Return the size of a maximum matching of a graph given as CSR, with ``right`` columns."""
    left = indptr.size - 1
    of_left, of_right = np.full(left, -1), np.full(right, -1)
    size = 0
    for u in range(left):
        for at in range(indptr[u], indptr[u + 1]):
            if of_right[indices[at]] < 0:
                of_left[u], of_right[indices[at]] = indices[at], u
                size += 1
                break
    distance, queue = np.empty(left, np.int64), np.empty(left, np.int64)
    next_edge, path, taken = np.empty(left, np.int64), np.empty(left, np.int64), of_left.copy()
    while True:
        # Layers of alternating paths from rows without a partner.
        begin = end = 0
        for u in range(left):
            next_edge[u], distance[u] = indptr[u], _FAR
            if of_left[u] < 0:
                distance[u], queue[end] = 0, u
                end += 1
        found = False
        while begin < end:
            u = queue[begin]
            begin += 1
            for at in range(indptr[u], indptr[u + 1]):
                other = of_right[indices[at]]
                if other < 0:
                    found = True
                elif distance[other] == _FAR:
                    distance[other], queue[end] = distance[u] + 1, other
                    end += 1
        if not found:
            return size
        for root in range(left):
            if of_left[root] >= 0:
                continue
            top = 0
            path[0] = root
            while top >= 0:
                u = path[top]
                if next_edge[u] == indptr[u + 1]:
                    top -= 1
                    continue
                column = indices[next_edge[u]]
                next_edge[u] += 1
                other = of_right[column]
                taken[top] = column
                if other < 0:
                    for level in range(top + 1):
                        of_left[path[level]] = taken[level]
                        of_right[taken[level]] = path[level]
                    size += 1
                    break
                if distance[other] == distance[u] + 1:
                    top += 1
                    path[top] = other
