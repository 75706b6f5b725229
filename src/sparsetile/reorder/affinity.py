"""Data-affinity order: rows with the same columns come together (Acc-SpMM, section 3.2).

Algorithm 1 of the paper has two steps, as here:

1. *Dendrogram.* Vertices are taken in ascending degree; each merges into the neighbouring
   community with the largest gain in modularity, if that gain is positive.
2. *Order.* The dendrogram's leaves are walked depth first, but the next row is always the
   nearby unvisited leaf that has most columns in common with those just placed.

Departures from the paper, which measured better (docs/explanation/notes/reordering.md):

- "In common" is counted against all rows of the 64-row window being filled, not only the last row,
  and relative to the length of the candidate. A kernel gathers each distinct column of a window
  once, so a row should add few columns. The same step then forms the 8-row windows inside each 64
  rows.
- Candidates are a bounded number of the next leaves of the walk, and a popular column looks at a
  bounded number of its rows: the work per entry of A has a fixed limit.
- The graph is A itself if A is symmetric. Any other matrix is taken as the bipartite graph of its
  rows and columns. Rows are linked through the columns that they share, but a popular column does
  not link its rows pairwise, so a dense column costs no more than its entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["affinity"]


def affinity(csr: CSR) -> Permutation:
    """Order rows so that windows of 8 and 64 of them share many columns."""
    return order_on_host(csr, "affinity", _order)


def _order(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    from sparsetile.reorder.affinity_numba import order_rows  # numba is slow to import

    return order_rows(indptr, indices, columns)
