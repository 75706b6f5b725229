"""Shared by the orders that run on the host: the pattern as NumPy arrays, the order as a tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import Permutation

__all__ = ["host_pattern", "order_on_host"]

# (indptr, indices, columns) -> rows in order, maybe with columns, numbered after them, in between
HostOrder = Callable[[NDArray[np.int64], NDArray[np.int32], int], NDArray[np.int64]]

_VERTICES_MAX = 2**31 - 1


def host_pattern(csr: CSR, function: str) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Return (indptr, indices, columns) of a matrix with at least one entry.

    If a rectangular matrix has more columns than entries, empty columns are dropped and the others
    renumbered: memory then depends only on the rows and entries.
    """
    rows, columns = csr.shape
    indices = csr.indices.cpu().contiguous().numpy()
    if rows != columns and columns > csr.nnz:
        used, indices = np.unique(indices, return_inverse=True)
        indices, columns = indices.astype(np.int32), used.size
    if rows + columns > _VERTICES_MAX:
        raise value_error(
            function, "A", "a matrix of fewer than 2**31 rows and columns together",
            f"{rows} rows and {columns} columns", 'Plan it with reorder="identity"',
        )  # fmt: skip
    return csr.indptr.cpu().contiguous().numpy(), indices, columns


def order_on_host(csr: CSR, name: str, find: HostOrder) -> Permutation:
    """Order the rows of a matrix on the host by ``find``; one without entries keeps its order."""
    rows = csr.shape[0]
    if csr.nnz == 0:
        return Permutation(name, torch.arange(rows, device=csr.device))
    order = find(*host_pattern(csr, name))
    return Permutation(name, torch.from_numpy(order[order < rows]).to(csr.device))
