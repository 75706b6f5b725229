"""torch sparse tensors (CSR, CSC, BSR, BSC, COO) to canonical CSR, gradients kept."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.checks import matrix_shape
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.canonical import Names, from_compressed, from_coordinates
from sparsetile.intake.csr import CSR

__all__ = ["components", "from_torch"]

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def from_torch(function: str, A: Tensor) -> CSR:
    """Return canonical CSR of a torch sparse tensor.

    Entries are counted in the order of ``A.values()`` (``A._values()`` for COO), flattened for
    the blocked layouts, whose zeros inside blocks are entries like any other.
    """
    _check_layout(function, A)
    shape = matrix_shape(function, A.shape)
    if A.layout == torch.sparse_coo:
        return _from_coo(function, A, shape)
    indptr, indices, values = components(A)
    by_column = A.layout in _BY_COLUMN
    names = Names(
        function,
        indptr="ccol_indices" if by_column else "crow_indices",
        indices="row_indices" if by_column else "col_indices",
    )
    return from_compressed(
        names,
        indptr,
        indices,
        values,
        shape,
        by_column=by_column,
        block=(values.shape[1], values.shape[2]) if A.layout in _BLOCKED else (1, 1),
    )


def components(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three tensors of a sparse 2-D tensor, without copying.

    (indptr, indices, values) of a compressed layout, (rows, columns, values) of COO. The values
    of a compressed layout are differentiable; those of COO are not (see ``_from_coo``).
    """
    if A.layout == torch.sparse_coo:
        rows, columns = A._indices().unbind(0)
        return rows, columns, A._values()
    if A.layout in _BY_ROW:
        return A.crow_indices(), A.col_indices(), A.values()
    return A.ccol_indices(), A.row_indices(), A.values()


def _from_coo(function: str, A: Tensor, shape: tuple[int, int]) -> CSR:
    names = Names(function, rows="indices[0]", columns="indices[1]")
    rows, columns, stored = components(A)
    if not (A.requires_grad and torch.is_grad_enabled()):
        return from_coordinates(names, rows, columns, stored, shape)
    if A.is_coalesced():
        return from_coordinates(names, rows, columns, A.values(), shape)
    # torch gives gradients to the values of a coalesced tensor only. Coalesced order is canonical
    # order, so its values fit; half types are widened because coalescing adds in their own type.
    csr = from_coordinates(names, rows, columns, stored, shape)
    wide = A.to(torch.float32) if A.dtype.itemsize < 4 else A
    return csr.with_values(wide.coalesce().values().to(A.dtype))


def _check_layout(function: str, A: Tensor) -> None:
    edges = A.layout == torch.strided and A.ndim == 2 and 2 in A.shape
    if edges and not (A.is_floating_point() or A.is_complex()):
        form = "" if A.shape[0] == 2 else ".t()"
        raise type_error(
            function, "A", "a sparse matrix", f"an edge_index of shape {tuple(A.shape)}",
            f"Pass (edge_index{form}, weight or None), with the shape if A is not square",
        )  # fmt: skip
    if A.layout == torch.strided:
        raise type_error(
            function, "A", "a sparse matrix", f"a dense tensor of shape {tuple(A.shape)}",
            "Call A.to_sparse_csr() first",
        )  # fmt: skip
    if A.layout not in (torch.sparse_coo, *_BY_ROW, *_BY_COLUMN):
        raise type_error(
            function, "A", "a sparse tensor of layout CSR, CSC, COO, BSR or BSC",
            f"layout {A.layout}", "Call A.to_sparse_csr() first",
        )  # fmt: skip
    if A.ndim != 2 or A.dense_dim():
        extra = f" with {A.dense_dim()} dense dimensions" if A.dense_dim() else ""
        raise value_error(
            function, "A", "a matrix of two sparse dimensions", f"shape {tuple(A.shape)}{extra}",
            "Pass one matrix at a time",
        )  # fmt: skip
    if A.device.type == "meta":
        raise value_error(
            function, "A", "a tensor that holds data", "one on the meta device",
            "Move the matrix to the CPU or a GPU first",
        )  # fmt: skip
