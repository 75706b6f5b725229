"""Louvain order: rows of one community together, communities in the order of their dendrogram.

The Louvain method finds communities of high modularity in levels: vertices move to the
neighbouring community that gains most until none gains, then communities become the vertices of a
smaller graph, and so on. The levels are a dendrogram; its leaves from left to right are the order.
Inside a community of the first level rows keep the given order, so only the graph's coarse shape is
used. It is a baseline of Acc-SpMM's affinity order (section 4.3.1).

The graph is that of the affinity order, so that only the orders differ: A itself if A is symmetric,
else the bipartite graph of its rows and columns. The order keeps only the rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["louvain"]


def louvain(csr: CSR) -> Permutation:
    """Order rows by the communities of the Louvain method."""
    return order_on_host(csr, "louvain", _order)


def _order(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    # numba is slow to import
    from sparsetile.reorder.affinity_numba import affinity_graph
    from sparsetile.reorder.louvain_numba import order_vertices

    pointers, neighbours = affinity_graph(indptr, indices.view(np.uint32), columns)
    order = order_vertices(pointers, neighbours.view(np.int32))
    order = order[order < indptr.size - 1]
    empty = np.diff(indptr)[order] == 0
    return np.concatenate([order[~empty], np.sort(order[empty])])
