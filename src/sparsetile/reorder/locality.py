"""Locality-aware order: a walk along the tree of most similar rows (RSH-SpMM, section 3.4).

Algorithm 3 of the paper, step by step:

1. *Candidates.* An inverted index lists the rows of each column. The candidates of a row are the
   rows that share a column with it; a popular column gives only those near the row.
2. *kNN graph.* Each row is linked to the candidates with the largest weighted Jaccard similarity,
   a column of degree d weighing d^-alpha.
3. *Tree and walk.* The minimum spanning tree of 1 - similarity is walked depth first.
4. *Refinement.* 2-opt inside windows of 8 rows; then rows that resemble neither neighbour move next
   to the most similar row that does.

Departures from the paper, and choices that it leaves open (figures are in
docs/explanation/notes/reordering.md): popular columns are cut, not dropped; the smallest of sibling
subtrees is walked first; the windows of 2-opt overlap.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["locality"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

# Rows of one column that a row looks at: rows x bound is 2**25, between these limits. A column
# of more rows is uninformative and gives only its nearest rows, so that every row has candidates.
# The work per entry of A is thus limited. The limit shrinks with more rows because the candidates'
# counters, 4 bytes a row at random addresses, outgrow the caches.
BOUND_LEAST, BOUND_MOST = 32, 384
_BOUND_ROWS = 2**25
# 2-opt: rows of a window, and the step to the next. Windows that begin at every eighth row would be
# those of the kernels, and an exchange inside one leaves its tiles unchanged.
_WINDOW, _STRIDE = 8, 4
# A row is isolated if neither neighbour has this share of the similarity of its best match.
_ISOLATED = 0.5
# Steps of a dissimilarity from 0 to 1: NumPy sorts 16 bits by radix.
_STEPS = 2**16 - 1
# Weights stay above zero, which marks a row that was not met.
_LEAST_WEIGHT = 1e-30
_INT32_MAX = 2**31 - 1


def locality(
    csr: CSR,
    *,
    alpha: float = 0.25,
    neighbours: int = 8,
    two_opt: bool = True,
    isolation: bool = True,
) -> Permutation:
    """Order rows so that neighbours have similar sets of columns.

    A column of degree d has weight d**-``alpha`` in the similarity of two rows, and each row is
    linked to its ``neighbours`` most similar ones. ``two_opt`` and ``isolation``: whether to refine
    the walk of the tree, and to move isolated rows.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise value_error("locality", "alpha", "a finite number >= 0", alpha, "Omit alpha")
    if neighbours < 1:
        raise value_error("locality", "neighbours", ">= 1", neighbours, "Omit neighbours")
    find = functools.partial(_order, alpha, neighbours, two_opt, isolation)
    return order_on_host(csr, "locality", find)


def _order(
    alpha: float,
    neighbours: int,
    two_opt: bool,
    isolation: bool,
    indptr: Longs,
    indices: Ints,
    columns: int,
) -> Longs:
    from sparsetile.reorder.locality_numba import refine_windows  # numba is slow to import

    empty = indptr[1:] == indptr[:-1]
    filled = np.flatnonzero(~empty)
    indptr = np.append(indptr[filled], indices.size)
    degree = np.maximum(np.bincount(indices, minlength=columns), 1)
    weight = np.maximum(degree**-alpha, _LEAST_WEIGHT).astype(np.float32)
    total = np.add.reduceat(weight[indices].astype(np.float64), indptr[:-1]).astype(np.float32)

    nearest, similarity = _nearest(indptr, indices, weight, total, neighbours)
    order = _walked(nearest, similarity)
    mark = np.zeros(columns, np.float32)
    if two_opt:
        refine_windows(indptr, indices, weight, total, mark, _WINDOW, _STRIDE, order)
    if isolation:
        order = _joined(indptr, indices, weight, total, mark, nearest, similarity, order)
    return np.concatenate([filled[order], np.flatnonzero(empty)])


def _nearest(
    indptr: Longs, indices: Ints, weight: Floats, total: Floats, neighbours: int
) -> tuple[Ints, Floats]:
    """Return the rows most similar to each, -1 if there are fewer, and their similarities."""
    import scipy.sparse as sp  # slow to import

    from sparsetile.reorder.locality_numba import nearest_rows

    rows, columns = indptr.size - 1, weight.size
    ones = np.ones(indices.size, np.int8)
    inverted = sp.csr_array((ones, indices, indptr), shape=(rows, columns)).T.tocsr()
    most = min(neighbours, rows, max(_INT32_MAX // rows, 1))  # scipy counts edges in 32 bits
    nearest = np.full((rows, most), -1, np.int32)
    similarity = np.zeros((rows, most), np.float32)
    nearest_rows(
        indptr, indices, inverted.indptr.astype(np.int64),
        inverted.indices.astype(np.int32, copy=False), weight, total,
        min(max(_BOUND_ROWS // rows, BOUND_LEAST), BOUND_MOST), np.zeros(rows, np.float32),
        np.empty(rows + 1, np.int32), nearest, similarity,
    )  # fmt: skip
    return nearest, similarity


def _walked(nearest: Ints, similarity: Floats) -> Ints:
    """Return the rows along the minimum spanning tree of the kNN graph."""
    import scipy.sparse as sp
    from scipy.sparse.csgraph import minimum_spanning_tree

    from sparsetile.reorder.locality_numba import walk_tree

    rows = nearest.shape[0]
    known = nearest >= 0
    far = np.clip((1 - similarity[known]) * _STEPS, 0, _STEPS).astype(np.uint16)
    # Ranks from 1 in place of weights: without ties the tree is unique, whichever sort scipy uses,
    # and scipy takes a zero for no edge.
    ranks = np.empty(far.size)
    ranks[np.argsort(far, kind="stable")] = np.arange(1, far.size + 1)
    starts = np.append(0, np.cumsum(known.sum(axis=1))).astype(np.int32)
    graph = sp.csr_array((ranks, nearest[known], starts), shape=(rows, rows))
    tree = minimum_spanning_tree(graph, overwrite=True).tocoo()
    ascending = np.argsort(tree.data)
    left, right = (ends[ascending].astype(np.int32) for ends in tree.coords)
    order = np.empty(rows, np.int32)
    walk_tree(
        left, right, np.zeros(rows + 1, np.int64), np.empty(2 * left.size, np.int32),
        np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32),
        np.zeros(rows + 2, np.int32), np.empty(rows, np.int32), order,
    )  # fmt: skip
    return order


def _joined(
    indptr: Longs,
    indices: Ints,
    weight: Floats,
    total: Floats,
    mark: Floats,
    nearest: Ints,
    similarity: Floats,
    order: Ints,
) -> Ints:
    """Return the order with isolated rows next to their best match that is not isolated.

    A row without candidates goes to the end. One whose matches are all isolated stays.
    """
    from sparsetile.reorder.locality_numba import adjacent_similarity

    rows = order.size
    beside = np.zeros(rows + 1, np.float32)
    adjacent_similarity(indptr, indices, weight, total, mark, order, beside[1:rows])
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    beside = np.maximum(beside[:-1], beside[1:])[place]
    alone = nearest[:, 0] < 0
    isolated = beside < _ISOLATED * similarity[:, 0]

    moved = np.flatnonzero(isolated)
    fit = (nearest[moved] >= 0) & ~isolated[nearest[moved]]
    moved, fit = moved[fit.any(axis=1)], fit[fit.any(axis=1)]
    match = fit.argmax(axis=1)
    target, later = place.copy(), np.zeros(rows, np.float32)
    target[moved] = place[nearest[moved, match]]
    later[moved] = 2 - similarity[moved, match]  # after the match, the most similar row first
    target[alone] = rows
    return np.lexsort((place, later, target)).astype(np.int32)
