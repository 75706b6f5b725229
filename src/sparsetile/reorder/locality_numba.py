"""Compiled steps of the locality order; `locality` describes them.

Single-threaded and without fast math: the same pattern gives the same bits on every run. Rows are
those with entries, numbered from 0. Arrays are made by NumPy, which requests large pages. Indices
are unsigned, because numba tests signed ones for being negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.numba_cache import entry_point, inlined

__all__ = ["adjacent_similarity", "nearest_rows", "refine_windows", "walk_tree"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

# Cast of an index.
_at: Any = np.uint64
# Gains below this are rounding.
_GAIN = 1e-6


@entry_point
def nearest_rows(
    indptr: Longs,
    indices: Ints,
    pointers: Longs,
    members: Ints,
    weight: Floats,
    total: Floats,
    bound: int,
    shared: Floats,
    met: Ints,
    nearest: Ints,
    similarity: Floats,
) -> None:
    """Write the rows most similar to each row, most similar first.

    ``pointers`` and ``members`` are the inverted index: the rows of each column, ascending. A
    column of more than ``bound`` rows gives a row only the ``bound`` rows around it in that list.
    ``shared`` [rows] holds zeros and sums the weight of the common columns; ``met`` has one element
    per row and one more; ``nearest`` and ``similarity`` are [rows, neighbours].
    """
    most = nearest.shape[1]
    half = bound // 2
    for r in range(indptr.size - 1):
        row = _at(r)
        count = 0
        for e in range(_at(indptr[row]), _at(indptr[_at(r + 1)])):
            c = _at(indices[e])
            begin, end = pointers[c], pointers[c + _at(1)]
            if end - begin > bound:
                low, high = begin, end - 1
                while low < high:  # find this row
                    middle = (low + high) >> 1
                    if members[_at(middle)] < r:
                        low = middle + 1
                    else:
                        high = middle
                begin, end = max(begin, low - half), min(end, low + half + 1)
            w = weight[c]
            for m in range(_at(begin), _at(end)):
                u = _at(members[m])
                before = shared[u]
                met[_at(count)] = u
                count += before == 0
                shared[u] = before + w
        shared[row] = 0
        mine = total[row]
        found, least = 0, np.float32(0)  # the similarity to beat
        for m in range(_at(count)):
            u = _at(met[m])
            common = shared[u]
            shared[u] = 0
            if common <= least * mine:  # the union has at least the weight of this row
                continue
            near = common / (mine + total[u] - common)
            if found == most and near <= least:
                continue
            found = min(found + 1, most)
            k = found - 1
            while k > 0 and similarity[row, _at(k - 1)] < near:
                similarity[row, _at(k)] = similarity[row, _at(k - 1)]
                nearest[row, _at(k)] = nearest[row, _at(k - 1)]
                k -= 1
            similarity[row, _at(k)] = near
            nearest[row, _at(k)] = u
            if found == most:
                least = similarity[row, _at(most - 1)]


@entry_point
def walk_tree(
    left: Ints,
    right: Ints,
    starts: Longs,
    linked: Ints,
    parent: Ints,
    queue: Ints,
    size: Ints,
    bucket: Ints,
    place: Ints,
    order: Ints,
) -> None:
    """Write the vertices of a forest depth first, the smallest of sibling subtrees first.

    Edges (left, right) come nearest first; siblings with equal subtrees are visited in that order.
    Trees begin at their first vertex and are in the order of those. No stack is needed: a vertex
    comes after its parent and the subtrees of earlier siblings. ``starts`` and ``bucket`` hold
    zeros, one and two more than there are vertices.
    """
    vertices = order.size
    for e in range(left.size):
        starts[_at(left[e])] += 1
        starts[_at(right[e])] += 1
    for v in range(vertices):
        starts[_at(v + 1)] += starts[_at(v)]
    for e in range(left.size - 1, -1, -1):  # backwards: leaves `starts` at the begin of each list
        a, b = _at(left[e]), _at(right[e])
        starts[a] -= 1
        linked[_at(starts[a])] = b
        starts[b] -= 1
        linked[_at(starts[b])] = a
    for v in range(vertices):
        parent[v] = -2  # not met
    end = 0
    for root in range(vertices):
        if parent[root] != -2:
            continue
        parent[root] = -1
        queue[end] = root
        head = end
        end += 1
        while head < end:  # breadth first
            v = queue[_at(head)]
            head += 1
            for k in range(_at(starts[_at(v)]), _at(starts[_at(v + 1)])):
                u = linked[k]
                if parent[_at(u)] == -2:
                    parent[_at(u)] = v
                    queue[_at(end)] = u
                    end += 1
    for v in range(vertices):
        size[v] = 1
    for k in range(vertices - 1, -1, -1):
        v = queue[k]
        if parent[_at(v)] >= 0:
            size[_at(parent[_at(v)])] += size[_at(v)]
    for v in range(vertices):
        bucket[_at(size[v] + 1)] += 1
    for s in range(vertices):
        bucket[_at(s + 1)] += bucket[_at(s)]
    for k in range(vertices):  # sorted by size, equal ones in the order of the queue
        v = queue[k]
        s = _at(size[_at(v)])
        order[_at(bucket[s])] = v
        bucket[s] += 1
    for v in range(vertices):
        bucket[v] = 1  # places taken in the subtree of each vertex, from its own
    for k in range(vertices):
        v = _at(order[k])
        if parent[v] >= 0:
            p = _at(parent[v])
            place[v] = bucket[p]
            bucket[p] += size[v]
    end = 0
    for k in range(vertices):
        v = _at(queue[k])
        if parent[v] >= 0:
            place[v] += place[_at(parent[v])]
        else:
            place[v] = end
            end += size[v]
        order[_at(place[v])] = queue[k]


@inlined
def _mark(indptr: Longs, indices: Ints, weight: Floats, row: int, mark: Floats) -> None:
    for e in range(_at(indptr[_at(row)]), _at(indptr[_at(row + 1)])):
        mark[_at(indices[e])] = weight[_at(indices[e])]


@inlined
def _unmark(indptr: Longs, indices: Ints, row: int, mark: Floats) -> None:
    for e in range(_at(indptr[_at(row)]), _at(indptr[_at(row + 1)])):
        mark[_at(indices[e])] = 0


@inlined
def _similarity(
    indptr: Longs, indices: Ints, total: Floats, marked: int, row: int, mark: Floats
) -> float:
    """Return the weighted Jaccard similarity of a row and the one whose columns are marked."""
    common = np.float32(0)
    for e in range(_at(indptr[_at(row)]), _at(indptr[_at(row + 1)])):
        common += mark[_at(indices[e])]
    return common / (total[_at(marked)] + total[_at(row)] - common)


@entry_point
def refine_windows(
    indptr: Longs,
    indices: Ints,
    weight: Floats,
    total: Floats,
    mark: Floats,
    window: int,
    stride: int,
    order: Ints,
) -> None:
    """Apply 2-opt to ``order`` inside windows of rows that begin every ``stride`` rows.

    A run of rows is reversed while that lowers the sum of dissimilarities between neighbours,
    including those to the rows before and after the window. ``mark`` [columns] holds zeros.
    """
    far = np.empty((window + 2, window + 2))
    rows = np.empty(window + 2, np.int32)
    path = np.empty(window + 2, np.int64)
    for begin in range(0, order.size, stride):
        first = max(begin - 1, 0)
        size = min(begin + window + 1, order.size) - first
        low, high = begin - first, min(begin + window, order.size) - first
        for i in range(size):
            rows[i] = order[first + i]
            path[i] = i
            _mark(indptr, indices, weight, rows[i], mark)
            for j in range(i):
                far[i, j] = 1 - _similarity(indptr, indices, total, rows[i], rows[j], mark)
                far[j, i] = far[i, j]
            _unmark(indptr, indices, rows[i], mark)
        better = True
        while better:
            better = False
            for i in range(low, high - 1):
                for j in range(i + 1, high):
                    gain = 0.0
                    if i > 0:
                        gain += far[path[i - 1], path[i]] - far[path[i - 1], path[j]]
                    if j < size - 1:
                        gain += far[path[j], path[j + 1]] - far[path[i], path[j + 1]]
                    if gain > _GAIN:
                        better = True
                        a, b = i, j
                        while a < b:
                            path[a], path[b] = path[b], path[a]
                            a += 1
                            b -= 1
        for i in range(low, high):
            order[first + i] = rows[path[i]]


@entry_point
def adjacent_similarity(
    indptr: Longs,
    indices: Ints,
    weight: Floats,
    total: Floats,
    mark: Floats,
    order: Ints,
    similarity: Floats,
) -> None:
    """Write the similarity of each row of ``order`` and the next; ``mark`` as above."""
    for i in range(order.size - 1):
        _mark(indptr, indices, weight, order[i], mark)
        similarity[i] = _similarity(indptr, indices, total, order[i], order[i + 1], mark)
        _unmark(indptr, indices, order[i], mark)
