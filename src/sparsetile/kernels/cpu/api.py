"""The CPU kernels on torch tensors: checks, dtypes, strides and the number of threads.

Matrices are canonical CSR (`intake.csr`) and were checked there: column numbers are trusted, so
``B`` must have at least as many rows as A has columns. float16 and bfloat16 are converted to
float32 and back. A tensor whose columns are not adjacent in memory is copied; any row stride is
read in place.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.kernels.cpu.pool import run_shared

__all__ = ["add_products", "empty_output", "sddmm", "spmm_extremum", "spmm_sum"]

# NumPy requests huge pages from this size on.
_HUGE_BYTES = 1 << 22
_ALIGNMENT = 64
# Freed results kept for products of the same size: how many, and the bytes of the largest.
_KEPT, KEPT_BYTES = 2, 1 << 28
# Work that pays for waking one more thread, in multiply-adds: about 100 us of one core.
WORK_PER_THREAD = 1 << 20
# Cost of a row besides its entries, in entries (as in balance.row_chunks).
_ROW_COST = 4
# Mean entries of rows that are too short for wide panels.
_SHORT_ROW = 8
# Bytes of a row of B that are used at once.
_PANEL_BYTES = 512
# Narrower products cost as much as this many columns: one vector register.
_LEAST_COLUMNS = 16

_kept: deque[np.ndarray[Any, Any]] = deque(maxlen=_KEPT)  # drops the oldest

_SCALAR = {torch.float32: np.float32, torch.float64: np.float64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def cache_bytes(level: int) -> int:
    """Bytes of a core's own cache (level 2) or of the last one (3), from Linux or a guess."""
    try:
        place = f"/sys/devices/system/cpu/cpu0/cache/index{level}/size"
        return int(Path(place).read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return {2: 1 << 20, 3: 1 << 25}[level]


@functools.cache
def _kernels() -> ModuleType:
    from sparsetile.kernels.cpu import loops  # numba takes half a second to import

    return loops


def empty_output(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor for a product.

    Parameters
    ----------
    rows, columns : int
        Shape of the result.
    dtype : torch.dtype
        Element type.

    Returns
    -------
    Tensor
        [rows, columns], contiguous, on a 64-byte boundary. Large ones come from NumPy, which
        requests huge pages, unlike torch. The last ones are kept for the next product of the same
        size: page faults can cost more than the product (web-NotreDame, N = 32: 8 of 17 ms, a
        development reading).
    """
    size = rows * columns * dtype.itemsize
    if size < _HUGE_BYTES:
        return torch.empty((rows, columns), dtype=dtype)
    return torch.from_numpy(_memory(size)).view(dtype).view(rows, columns)


def _memory(size: int) -> np.ndarray[Any, Any]:
    """Return unused bytes; they are kept for the next caller when they are freed."""
    memory = _kept_memory(size)
    if memory is None:
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        memory = raw[start : start + size]
    lent = memory[:]  # a separate object, which the tensor references
    weakref.finalize(lent, _take_back, memory).atexit = False
    return lent


def _kept_memory(size: int) -> np.ndarray[Any, Any] | None:
    for _ in range(len(_kept)):
        try:
            memory = _kept.popleft()  # atomic, so only one thread gets each
        except IndexError:  # another thread was faster
            return None
        if memory.size == size:
            return memory
        _kept.append(memory)
    return None


def _take_back(memory: np.ndarray[Any, Any]) -> None:
    if memory.size <= KEPT_BYTES:
        _kept.append(memory)


def spmm_sum(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    out: Tensor,
    alpha: float,
    beta: float,
    bounds: Tensor,
    mean: bool = False,
) -> None:
    """Write ``alpha * (A @ B) + beta * out`` to ``out``; A is M x K in canonical CSR.

    The products of a row are added in one fixed order by fused multiply-adds: the same bits from
    run to run and for any number of threads (``torch.get_num_threads()``).

    Parameters
    ----------
    indptr : Tensor
        int64 [M+1].
    indices : Tensor
        int32 [nnz], column of each entry. Trusted to be below K.
    values : Tensor or None
        [nnz], a float dtype, converted to the one the product is computed in; None if every entry
        is 1.
    B : Tensor
        [K, N], float16, bfloat16, float32 or float64, any strides.
    out : Tensor
        [M, N], dtype of ``B``, any strides. Must not overlap ``B``.
    alpha, beta : float
        Scale of the product and of the old ``out``. With ``beta == 0`` it is not read.
    bounds : Tensor
        int64 [chunks+1], from `balance.row_chunks`.
    mean : bool
        Divide each row's sum by its number of entries; an empty row gives 0.

    Raises
    ------
    TypeError, ValueError
        A tensor is not as described.
    """
    _check_matrix("spmm_sum", indptr, indices, values, bounds)
    _check_dense("spmm_sum", "B", B, None)
    _check_dense("spmm_sum", "out", out, B.dtype, (indptr.numel() - 1, B.shape[1]))
    add_products(indptr, indices, values, B, out, alpha, beta, bounds, mean)


def add_products(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    out: Tensor,
    alpha: float,
    beta: float,
    bounds: Tensor,
    mean: bool,
) -> None:
    """:func:`spmm_sum` without checks, for operands known to be valid."""
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    dtype = _compute_dtype(B.dtype)
    scalar = _SCALAR[dtype]
    B, values = _readable(B, dtype), _values(values, dtype)
    target = out if _in_place(out, dtype) else _staging(out, dtype, copy=beta != 0)
    row = columns * dtype.itemsize
    fetch = B.shape[0] * min(row, _PANEL_BYTES) > cache_bytes(2)
    # Rows of a few entries gain nothing: the prefetched rows belong to later rows anyway.
    long_rows = indices.numel() > _SHORT_ROW * rows
    scattered = long_rows and B.shape[0] * row > 2 * cache_bytes(3)
    arguments = (scalar(alpha), scalar(beta), bool(mean), fetch, scattered)
    owners = (indptr, indices, values, bounds, B, target)
    _launch(_kernels().spmm_sum, owners, columns, arguments)
    if target is not out:
        out.copy_(target)


def spmm_extremum(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    out: Tensor,
    arg: Tensor,
    maximum: bool,
    bounds: Tensor,
) -> None:
    """Write the largest (or smallest) product of each row to ``out``, its entry to ``arg``.

    Candidates of ``out[i, j]`` are ``A[i, k] * B[k, j]`` over the stored entries of row i. The
    first of equal ones wins; NaN beats everything, the first NaN wins (as ``torch.amax``).

    Parameters
    ----------
    indptr, indices, values, B, out, bounds : Tensor
        As in `spmm_sum`. An empty row gives 0.
    arg : Tensor
        int64 [M, N], any strides: number of the winning entry, 0 to nnz-1 in stored order; -1 for
        an empty row.
    maximum : bool
        True for the largest, False for the smallest.

    Raises
    ------
    TypeError, ValueError
        A tensor is not as described.
    """
    _check_matrix("spmm_extremum", indptr, indices, values, bounds)
    _check_dense("spmm_extremum", "B", B, None)
    shape = (indptr.numel() - 1, B.shape[1])
    _check_dense("spmm_extremum", "out", out, B.dtype, shape)
    _check_dense("spmm_extremum", "arg", arg, torch.int64, shape)
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    dtype = _compute_dtype(B.dtype)
    B, values = _readable(B, dtype), _values(values, dtype)
    target = out if _in_place(out, dtype) else _staging(out, dtype, copy=False)
    positions = arg if _in_place(arg, torch.int64) else _staging(arg, torch.int64, copy=False)
    arguments = ((positions.data_ptr(), positions.stride(0)), bool(maximum), _SCALAR[dtype](0))
    owners = (indptr, indices, values, bounds, B, target, positions)
    _launch(_kernels().spmm_extremum, owners, columns, arguments)
    if target is not out:
        out.copy_(target)
    if positions is not arg:
        arg.copy_(positions)


def sddmm(
    indptr: Tensor, indices: Tensor, G: Tensor, B: Tensor, out: Tensor, bounds: Tensor
) -> None:
    """Write ``dot(G[row of e], B[column of e])`` to ``out[e]`` for every stored entry e.

    This is the gradient of A's values when G is the gradient of ``A @ B``. Sums run in float32
    (float64 for float64) over a fixed number of lanes and then across them: the same bits from
    run to run and for any number of threads.

    Parameters
    ----------
    indptr, indices, bounds : Tensor
        As in `spmm_sum`.
    G : Tensor
        [M, N], any strides.
    B : Tensor
        [K, N], dtype of ``G``, any strides.
    out : Tensor
        [nnz], dtype of ``G``, any stride.

    Raises
    ------
    TypeError, ValueError
        A tensor is not as described.
    """
    _check_matrix("sddmm", indptr, indices, None, bounds)
    _check_dense("sddmm", "B", B, None)
    _check_dense("sddmm", "G", G, B.dtype, (indptr.numel() - 1, B.shape[1]))
    _check_tensor("sddmm", "out", out, (B.dtype,), (indices.numel(),))
    if indices.numel() == 0:
        return
    dtype = _compute_dtype(B.dtype)
    G, B = _readable(G, dtype), _readable(B, dtype)
    direct = out.dtype == dtype and out.is_contiguous() and not out.is_neg()
    target = out if direct else torch.empty(out.shape, dtype=dtype)
    owners = (indptr, indices, None, bounds, G, B, target)
    _launch(_kernels().sddmm, owners, B.shape[1], (target.data_ptr(), _SCALAR[dtype](0)))
    if target is not out:
        out.copy_(target)


def _launch(kernel: Any, owners: tuple[Any, ...], columns: int, arguments: tuple[Any, ...]) -> None:
    """Turn tensors into addresses and run the kernel on as many threads as pay off."""
    indptr, indices, values, bounds, first, second = owners[:6]
    nnz = indices.numel()
    work = (nnz + _ROW_COST * indptr.numel()) * max(columns, _LEAST_COLUMNS)
    threads = max(1, min(torch.get_num_threads(), 1 + work // WORK_PER_THREAD))
    counter = ctypes.c_int64(0)
    run_shared(
        kernel,
        (
            ctypes.addressof(counter),
            (bounds.data_ptr(), bounds.numel() - 1, threads),
            (
                indptr.data_ptr(),
                indices.data_ptr(),
                0 if values is None else values.data_ptr(),
                nnz,
            ),
            (first.data_ptr(), first.stride(0)),
            (second.data_ptr(), second.stride(0)),
            columns,
            *arguments,
        ),
        (counter, *owners),
        threads,
    )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def _in_place(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can use the matrix in place."""
    adjacent = matrix.stride(1) == 1 or matrix.shape[1] == 1
    return adjacent and matrix.dtype == dtype and not matrix.is_neg()


def _readable(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix if _in_place(matrix, dtype) else matrix.to(dtype).resolve_neg().contiguous()


def _staging(out: Tensor, dtype: torch.dtype, *, copy: bool) -> Tensor:
    """Return a matrix that the kernel can write in place of ``out``."""
    staging = empty_output(out.shape[0], out.shape[1], dtype)
    return staging.copy_(out) if copy else staging


def _values(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(dtype).resolve_neg().contiguous()


def _check_tensor(
    function: str,
    argument: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None,
) -> None:
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise type_error(function, argument, "a tensor", kind, "Convert it with torch.as_tensor")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = str(tensor.dtype).removeprefix("torch.")
        raise type_error(function, argument, expected, actual, "Convert it with .to()")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        place = f"{tensor.layout} on {tensor.device}"
        raise value_error(
            function, argument, "a dense tensor on the CPU", place, "Convert it with .cpu()"
        )
    if shape is not None and tensor.shape != shape:
        raise value_error(
            function,
            argument,
            f"of shape {list(shape)}",
            list(tensor.shape),
            "Match it to A and B",
        )


def _check_dense(
    function: str,
    argument: str,
    matrix: Tensor,
    dtype: torch.dtype | None,
    shape: tuple[int, int] | None = None,
) -> None:
    _check_tensor(function, argument, matrix, _FLOATS if dtype is None else (dtype,), shape)
    if matrix.dim() != 2:
        raise value_error(
            function,
            argument,
            "two-dimensional",
            f"shape {list(matrix.shape)}",
            "Call once for each matrix of a batch",
        )


def _check_matrix(
    function: str, indptr: Tensor, indices: Tensor, values: Tensor | None, bounds: Tensor
) -> None:
    _check_tensor(function, "indptr", indptr, (torch.int64,), None)
    _check_tensor(function, "indices", indices, (torch.int32,), None)
    _check_tensor(function, "bounds", bounds, (torch.int64,), None)
    if values is not None:
        _check_tensor(function, "values", values, _FLOATS, (indices.numel(),))
    for argument, tensor, least in (
        ("indptr", indptr, 1),
        ("indices", indices, 0),
        ("bounds", bounds, 2),
    ):
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < least:
            raise value_error(
                function,
                argument,
                f"contiguous, one-dimensional, with {least} elements or more",
                f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
                "Pass what intake and balance.row_chunks made",
            )
