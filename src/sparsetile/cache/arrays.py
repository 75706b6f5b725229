"""Products of CSR arrays as they came: no plan, no copy, nothing kept.

On the CPU a plan has nothing that a product needs: the kernel finds chunks of rows of equal cost by
itself, and checks row pointers and columns as it reads them. So a product costs the same the first
time and the thousandth, and reads what is in the arrays then. Wrong arrays are left to planning,
which says what is wrong with them.

Bits are those of a plan if columns ascend in each row. Otherwise a row is added in the order of its
entries, while plans sort them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.core.device import HOST
from sparsetile.intake import CSR
from sparsetile.intake.recognise import is_scipy
from sparsetile.kernels.cpu.api import product_of_arrays
from sparsetile.plan.modes import PLAIN_TYPES, any_autocast, plain_call
from sparsetile.systems.cpu.cost import SPARSE_SHARE

__all__ = ["product_as_it_is"]

# Whether products on the CPU need no plan.
UNPLANNED_ON_CPU = True

_ELEMENTS = (torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)
# Rows, columns and entries from which nothing is computed here.
_LIMIT, _MOST_ENTRIES = 2**31, 2**40
# Share of the host's rate that a dense product reaches (systems/dense/cost.py), and seconds for an
# entry in which a plan is found again: values and columns are digested at 2 GB/s.
_DENSE_SHARE, _DIGEST = 0.55, 4e-9


def product_as_it_is(A: Any, B: Any, reduce: str = "sum") -> Tensor | None:
    """Return A·B of CSR arrays on the CPU; None if a plan has to compute it, or to refuse it.

    Parameters
    ----------
    A
        What :func:`sparsetile.spmm` accepts.
    B : Tensor
        Dense.
    reduce : str
        Other reductions than sums are left to plans, which count entries of one place as one.
    """
    if type(B) not in PLAIN_TYPES or not B.is_cpu or not UNPLANNED_ON_CPU:
        return None
    if B.dtype not in _ELEMENTS or B.layout is not torch.strided or B.is_neg():
        return None
    if reduce != "sum" or not plain_call() or any_autocast() or torch._C._is_tracing():
        return None
    found = _arrays(A)
    if found is None or profiler._is_profiler_enabled:
        return None
    indptr, indices, values, (rows, cols), nnz = found
    if values is not None:
        if values.dtype is not B.dtype or values.shape != indices.shape or values.is_neg():
            return None
        if values.requires_grad and torch.is_grad_enabled():
            return None
    shape = B.shape
    wide = len(shape) == 2
    if (
        (B.requires_grad and torch.is_grad_enabled())
        or not (wide or len(shape) == 1)
        or shape[0] != cols
        or (wide and not B.is_contiguous() and B.stride(1) != 1)
        or indptr.shape[0] != rows + 1
        or indptr.dtype not in _INDICES
        or indices.dtype not in _INDICES
        or nnz > indices.shape[0]
        or rows >= _LIMIT
        or cols >= _LIMIT
        or nnz > _MOST_ENTRIES
        or _dense_pays(rows, cols, nnz, shape[1] if wide else 1)
    ):
        return None
    return product_of_arrays(indptr, indices, values, nnz, cols, B)


def _dense_pays(rows: int, cols: int, nnz: int, n: int) -> bool:
    """Whether a plan is predicted to multiply as dense, and to save more than it takes to find."""
    saved = 2 * n * (nnz / SPARSE_SHARE - rows * cols / _DENSE_SHARE) / HOST.dense_flops
    return saved > _DIGEST * nnz


# Types of NumPy's arrays that torch takes, in this machine's byte order.
_NATIVE = frozenset(np.dtype(each) for each in ("i4", "i8", "f4", "f8"))

_Arrays = tuple[Tensor, Tensor, "Tensor | None", tuple[int, int], int]


def _arrays(A: Any) -> _Arrays | None:
    """Return row pointers, columns, values, shape and number of entries of a CSR matrix in the
    host's memory; None of other inputs. All three are one-dimensional and contiguous."""
    kind = type(A)
    if kind is Tensor:
        # torch has compared the sizes of its parts.
        if A.layout is not torch.sparse_csr or not A.is_cpu or len(A.shape) != 2:
            return None
        if A.requires_grad and torch.is_grad_enabled():
            return None
        parts, shape = (A.crow_indices(), A.col_indices(), A.values()), tuple(A.shape)
    elif kind is tuple:
        if len(A) != 4 or not isinstance(A[3], (tuple, list)) or len(A[3]) != 2:
            return None
        parts, shape = A[:3], tuple(A[3])
        if type(shape[0]) is not int or type(shape[1]) is not int:
            return None
    elif kind is CSR:
        parts, shape = (A.indptr, A.indices, A.values), A.shape
    elif is_scipy(A) and A.format == "csr" and A.ndim == 2:
        return _scipy_arrays(A)
    else:
        return None
    indptr, indices, values = map(_tensor, parts)
    if not _plain(indptr) or not _plain(indices) or not (values is None or _plain(values)):
        return None
    return indptr, indices, values, shape, indices.shape[0]


def _scipy_arrays(A: Any) -> _Arrays | None:
    """The same of scipy's arrays, which may have room for more entries behind the last one."""
    parts = A.indptr, A.indices, A.data
    for part in parts:
        if type(part) is not np.ndarray or part.ndim != 1 or part.dtype not in _NATIVE:
            return None
        flags = part.flags
        if not (flags.c_contiguous and flags.writeable):
            return None
    indptr, indices, values = map(torch.from_numpy, parts)
    return indptr, indices, values, A.shape, int(parts[0][-1])


def _tensor(part: Any) -> Any:
    """Return a NumPy array as a tensor of the same memory; torch warns of arrays that may not be
    written, and does not have all types."""
    if type(part) is np.ndarray and part.flags.writeable and part.dtype.kind in "if":
        return torch.from_numpy(part)
    return part


def _plain(part: Any) -> bool:
    """Whether the kernel can read a part of A where it is, if its type is right."""
    return type(part) in PLAIN_TYPES and part.is_cpu and part.ndim == 1 and part.is_contiguous()
