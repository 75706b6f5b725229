"""The numba code of the Louvain order; `louvain` describes it.

Single-threaded, vertices in a fixed order, ties broken by the smaller number: the same graph gives
the same order on every run. The work has fixed limits: sweeps over the edges of a level, and
levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.numba_cache import entry_point, inner

__all__ = ["order_vertices"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

# Sweeps over the vertices of one level, and the share that must move for another sweep.
_SWEEPS = 10
_MOVED = 0.01
# Each level of a real graph has a tenth to a half of the vertices of the one below.
_LEVELS = 32


@inner
def _weight(weights: Longs, e: int) -> int:
    """Weight of an edge; empty weights stand for ones, as on the first level."""
    return weights[e] if weights.size else 1


@inner
def _strengths(pointers: Longs, weights: Longs) -> Longs:
    strength = np.zeros(pointers.size - 1, np.int64)
    for v in range(strength.size):
        for e in range(pointers[v], pointers[v + 1]):
            strength[v] += _weight(weights, e)
    return strength


@inner
def _communities(pointers: Longs, neighbours: Ints, weights: Longs, total: float) -> Ints:
    """Move vertices between communities while that gains modularity; return the communities."""
    vertices = pointers.size - 1
    strength = _strengths(pointers, weights)
    label = np.empty(vertices, np.int32)
    joint = np.empty(vertices, np.int64)  # strength of each community
    for v in range(vertices):
        label[v] = v
        joint[v] = strength[v]
    linked = np.zeros(vertices, np.int64)  # weight between the current vertex and a community
    touched = np.empty(vertices, np.int32)
    for _ in range(_SWEEPS):
        moved = 0
        for v in range(vertices):
            count = 0
            for e in range(pointers[v], pointers[v + 1]):
                if neighbours[e] != v:
                    c = label[neighbours[e]]
                    if linked[c] == 0:
                        touched[count] = c
                        count += 1
                    linked[c] += _weight(weights, e)
            own = label[v]
            joint[own] -= strength[v]
            # The gain of v in c, up to a constant factor and term: w(v, c) - s(v) s(c) / 2m.
            share = strength[v] / total
            best, gain = own, linked[own] - share * joint[own]
            for k in range(count):
                c = touched[k]
                offered = linked[c] - share * joint[c]
                if offered > gain or (offered == gain and best != own and c < best):
                    best, gain = c, offered
            for k in range(count):
                linked[touched[k]] = 0
            joint[best] += strength[v]
            label[v] = best
            moved += best != own
        if moved <= _MOVED * vertices:
            break
    return label


@inner
def _renumbered(label: Ints) -> int:
    """Number the communities 0, 1, 2, ... as they first occur; return their count."""
    number = np.empty(label.size, np.int32)
    for v in range(label.size):
        number[v] = -1
    count = 0
    for v in range(label.size):
        if number[label[v]] < 0:
            number[label[v]] = count
            count += 1
        label[v] = number[label[v]]
    return count


@inner
def _sorted_by(rank: Ints, label: Ints) -> Ints:
    """Return the vertices by the rank of their community, then by their number."""
    place = np.zeros(rank.size + 1, np.int64)
    for v in range(label.size):
        place[rank[label[v]] + 1] += 1
    for c in range(rank.size):
        place[c + 1] += place[c]
    order = np.empty(label.size, np.int32)
    for v in range(label.size):
        c = rank[label[v]]
        order[place[c]] = v
        place[c] += 1
    return order


@inner
def _numbers(size: int) -> Ints:
    numbers = np.empty(size, np.int32)
    for k in range(size):
        numbers[k] = k
    return numbers


@inner
def _merged(
    pointers: Longs, neighbours: Ints, weights: Longs, label: Ints, count: int
) -> tuple[Longs, Ints, Longs]:
    """Return the graph whose vertices are the communities; inner edges become loops."""
    members = _sorted_by(_numbers(count), label)
    seen = np.empty(count, np.int64)  # the last community that counted this one
    slot = np.empty(count, np.int64)  # and the edge between the two
    joined = np.zeros(count + 1, np.int64)
    # First the number of edges of each community, then the edges.
    for c in range(count):
        seen[c] = -1
    for v in members:
        c = label[v]
        for e in range(pointers[v], pointers[v + 1]):
            other = label[neighbours[e]]
            if seen[other] != c:
                seen[other] = c
                joined[c + 1] += 1
    for c in range(count):
        joined[c + 1] += joined[c]
        seen[c] = -1
    targets = np.empty(joined[count], np.int32)
    sums = np.zeros(joined[count], np.int64)
    end = 0
    for v in members:
        c = label[v]
        for e in range(pointers[v], pointers[v + 1]):
            other = label[neighbours[e]]
            if seen[other] != c:
                seen[other] = c
                slot[other] = end
                targets[end] = other
                end += 1
            sums[slot[other]] += _weight(weights, e)
    return joined, targets, sums


@entry_point
def order_vertices(pointers: Longs, neighbours: Ints) -> Longs:
    """Return all vertices of a symmetric graph in the order of the dendrogram's leaves."""
    total = float(neighbours.size)
    weights = np.empty(0, np.int64)
    labels = [_numbers(pointers.size - 1)]  # each leaf is its own
    for _ in range(_LEVELS):
        label = _communities(pointers, neighbours, weights, total)
        count = _renumbered(label)
        if count == label.size:
            break
        labels.append(label)
        pointers, neighbours, weights = _merged(pointers, neighbours, weights, label, count)
    order = _numbers(pointers.size - 1)
    for level in range(len(labels) - 1, -1, -1):
        rank = np.empty(order.size, np.int32)
        for place in range(order.size):
            rank[order[place]] = place
        order = _sorted_by(rank, labels[level])
    return order.astype(np.int64)
