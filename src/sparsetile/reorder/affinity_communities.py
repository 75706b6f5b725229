"""Step 1 of the data-affinity order, compiled: communities by modularity gain, and their walk.

Every vertex is met once per entry of its row and once per entry of the lists merged into it, at
unpredictable addresses. To hide the cache misses:

- fields that are needed together are stored together, in records of 16 bytes;
- vertices are taken in batches: short loops without branches first load everything that the batch
  will read, so that the misses overlap;
- indices are unsigned: numba tests signed ones for being negative.

Arrays are made by NumPy, which requests large pages; numba does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.numba_cache import entry_point, inlined, inner

__all__ = ["leaves_by_community"]

Longs = NDArray[np.int64]
Numbers = NDArray[np.uint32]

# Entries of merged lists that may be read per entry of the graph. Most need 0.2 to 1.4, some 5;
# beyond the limit the remaining vertices stay communities of their own.
_COPIES = 16
# Entries that are loaded ahead: their records still fit the second-level cache.
_BATCH = 1024

# Records of a vertex: fields read by each neighbour, and fields read once by its community.
_INTO, _WEIGHT, _STRENGTH, _FIRST = 0, 1, 2, 3
_SIBLING, _LENGTH, _START = 0, 1, 2

_NONE = np.uint32(0xFFFFFFFF)
_MOST = 0xFFFFFFFF
# Casts: unsigned for an index, signed and wide for arithmetic.
_at: Any = np.uint64
_wide: Any = np.int64


@inner
def _by_degree(pointers: Longs, place: Longs, order: Numbers) -> None:
    """Write the vertices in ascending degree, equal ones in ascending number.

    ``place`` holds zeros, two more than the largest degree.
    """
    vertices = pointers.size - 1
    for v in range(vertices):
        place[_at(pointers[_at(v + 1)] - pointers[_at(v)] + 1)] += 1
    for d in range(place.size - 1):
        place[_at(d + 1)] += place[_at(d)]
    for v in range(vertices):
        degree = _at(pointers[_at(v + 1)] - pointers[_at(v)])
        order[_at(place[degree])] = v
        place[degree] += 1


@inlined
def _community(node: Numbers, v: int) -> int:
    """Find the community of ``v``, halving the path to it."""
    up = node[v, _INTO]
    while up != v:
        above = node[up, _INTO]
        node[v, _INTO] = above
        v = above
        up = node[v, _INTO]
    return v


@inner
def _squeezed(order: Numbers, seen: int, links: Numbers, pool: Numbers) -> int:
    """Move the lists that are still needed to the front of the pool; return their end.

    Lists were written in the order in which their vertices were visited, so each moves down.
    """
    top = 0
    for k in range(seen):
        v = order[_at(k)]
        start = _wide(links[v, _START])
        length = _wide(links[v, _LENGTH])
        for j in range(length):
            pool[_at(top + j), 0] = pool[_at(start + j), 0]
            pool[_at(top + j), 1] = pool[_at(start + j), 1]
        links[v, _START] = top
        top += length
    return top


@inner
def _widened(pool: Numbers, used: int, size: int) -> Numbers:
    wider = np.empty((size, 2), np.uint32)
    for j in range(used):
        wider[_at(j), 0] = pool[_at(j), 0]
        wider[_at(j), 1] = pool[_at(j), 1]
    return wider


@inlined
def _added(
    node: Numbers, near: Numbers, weight: Numbers, size: int, touched: Numbers, count: int
) -> int:
    """Add the weights of ``size`` edges to the communities at their ends.

    Communities met for the first time are appended to ``touched``; their new number is returned.
    The vertex that is being visited has a weight from the start, so it is never appended.
    """
    for j in range(_at(size)):
        near[j] = node[near[j], _INTO]
    for j in range(_at(size)):
        u = _community(node, near[j])
        touched[_at(count)] = u
        before = node[u, _WEIGHT]
        count += before == 0
        node[u, _WEIGHT] = before + weight[j]
    return count


@inlined
def _loaded(
    pointers: Longs,
    neighbours: Numbers,
    order: Numbers,
    seen: int,
    node: Numbers,
    links: Numbers,
    pool: Numbers,
    ends: Numbers,
    scratch: Numbers,
) -> int:
    """Load the data of the vertices after ``seen``; return the vertex to load next.

    ``ends`` gets the neighbours of these vertices, or ancestors of them: those stay valid while
    communities merge. ``scratch`` only keeps the loads from being optimised away. A vertex with
    more neighbours than fit is read on its own later.
    """
    ready, size = seen, 0
    while ready < order.size and ready - seen < _BATCH:
        v = order[_at(ready)]
        begin = pointers[v]
        degree = pointers[_at(v + 1)] - begin
        if size + degree > _BATCH:
            break
        for j in range(degree):
            ends[_at(size + j)] = neighbours[_at(begin + j)]
        size += degree
        ready += 1
    vertices = _at(ready - seen)
    for j in range(_at(size)):
        ends[j] = node[ends[j], _INTO]
    for j in range(vertices):
        scratch[j, 0] = node[order[_at(seen) + j], _FIRST]
    for j in range(_at(size)):
        ends[j] = node[ends[j], _INTO]
    for _ in range(2):  # the lists of two children; few have more so far
        for j in range(vertices):
            child = scratch[j, 0]
            child = child if child != _NONE else np.uint32(0)
            scratch[j, 0] = links[child, _SIBLING]
            scratch[j, 1] = links[child, _START]
        for j in range(vertices):
            scratch[j, 1] = pool[scratch[j, 1], 0]
    return ready


@inlined
def _own_edges(
    neighbours: Numbers,
    begin: int,
    degree: int,
    node: Numbers,
    near: Numbers,
    ones: Numbers,
    touched: Numbers,
) -> int:
    """Add the edges of a vertex with too many neighbours to be loaded ahead."""
    count = 0
    for first in range(begin, begin + degree, _BATCH):
        size = min(_BATCH, begin + degree - first)
        for j in range(size):
            near[_at(j)] = node[neighbours[_at(first + j)], _INTO]
        count = _added(node, near, ones, size, touched, count)
    return count


@inlined
def _inherited(
    child: int,
    node: Numbers,
    links: Numbers,
    pool: Numbers,
    near: Numbers,
    weight: Numbers,
    touched: Numbers,
    count: int,
) -> tuple[int, int]:
    """Add the lists of ``child`` and its siblings; return (communities met, entries read)."""
    size, copies = 0, 0
    while child != _NONE:
        begin = _wide(links[child, _START])
        end = begin + _wide(links[child, _LENGTH])
        copies += end - begin
        links[child, _LENGTH] = 0
        child = links[child, _SIBLING]
        while begin < end:
            part = min(end - begin, _BATCH - size)
            for j in range(part):
                near[_at(size + j)] = node[pool[_at(begin + j), 0], _INTO]
                weight[_at(size + j)] = pool[_at(begin + j), 1]
            size += part
            begin += part
            if size == _BATCH:
                count = _added(node, near, weight, size, touched, count)
                size = 0
    return _added(node, near, weight, size, touched, count), copies


@inner
def _dendrogram(
    pointers: Longs,
    neighbours: Numbers,
    order: Numbers,
    node: Numbers,
    links: Numbers,
    pool: Numbers,
    touched: Numbers,
    most_copies: int,
) -> None:
    """Merge communities by modularity gain, into the records ``node`` and ``links``.

    A vertex is visited once. Its edges to other communities are those of its own row plus the
    lists left by the vertices that merged into it; it leaves the sum as its own list when it
    merges in turn. Siblings are linked from the last to the first merged. Lists are kept in
    ``pool``; once ``most_copies`` of their entries were read, no more vertices merge.
    """
    vertices = pointers.size - 1
    total = float(neighbours.size)
    for v in range(_at(vertices)):
        node[v, _INTO] = v
        node[v, _WEIGHT] = 0
        node[v, _STRENGTH] = min(pointers[v + _at(1)] - pointers[v], _MOST)
        node[v, _FIRST] = _NONE
        links[v, _SIBLING] = _NONE
        links[v, _LENGTH] = 0
        links[v, _START] = 0
    ends = np.empty(_BATCH, np.uint32)
    near = np.empty(_BATCH, np.uint32)
    weight = np.empty(_BATCH, np.uint32)
    scratch = np.empty((_BATCH, 2), np.uint32)
    ones = np.empty(_BATCH, np.uint32)
    for j in range(_BATCH):
        ones[j] = 1
    top, copies, ready, end = 0, 0, 0, 0
    for k in range(vertices):
        v = order[_at(k)]
        begin = pointers[v]
        degree = pointers[_at(v + 1)] - begin
        if k >= ready:
            ready = _loaded(pointers, neighbours, order, k, node, links, pool, ends, scratch)
            end = 0
        node[v, _WEIGHT] = 1  # already met, so never touched
        count = 0
        if k >= ready:
            ready = k + 1
            count = _own_edges(neighbours, begin, degree, node, near, ones, touched)
        else:
            for j in range(_at(end), _at(end + degree)):
                u = _community(node, ends[j])
                touched[_at(count)] = u
                before = node[u, _WEIGHT]
                count += before == 0
                node[u, _WEIGHT] = before + 1
            end += degree
        count, read = _inherited(node[v, _FIRST], node, links, pool, near, weight, touched, count)
        copies += read
        node[v, _WEIGHT] = 0
        # The gain of v joining u, up to a constant factor: w(u, v) - s(u) s(v) / 2m.
        share = node[v, _STRENGTH] / total
        best, gain = _wide(-1), 0.0
        for j in range(_at(count)):
            u = touched[j]
            offered = node[u, _WEIGHT] - share * node[u, _STRENGTH]
            if offered > gain or (offered == gain and u < best):
                best, gain = _wide(u), offered
        if best >= 0 and top + count > pool.shape[0]:
            top = _squeezed(order, k, links, pool)
            if top + count > pool.shape[0] // 2:  # otherwise it would be squeezed again soon
                pool = _widened(pool, top, min(2 * pool.shape[0] + count, _MOST))
            if top + count > pool.shape[0]:  # 32 bits cannot number more
                break
        if best >= 0:
            into = np.uint32(best)
            links[v, _START] = top
            for j in range(_at(count)):
                u = touched[j]
                pool[_at(top), 0] = u
                pool[_at(top), 1] = node[u, _WEIGHT]
                top += u != into  # edges between the two become internal
                node[u, _WEIGHT] = 0
            links[v, _LENGTH] = top - _wide(links[v, _START])
            links[v, _SIBLING] = node[into, _FIRST]
            node[into, _FIRST] = v
            node[v, _INTO] = into
            joint = _wide(node[into, _STRENGTH]) + _wide(node[v, _STRENGTH])
            node[into, _STRENGTH] = min(joint, _MOST)
        else:
            for j in range(_at(count)):
                node[touched[j], _WEIGHT] = 0
        if copies > most_copies:
            break


@inner
def _leaves(
    indptr: Longs, order: Numbers, node: Numbers, links: Numbers, stack: Numbers, found: Numbers
) -> int:
    """Walk the dendrogram depth first, the first merged child first; return the rows found.

    Columns of a bipartite graph and empty rows are omitted.
    """
    rows = indptr.size - 1
    count = 0
    for k in range(order.size):
        root = order[_at(k)]
        if node[root, _INTO] != root:
            continue
        stack[0] = root
        depth = 1
        while depth > 0:
            depth -= 1
            v = stack[_at(depth)]
            if v < rows and indptr[_at(v + 1)] > indptr[v]:
                found[_at(count)] = v
                count += 1
            child = node[v, _FIRST]
            while child != _NONE:
                stack[_at(depth)] = child
                depth += 1
                child = links[child, _SIBLING]
    return count


@entry_point
def _walk(
    indptr: Longs,
    pointers: Longs,
    neighbours: Numbers,
    place: Longs,
    order: Numbers,
    node: Numbers,
    links: Numbers,
    pool: Numbers,
    touched: Numbers,
    found: Numbers,
    most_copies: int,
) -> int:
    _by_degree(pointers, place, order)
    _dendrogram(pointers, neighbours, order, node, links, pool, touched, most_copies)
    return _leaves(indptr, order, node, links, touched, found)


def leaves_by_community(indptr: Longs, pointers: Longs, neighbours: Numbers) -> Numbers:
    """Return the non-empty rows, community by community.

    ``pointers`` and ``neighbours`` are the graph: A itself, or its rows and, after them, its
    columns.
    """
    vertices = pointers.size - 1
    room = min(max(vertices, neighbours.size // 2), _MOST)
    found = np.empty(indptr.size - 1, np.uint32)
    count = _walk(
        indptr, pointers, neighbours, np.zeros(int(np.diff(pointers).max()) + 2, np.int64),
        np.empty(vertices, np.uint32), np.empty((vertices, 4), np.uint32),
        np.empty((vertices, 4), np.uint32), np.empty((room, 2), np.uint32),
        np.empty(vertices + 1, np.uint32), found, _COPIES * neighbours.size,
    )  # fmt: skip
    return found[:count]
