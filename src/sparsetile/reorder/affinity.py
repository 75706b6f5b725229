"""Data-affinity order: rows with the same columns come together (Acc-SpMM, section 3.2).

Algorithm 1 of the paper has two steps, and so has this one:

1. *Dendrogram.* Vertices are taken in ascending degree; each merges into the neighbouring
   community with the largest gain in modularity, if that gain is positive.
2. *Order.* The dendrogram's leaves are walked depth first, but the next row is always the
   unvisited leaf nearby that has most columns in common with those just placed.

Where this departs from the paper, because it measured better
(docs/explanation/notes/reordering.md):

- "In common" is counted against all rows of the 64-row window being filled, not against the last
  row alone, and relative to the length of the candidate: a kernel gathers each distinct column of
  a window once, so that what counts is how few columns a row adds. Inside each 64 rows the same
  step then forms the 8-row windows.
- Candidates are the next leaves of the walk, a bounded number of them, and a popular column
  looks at a bounded number of its rows: the work per entry of A has a fixed limit.
- The graph is A itself where A is symmetric. Anything else, rectangular or square, is taken as
  the bipartite graph of its rows and columns: rows are linked through the columns that they
  share, yet no popular column links its rows pairwise, so that a dense column costs no more
  than its entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["affinity"]


def affinity(csr: CSR) -> Permutation:
    """Order rows so that windows of 8 and 64 of them share many columns.

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
    return order_on_host(csr, "affinity", _order)


def _order(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    from sparsetile.reorder.affinity_numba import order_rows  # numba is slow to import

    return order_rows(indptr, indices, columns)
