"""The data-affinity order on NumPy arrays; `affinity` describes it.

Single-threaded, integer arithmetic but for comparisons of gains, ties broken by the smaller
number: the same pattern gives the same order on every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.numba_cache import entry_point
from sparsetile.reorder.affinity_communities import leaves_by_community
from sparsetile.reorder.affinity_windows import filled_windows

__all__ = ["affinity_graph", "order_rows"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Numbers = NDArray[np.uint32]

# Casts: unsigned for an index, signed and wide for arithmetic.
_at: Any = np.uint64
_wide: Any = np.int64


@entry_point
def _symmetric(indptr: Longs, indices: Numbers, cursor: Longs) -> bool:
    """Return whether A equals its transpose; ``cursor`` is a copy of ``indptr`` and is overwritten.

    Rows come in order, so the next entry of column c must be the next entry of row c.
    """
    for i in range(indptr.size - 1):
        for e in range(_at(indptr[_at(i)]), _at(indptr[_at(i + 1)])):
            c = indices[e]
            k = cursor[c]
            if k >= indices.size or indices[_at(k)] != i:
                return False
            cursor[c] = k + 1
    for i in range(indptr.size - 1):  # noqa: SIM110 - compiled
        if cursor[i] != indptr[i + 1]:
            return False
    return True


@entry_point
def _transpose(indptr: Longs, indices: Numbers, pointers: Longs, rows: Numbers) -> None:
    """Write the rows of each column; ``pointers``, one more than there are columns, holds zeros."""
    for e in range(_at(indices.size)):
        pointers[_at(indices[e] + 1)] += 1
    for c in range(pointers.size - 1):
        pointers[_at(c + 1)] += pointers[_at(c)]
    for i in range(indptr.size - 1):
        for e in range(_at(indptr[_at(i)]), _at(indptr[_at(i + 1)])):
            c = indices[e]
            place = pointers[c]
            rows[_at(place)] = i
            pointers[c] = place + 1
    for c in range(pointers.size - 1, 0, -1):
        pointers[_at(c)] = pointers[_at(c - 1)]
    pointers[0] = 0


@entry_point
def _relabel(
    indptr: Longs, indices: Numbers, order: Numbers, label: Ints, pointers: Longs, labels: Numbers
) -> int:
    """Write A with rows in ``order``, columns numbered as they first occur; return their number.

    Neighbours in the order are then neighbours in memory for the following steps. ``label`` holds
    -1 for each column.
    """
    used, end = 0, 0
    pointers[0] = 0
    for p in range(order.size):
        row = order[_at(p)]
        for e in range(_at(indptr[row]), _at(indptr[_at(row + 1)])):
            c = indices[e]
            number = _wide(label[c])
            if number < 0:
                number = used
                label[c] = used
                used += 1
            labels[_at(end)] = number
            end += 1
        pointers[_at(p + 1)] = end
    return used


def affinity_graph(indptr: Longs, indices: Numbers, columns: int) -> tuple[Longs, Numbers]:
    """Return A if it is symmetric, else the graph of its rows and, after them, its columns."""
    rows, entries = indptr.size - 1, indices.size
    if rows == columns and _symmetric(indptr, indices, indptr.copy()):
        return indptr, indices
    pointers = np.zeros(rows + columns + 1, np.int64)
    neighbours = np.empty(2 * entries, np.uint32)
    _transpose(indptr, indices, pointers[rows:], neighbours[entries:])
    pointers[:rows] = indptr[:rows]
    pointers[rows:] += entries
    np.add(indices, np.uint32(rows), out=neighbours[:entries])
    return pointers, neighbours


def order_rows(indptr: Longs, indices: Ints, columns: int) -> Longs:
    """Return the order of the rows; rows without entries come last, in the given order."""
    numbers = indices.view(np.uint32)
    leaves = leaves_by_community(indptr, *affinity_graph(indptr, numbers, columns))
    walked = np.empty(leaves.size + 1, np.int64)
    labels = np.empty(indices.size, np.uint32)
    used = _relabel(indptr, numbers, leaves, np.full(columns, -1, np.int32), walked, labels)
    pointers = np.zeros(used + 1, np.int64)
    members = np.empty(indices.size, np.uint32)
    _transpose(walked, labels, pointers, members)
    order = filled_windows(walked, labels, pointers, members)
    empty = np.flatnonzero(indptr[1:] == indptr[:-1])
    return np.concatenate([leaves[order].astype(np.int64), empty])
