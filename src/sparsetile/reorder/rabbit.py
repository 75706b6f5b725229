"""Rabbit order: rows as the leaves of a dendrogram of communities (Arai et al., IPDPS 2016).

"Rabbit Order: Just-in-time Parallel Reordering for Fast Graph Analysis" has two steps:

1. *Incremental aggregation.* Vertices are taken in ascending degree; each merges into the
   neighbouring community with the largest gain in modularity, if that gain is positive.
2. *Order.* The merges are a dendrogram; its leaves, walked depth first, are the order.

Acc-SpMM's affinity order begins with the same two steps, so the compiled code is that of
`affinity_communities`. This order omits the filling of windows that `affinity` adds; the difference
between the two orders is the gain of that step.

Departures from the paper:

- The paper merges in parallel and its order depends on the timing of threads. This code runs on one
  core and breaks ties by the smaller number.
- Merging stops once 16 entries of merged lists per edge of the graph were read.
- The graph is that of the affinity order: A itself if A is symmetric, else the bipartite graph of
  its rows and columns. The order keeps only the rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["rabbit"]


def rabbit(csr: CSR) -> Permutation:
    """Order rows by a depth-first walk of the dendrogram of their communities."""
    return order_on_host(csr, "rabbit", _order)


def _order(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    # numba is slow to import
    from sparsetile.reorder.affinity_communities import leaves_by_community
    from sparsetile.reorder.affinity_numba import affinity_graph

    leaves = leaves_by_community(indptr, *affinity_graph(indptr, indices.view(np.uint32), columns))
    empty = np.flatnonzero(indptr[1:] == indptr[:-1])
    return np.concatenate([leaves.astype(np.int64), empty])
