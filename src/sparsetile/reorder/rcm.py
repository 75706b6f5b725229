"""Reverse Cuthill-McKee order: a narrow band about the diagonal, by scipy.

Good for meshes and banded matrices whose rows were shuffled. Hubs spoil it, because the
breadth-first levels then hold most of the graph.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR
from sparsetile.reorder.pattern import order_on_host
from sparsetile.reorder.permutation import Permutation

__all__ = ["rcm"]


def rcm(csr: CSR) -> Permutation:
    """Order rows by reverse Cuthill-McKee on the symmetrised pattern.

    A square matrix is taken as the graph of A + Aᵀ, a rectangular one as the bipartite graph of its
    rows and columns. Only the rows of that order are kept: rows that share columns are two steps
    apart in it, and a dense column costs no more than its entries.
    """
    square = csr.shape[0] == csr.shape[1]
    return order_on_host(csr, "rcm", functools.partial(_order, square))


def _order(
    square: bool, indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int
) -> NDArray[np.int64]:
    import scipy.sparse as sp  # slow to import
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    rows = indptr.size - 1
    # Only the pattern matters; a sum of two ones must not vanish.
    pattern = sp.csr_array((np.ones(indices.size, np.int8), indices, indptr), shape=(rows, columns))
    if square:
        graph = sp.csr_array(pattern + pattern.T)
    else:
        graph = sp.csr_array(sp.block_array([[None, pattern], [pattern.T, None]]))
    return np.asarray(reverse_cuthill_mckee(graph, symmetric_mode=True), dtype=np.int64)
