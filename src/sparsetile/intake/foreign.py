"""Matrices of other libraries (scipy, cupyx, torch_sparse) to canonical CSR.

None of these libraries is imported here: whoever made an object has imported its library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.checks import matrix_shape
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.arrays import index_tensor, scipy_index_tensor, values_tensor
from sparsetile.intake.canonical import Names, from_compressed, from_coordinates
from sparsetile.intake.csr import CSR

__all__ = ["diagonal_entries", "from_scipy", "from_torch_sparse"]


def from_scipy(function: str, A: Any, names: Names | None = None) -> CSR:
    """Return canonical CSR of a scipy or cupyx sparse matrix or array of any format.

    Entries are counted in the order of ``A.data`` (flattened for bsr; for dia only the nonzeros of
    diagonals inside the matrix), and of ``A.tocoo()`` for lil and dok.
    """
    names = names or Names(function)
    if len(A.shape) != 2:
        raise value_error(
            function, "A", "a matrix of two dimensions", f"shape {tuple(A.shape)}",
            "Reshape it to one row or one column",
        )  # fmt: skip
    shape = matrix_shape(function, A.shape)
    name = A.format
    if name in ("csr", "csc", "bsr"):
        block = tuple(A.blocksize) if name == "bsr" else (1, 1)
        indptr = scipy_index_tensor(function, names.indptr, A.indptr)
        indices = scipy_index_tensor(function, names.indices, A.indices)
        values = values_tensor(function, names.values, A.data, ndim=3 if name == "bsr" else 1)
        # Both arrays may be longer than the matrix uses, until scipy's prune().
        used = int(indptr[-1]) if indptr.numel() else 0
        if 0 <= used < min(len(indices), len(values)):
            indices, values = indices[:used], values[:used]
        return from_compressed(
            names,
            indptr,
            indices,
            values,
            shape,
            by_column=name == "csc",
            block=(int(block[0]), int(block[1])),
        )
    if name == "dia":
        rows, columns, values = diagonal_entries(
            scipy_index_tensor(function, "offsets", A.offsets),
            values_tensor(function, names.values, A.data, ndim=2),
            shape,
        )
        return from_coordinates(names, rows, columns, values, shape)
    if name in ("lil", "dok"):
        A = A.tocoo()
    elif name != "coo":
        raise type_error(
            function, "A", "a sparse matrix of format csr, csc, coo, bsr, dia, lil or dok",
            f"format {name!r}", "Call A.tocsr() first",
        )  # fmt: skip
    return from_coordinates(
        names,
        scipy_index_tensor(function, names.rows, A.row),
        scipy_index_tensor(function, names.columns, A.col),
        values_tensor(function, names.values, A.data),
        shape,
    )


def diagonal_entries(
    offsets: Tensor, data: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, columns, values) of the nonzeros of stored diagonals inside the matrix.

    ``data[d, j]`` is at column j and row j - offsets[d]. Zeros pad the diagonals and are not
    entries, as in scipy's own conversions: they would count in a mean, a max or a min.
    """
    data = data[:, : shape[1]]
    columns = torch.arange(data.shape[1], device=data.device).expand(data.shape)
    rows = columns - offsets.to(torch.int64)[:, None]
    inside = (rows >= 0) & (rows < shape[0]) & (data != 0)
    return rows[inside], columns[inside], data[inside]


def from_torch_sparse(function: str, A: Any) -> CSR:
    """Return canonical CSR of a ``torch_sparse.SparseTensor``; entries as ``A.csr()`` has them."""
    rowptr, col, value = A.csr()
    return from_compressed(
        Names(function, indptr="rowptr", indices="col", values="value"),
        index_tensor(function, "rowptr", rowptr),
        index_tensor(function, "col", col),
        None if value is None else values_tensor(function, "value", value),
        matrix_shape(function, A.sparse_sizes()),
    )
