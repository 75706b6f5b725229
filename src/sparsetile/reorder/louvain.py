"""Louvain order: rows of one community lie together, communities as their dendrogram has them.

The Louvain method finds communities of high modularity in levels: vertices move to the
neighbouring community that gains most until none gains, then communities become the vertices of a
smaller graph, and so on. The levels are a dendrogram; its leaves from left to right are the order.
Inside a community of the first level rows keep the given order: only the graph's coarse shape is
used, which is what Acc-SpMM's affinity order is held against (section 4.3.1).

The graph is that of the affinity order, so that a comparison compares the orders: A itself where
A is symmetric, else the bipartite graph of its rows and columns, of which only the rows are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["louvain"]


def _graph(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return A where it is symmetric, else the graph of its rows and, after them, its columns."""
    import scipy.sparse as sp  # slow to import

    rows = indptr.size - 1
    ones = np.ones(indices.size, np.int8)
    flipped = sp.csr_array((ones, indices, indptr), shape=(rows, columns)).T.tocsr()
    if np.array_equal(flipped.indptr, indptr) and np.array_equal(flipped.indices, indices):
        return indptr, indices
    pointers = np.concatenate([indptr[:-1], flipped.indptr.astype(np.int64) + indices.size])
    neighbours = np.empty(2 * indices.size, np.int32)
    np.add(indices, rows, out=neighbours[: indices.size])
    neighbours[indices.size :] = flipped.indices
    return pointers, neighbours


def louvain(csr: CSR) -> Permutation:
    """Order rows by the communities of the Louvain method.

    Parameters
    ----------
    csr : CSR [M, K]
        Any shape and device; values are not read. The work is done on the CPU, on one core.

    Returns
    -------
    Permutation
        int64 [M] on the device of ``csr``, the same for the same pattern. Empty rows come last,
        in the given order.

    Raises
    ------
    ValueError
        Where A has 2**31 rows and columns together, or more.
    """
    return order_on_host(csr, "louvain", _order)


def _order(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    from sparsetile.reorder.louvain_numba import order_vertices  # numba is slow to import

    order = order_vertices(*_graph(indptr, indices, columns))
    order = order[order < indptr.size - 1]
    empty = np.diff(indptr)[order] == 0
    return np.concatenate([order[~empty], np.sort(order[empty])])
