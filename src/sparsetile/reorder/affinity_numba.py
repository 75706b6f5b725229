"""The numba code of the data-affinity order; `affinity` says what it does and why.

Single-threaded, integer arithmetic but for comparisons of gains and scores, ties broken by the
smaller number: the same pattern gives the same order on every run.

NumPy's whole-array assignments are avoided: each would add half a second to the compilation.
Longer than most files because numba's disk cache watches only the file of the entry point.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.compiled import entry_point, inner

__all__ = ["order_rows"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

# Rows of the windows that the kernels use: wgmma tiles, and the 8-row windows inside them.
_BLOCK = 64
_GROUP = 8
# Leaves after the first unvisited one that may be chosen. Half of it, with half of _LOOK, costs
# 2 % of the sharing in 64-row windows and saves a tenth to a third of the time of `_filled`.
_AHEAD = 4096
# Rows of one column that are looked at each time a window takes that column.
_LOOK = 128
# Entries of merged lists that may be read per entry of the graph. Real graphs need 0.5 to 1.2;
# beyond the limit the remaining vertices stay communities of their own.
_COPIES = 16

# Fields of a vertex while communities form, kept together: one cache miss per neighbour.
_INTO, _WEIGHT, _STRENGTH = 0, 1, 2
# Fields of a column while rows are chosen: how many of its rows are surely placed, how many it
# has, the last window that took it, and the first row that may be left.
_HEAD, _SIZE, _TAKEN, _NEXT = 0, 1, 2, 3

_INT32_MAX = 2**31 - 1


@inner
def _unset(size: int) -> Ints:
    array = np.empty(size, np.int32)
    for k in range(size):
        array[k] = -1
    return array


@inner
def _transposed(indptr: Longs, indices: Ints, columns: int) -> tuple[Longs, Ints]:
    pointers = np.zeros(columns + 1, np.int64)
    for e in range(indices.size):
        pointers[indices[e] + 1] += 1
    for c in range(columns):
        pointers[c + 1] += pointers[c]
    free = np.empty(columns, np.int64)
    for c in range(columns):
        free[c] = pointers[c]
    rows = np.empty(indices.size, np.int32)
    for i in range(indptr.size - 1):
        for e in range(indptr[i], indptr[i + 1]):
            c = indices[e]
            rows[free[c]] = i
            free[c] += 1
    return pointers, rows


@inner
def _equal(left: Longs, right: Longs) -> bool:
    if left.size != right.size:
        return False
    for k in range(left.size):  # noqa: SIM110 - compiled: stops at the first difference
        if left[k] != right[k]:
            return False
    return True


@inner
def _graph(indptr: Longs, indices: Ints, columns: int) -> tuple[Longs, Ints]:
    """Return A where it is symmetric, else the graph of its rows and, after them, its columns."""
    rows = indptr.size - 1
    pointers, members = _transposed(indptr, indices, columns)
    if _equal(indptr, pointers) and _equal(indices, members):
        return indptr, indices
    joined = np.empty(rows + columns + 1, np.int64)
    for i in range(rows):
        joined[i] = indptr[i]
    for c in range(columns + 1):
        joined[rows + c] = pointers[c] + indices.size
    neighbours = np.empty(2 * indices.size, np.int32)
    for e in range(indices.size):
        neighbours[e] = indices[e] + rows
        neighbours[indices.size + e] = members[e]
    return joined, neighbours


@inner
def _by_degree(pointers: Longs) -> Ints:
    """Return the vertices in ascending degree, equal ones in ascending number."""
    vertices = pointers.size - 1
    most = 0
    for v in range(vertices):
        most = max(most, pointers[v + 1] - pointers[v])
    place = np.zeros(most + 2, np.int64)
    for v in range(vertices):
        place[pointers[v + 1] - pointers[v] + 1] += 1
    for d in range(most + 1):
        place[d + 1] += place[d]
    order = np.empty(vertices, np.int32)
    for v in range(vertices):
        degree = pointers[v + 1] - pointers[v]
        order[place[degree]] = v
        place[degree] += 1
    return order


@inner
def _community(node: Ints, v: int) -> int:
    """Find the community of ``v``, halving the path to it."""
    while node[v, _INTO] != v:
        node[v, _INTO] = node[node[v, _INTO], _INTO]
        v = node[v, _INTO]
    return v


@inner
def _squeezed(order: Ints, seen: int, start: Longs, length: Longs, pool: Ints) -> int:
    """Move the lists that are still to be read to the front of the pool; return their end.

    Lists were written in the order in which their vertices were visited, so that each moves down.
    """
    top = 0
    for k in range(seen):
        v = order[k]
        for j in range(length[v]):
            pool[top + j, 0] = pool[start[v] + j, 0]
            pool[top + j, 1] = pool[start[v] + j, 1]
        start[v] = top
        top += length[v]
    return top


@inner
def _dendrogram(
    pointers: Longs, neighbours: Ints, order: Ints, room: int, most_copies: int
) -> tuple[Ints, Ints, Ints]:
    """Merge communities by modularity gain; return (node, first child, next sibling).

    A vertex is visited once. Its edges to other communities are those of its own row plus the
    lists left by the vertices that merged into it; it leaves the sum as its own list when it
    merges in turn. Children are in the order of merging. ``room`` is the number of list entries to
    make room for at first; once ``most_copies`` of them were read, no more vertices merge.
    """
    vertices = pointers.size - 1
    total = float(neighbours.size)
    node = np.zeros((vertices, 4), np.int32)
    for v in range(vertices):
        node[v, _INTO] = v
        node[v, _STRENGTH] = min(pointers[v + 1] - pointers[v], _INT32_MAX)
    first = _unset(vertices)
    last = _unset(vertices)
    sibling = _unset(vertices)
    start = np.zeros(vertices, np.int64)
    length = np.zeros(vertices, np.int64)
    pool = np.empty((room, 2), np.int32)
    top = 0
    touched = np.empty(vertices + 1, np.int32)
    near = np.empty(vertices, np.int32)
    copies = 0
    for k in range(vertices):
        v = order[k]
        count = 0
        begin, degree = pointers[v], pointers[v + 1] - pointers[v]
        for j in range(degree):  # loads that do not wait for each other bring the nodes to cache
            near[j] = node[neighbours[begin + j], _INTO]
        for j in range(degree):
            u = _community(node, near[j])
            if u != v:
                touched[count] = u
                count += node[u, _WEIGHT] == 0
                node[u, _WEIGHT] += 1
        child = first[v]
        while child >= 0:
            begin = start[child]
            for j in range(length[child]):
                near[j] = node[pool[begin + j, 0], _INTO]
            for j in range(length[child]):
                u = _community(node, near[j])
                if u != v:
                    touched[count] = u
                    count += node[u, _WEIGHT] == 0
                    node[u, _WEIGHT] += pool[begin + j, 1]
            copies += length[child]
            length[child] = 0
            child = sibling[child]
        # The gain of v joining u, up to a constant factor: w(u, v) - s(u) s(v) / 2m.
        share = node[v, _STRENGTH] / total
        best, gain = -1, 0.0
        for j in range(count):
            u = touched[j]
            offered = node[u, _WEIGHT] - share * node[u, _STRENGTH]
            if offered > gain or (offered == gain and u < best):
                best, gain = u, offered
        if best >= 0:
            if top + count > pool.shape[0]:
                top = _squeezed(order, k, start, length, pool)
                if top + count > pool.shape[0] // 2:  # else it would be squeezed again soon
                    wider = np.empty((2 * pool.shape[0] + count, 2), np.int32)
                    for j in range(top):
                        wider[j, 0] = pool[j, 0]
                        wider[j, 1] = pool[j, 1]
                    pool = wider
            for j in range(count):
                pool[top + j, 0] = touched[j]
                pool[top + j, 1] = node[touched[j], _WEIGHT]
            start[v] = top
            length[v] = count
            top += count
            node[v, _INTO] = best
            joint = np.int64(node[best, _STRENGTH]) + node[v, _STRENGTH]
            node[best, _STRENGTH] = min(joint, _INT32_MAX)
            if first[best] < 0:
                first[best] = v
            else:
                sibling[last[best]] = v
            last[best] = v
        for j in range(count):
            node[touched[j], _WEIGHT] = 0
        if copies > most_copies:
            break
    return node, first, sibling


@inner
def _leaves(indptr: Longs, order: Ints, node: Ints, first: Ints, sibling: Ints) -> Ints:
    """Walk the dendrogram depth first; return its rows, without columns and empty rows."""
    rows = indptr.size - 1
    found = np.empty(rows, np.int32)
    count = 0
    stack = np.empty(order.size + 1, np.int32)
    for k in range(order.size):
        root = order[k]
        if node[root, _INTO] != root:
            continue
        stack[0] = root
        depth = 1
        while depth > 0:
            depth -= 1
            v = stack[depth]
            if v < rows and indptr[v + 1] > indptr[v]:
                found[count] = v
                count += 1
            if v != root and sibling[v] >= 0:
                stack[depth] = sibling[v]
                depth += 1
            if first[v] >= 0:
                stack[depth] = first[v]
                depth += 1
    return found[:count]


@inner
def _relabelled(indptr: Longs, indices: Ints, columns: int, order: Ints) -> tuple[Longs, Ints, int]:
    """Return A with rows in ``order`` and columns numbered as they first occur in it.

    What is near in the order is then near in memory for the steps that follow.
    """
    label = _unset(columns)
    used = 0
    pointers = np.zeros(order.size + 1, np.int64)
    labels = np.empty(indices.size, np.int32)
    end = 0
    for p in range(order.size):
        for e in range(indptr[order[p]], indptr[order[p] + 1]):
            c = indices[e]
            if label[c] < 0:
                label[c] = used
                used += 1
            labels[end] = label[c]
            end += 1
        pointers[p + 1] = end
    return pointers, labels, used


@inner
def _column_states(pointers: Longs, members: Ints) -> Ints:
    columns = pointers.size - 1
    state = np.empty((columns, 4), np.int32)
    for c in range(columns):
        state[c, _HEAD] = 0
        state[c, _SIZE] = pointers[c + 1] - pointers[c]
        state[c, _TAKEN] = -1
        state[c, _NEXT] = members[pointers[c]]  # no column is empty: each was named by an entry
    return state


@inner
def _step(indptr: Longs, p: int) -> np.float32:
    """Return what one shared column adds to a row's score.

    One over a little more than its length: of two rows wholly inside, the longer goes first.
    """
    return np.float32(1.0 / (indptr[p + 1] - indptr[p] + 1))


@inner
def _filled(indptr: Longs, indices: Ints, columns: int) -> Ints:
    """Fill windows of _BLOCK rows, each begun by the first row left over.

    The next row is the one that has the largest share of its columns in the window already; where
    no row in reach has any, the first one left over.
    """
    rows = indptr.size - 1
    pointers, members = _transposed(indptr, indices, columns)
    state = _column_states(pointers, members)
    fresh = np.empty(columns + 1, np.int32)
    # Share of its columns that the window has, -1 once it is placed; what one column adds to it.
    score = np.zeros((rows, 2), np.float32)
    for p in range(rows):
        score[p, 1] = _step(indptr, p)
    # Rows with a score, each once.
    candidates = np.empty(rows + 1, np.int32)
    count = 0
    order = np.empty(rows, np.int32)
    frontier = 0
    for place in range(rows):
        while score[frontier, 0] < 0:
            frontier += 1
        chosen = frontier
        window = place // _BLOCK
        if place % _BLOCK == 0:
            for k in range(count):
                score[candidates[k], 0] = 0
            count = 0
        elif count > 0:
            most, at = np.float32(0), 0
            for k in range(count):
                p = candidates[k]
                share = score[p, 0]
                if share > most or (share == most and p < chosen):
                    most, at, chosen = share, k, p
            count -= 1
            candidates[at] = candidates[count]
        score[chosen, 0] = -1
        order[place] = chosen
        limit = frontier + _AHEAD
        # First the columns that the window lacks and that have rows in reach, without a branch:
        # the loads of one row then do not wait for each other.
        news = 0
        for e in range(indptr[chosen], indptr[chosen + 1]):
            c = indices[e]
            fresh[news] = c
            news += (state[c, _TAKEN] != window) & (state[c, _NEXT] < limit)
            state[c, _TAKEN] = window
        for j in range(news):
            c = fresh[j]
            begin, end = pointers[c] + state[c, _HEAD], pointers[c] + state[c, _SIZE]
            head = begin
            while head < end and members[head] < frontier:
                head += 1
            state[c, _HEAD] += head - begin
            state[c, _NEXT] = members[head] if head < end else _INT32_MAX
            for k in range(head, min(end, head + _LOOK)):
                p = members[k]
                if p >= limit:
                    break
                share = score[p, 0]
                if share >= 0:
                    candidates[count] = p
                    count += share == 0
                    score[p, 0] = share + score[p, 1]
    return order


@inner
def _grouped(indptr: Longs, indices: Ints, columns: int, order: Ints) -> None:
    """Inside each _BLOCK rows of ``order``, fill windows of _GROUP rows in the same manner."""
    # Last entry of the block in each column, and the last group that took the column.
    entry_of = np.empty((columns, 2), np.int64)
    for c in range(columns):
        entry_of[c, 0] = -1
        entry_of[c, 1] = -1
    previous = np.empty(0, np.int64)
    row_of = np.empty(0, np.int32)
    score = np.empty(_BLOCK, np.float32)
    step = np.empty(_BLOCK, np.float32)
    old = np.empty(_BLOCK, np.int32)
    left = np.empty(_BLOCK, np.bool_)
    group = 0
    for begin in range(0, order.size, _BLOCK):
        size = min(_BLOCK, order.size - begin)
        entries = 0
        for r in range(size):
            p = order[begin + r]
            old[r] = p
            left[r] = True
            step[r] = _step(indptr, p)
            entries += indptr[p + 1] - indptr[p]
        if entries > previous.size:
            previous = np.empty(2 * entries, np.int64)
            row_of = np.empty(2 * entries, np.int32)
        # Chain the block's entries of each column together.
        n = 0
        for r in range(size):
            for e in range(indptr[old[r]], indptr[old[r] + 1]):
                c = indices[e]
                previous[n] = entry_of[c, 0]
                entry_of[c, 0] = n
                row_of[n] = r
                n += 1
        for place in range(size):
            if place % _GROUP == 0:
                group += 1
                for r in range(size):
                    score[r] = 0
            chosen = -1
            for r in range(size):
                if left[r] and (chosen < 0 or score[r] > score[chosen]):
                    chosen = r
            left[chosen] = False
            p = old[chosen]
            order[begin + place] = p
            for e in range(indptr[p], indptr[p + 1]):
                c = indices[e]
                if entry_of[c, 1] == group:
                    continue
                entry_of[c, 1] = group
                n = entry_of[c, 0]
                while n >= 0:
                    r = row_of[n]
                    score[r] += step[r]
                    n = previous[n]
        for r in range(size):
            for e in range(indptr[old[r]], indptr[old[r] + 1]):
                entry_of[indices[e], 0] = -1


@entry_point
def order_rows(indptr: Longs, indices: Ints, columns: int) -> Longs:
    """Return the order of the rows; rows without entries come last, in the given order."""
    rows = indptr.size - 1
    pointers, neighbours = _graph(indptr, indices, columns)
    by_degree = _by_degree(pointers)
    room = max(by_degree.size, neighbours.size // 2)
    most_copies = _COPIES * neighbours.size
    node, first, sibling = _dendrogram(pointers, neighbours, by_degree, room, most_copies)
    leaves = _leaves(indptr, by_degree, node, first, sibling)
    walked, labels, used = _relabelled(indptr, indices, columns, leaves)
    order = _filled(walked, labels, used)
    _grouped(walked, labels, used, order)
    result = np.empty(rows, np.int64)
    for place in range(order.size):
        result[place] = leaves[order[place]]
    place = order.size
    for i in range(rows):
        if indptr[i + 1] == indptr[i]:
            result[place] = i
            place += 1
    return result
