"""The pattern of a matrix as NumPy arrays on the host, for the orders that run there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsetile.errors import value_error
from sparsetile.intake.csr import CSR

__all__ = ["host_pattern"]

_VERTICES_MAX = 2**31 - 1


def host_pattern(csr: CSR, function: str) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Return (indptr, indices, columns) of a matrix with at least one entry.

    Columns of a rectangular matrix that has more of them than entries are numbered anew, without
    those that are empty: memory then depends on the rows and entries alone.

    Raises
    ------
    ValueError
        Where rows and columns together are too many for 32-bit numbers.
    """
    rows, columns = csr.shape
    indices = csr.indices.cpu().contiguous().numpy()
    if rows != columns and columns > csr.nnz:
        used, indices = np.unique(indices, return_inverse=True)
        indices, columns = indices.astype(np.int32), used.size
    if rows + columns > _VERTICES_MAX:
        raise value_error(
            function,
            "A",
            "a matrix of fewer than 2**31 rows and columns together",
            f"{rows} rows and {columns} columns",
            'Plan it with reorder="identity"',
        )
    return csr.indptr.cpu().contiguous().numpy(), indices, columns
