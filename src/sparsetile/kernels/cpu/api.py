"""The CPU kernels on torch tensors: checks, dtypes, strides and the number of threads.

Matrices are canonical CSR (`intake.csr`) and were checked there: column numbers are trusted, so
``B`` must have at least as many rows as A has columns. Only :func:`product_of_arrays` takes arrays
as they come, and checks them on the way. float16 and bfloat16 are converted to float32 and back. A
tensor whose columns are not adjacent in memory is copied; any row stride is read in place.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.kernels.cpu.memory import HUGE_BYTES, empty_output
from sparsetile.kernels.cpu.pool import run_shared

if TYPE_CHECKING:
    from sparsetile.kernels.cpu.machine_code import Kernel

__all__ = [
    "Prepared", "add_products", "arrays_fit", "prepare_product", "product_of_arrays",
    "sampled_product_of_arrays", "sddmm", "spmm_extremum", "spmm_sum", "spmm_won",
]  # fmt: skip

# Work that pays for waking one more thread, in multiply-adds: about 100 us of one core.
WORK_PER_THREAD = 1 << 20
# Cost of a row besides its entries, in entries (as in balance.row_chunks).
_ROW_COST = 4
# Chunks of rows that a kernel finds by itself: many more than cores, to balance slow chunks.
_CHUNKS = 64
# Entries that are checked, and then still in cache when they are multiplied.
_CHECKED = 1 << 15
# Mean entries of rows that are too short for wide panels.
_SHORT_ROW = 8
# Bytes of a row of B that are used at once.
_PANEL_BYTES = 512
# Narrower products cost as much as this many columns: one vector register.
_LEAST_COLUMNS = 16

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The numbers that a kernel takes (`entries`).
_LAYOUTS = {
    name: struct.Struct(f"=14q{rest}")
    for name, rest in {
        "spmm_sum": "2d4q", "spmm_extremum": "3q", "spmm_won": "4q", "sddmm": "q",
    }.items()
}  # fmt: skip
_TwoCounters = ctypes.c_int64 * 2  # tasks that were claimed; whether an index is wrong


@functools.cache
def cache_bytes(level: int) -> int:
    """Bytes of a core's own cache (level 2) or of the last one (3), from Linux or a guess."""
    try:
        place = f"/sys/devices/system/cpu/cpu0/cache/index{level}/size"
        return int(Path(place).read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return {2: 1 << 20, 3: 1 << 25}[level]


@functools.cache
def _kernel(name: str, indptr: torch.dtype, indices: torch.dtype, element: torch.dtype) -> Kernel:
    """Return a compiled kernel of these types."""
    from sparsetile.kernels.cpu.machine_code import load_kernel  # imports LLVM

    return load_kernel(
        name, *(str(each).removeprefix("torch.") for each in (indptr, indices, element))
    )


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
    run to run and for any number of threads (``torch.get_num_threads()``). ``indptr`` is int64,
    ``indices`` int32 and below K, ``values`` of any float type or None for ones, ``bounds`` from
    `balance.row_chunks`. B and ``out``, which do not overlap, have one float type and any strides.
    With ``beta == 0`` ``out`` is not read. ``mean`` divides each row's sum by its number of
    entries.
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
    B, values = _readable(B, dtype), _values(values, dtype)
    target = out if _in_place(out, dtype) else _staging(out, dtype, copy=beta != 0)
    made = prepare_product(indptr, indices, values, B, bounds, alpha, beta, mean)
    made(B.data_ptr(), target, (indptr, indices, values, bounds, B))
    if target is not out:
        out.copy_(target)


class Prepared(NamedTuple):
    """A product without the addresses of B and C, for one shape and one set of strides of B.

    Keep the tensors as long as it is used.
    """

    kernel: Kernel
    layout: struct.Struct
    threads: int
    schedule: tuple[int, int, int, int]
    sparse: tuple[int, int, int, int]
    b_stride: int
    columns: int
    arguments: tuple[Any, ...]

    def __call__(self, b: int, C: Tensor, owners: tuple[Any, ...]) -> bool:
        """Write C from B at an address; return whether all indices were right, if checked.

        The sampled product reads both. ``owners`` are kept until the last thread has left the
        kernel.
        """
        counters = _TwoCounters()
        packed = self.layout.pack(
            ctypes.addressof(counters),
            *self.schedule,
            *self.sparse,
            b,
            self.b_stride,
            C.data_ptr(),
            C.stride(0),
            self.columns,
            *self.arguments,
        )
        if self.threads == 1:
            self.kernel(packed)
        else:
            run_shared(self.kernel, (packed,), (counters, C, *owners), self.threads)
        return not counters[1]


def prepare_product(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    B: Tensor,
    bounds: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    mean: bool = False,
) -> Prepared:
    """Prepare :func:`spmm_sum` for matrices like B, which is in a type that kernels compute in.

    Nothing is checked. ``values`` are of B's type and contiguous.
    """
    rows, nnz = indptr.shape[0] - 1, indices.shape[0]
    (k, columns), stride = B.shape, B.stride(0)
    threads = _threads(rows, nnz, columns)
    schedule = (bounds.data_ptr(), rows, bounds.shape[0] - 1, threads)
    sparse = _sparse(indptr, indices, values, nnz)
    arguments = (alpha, beta, mean, *_hints(rows, nnz, k, columns, B.dtype), -1)
    kernel = _kernel("spmm_sum", indptr.dtype, indices.dtype, B.dtype)
    layout = _LAYOUTS["spmm_sum"]
    return Prepared(kernel, layout, threads, schedule, sparse, stride, columns, arguments)


def product_of_arrays(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    nnz: int,
    cols: int,
    B: Tensor,
    mean: bool = False,
) -> Tensor | None:
    """Return A·B, or the mean of each row's products, of CSR arrays as they came.

    Bits are those of :func:`spmm_sum`. Nothing is copied, nothing outside of the arrays is read.
    They are contiguous, of int32 or int64, ``values`` of B's type; the last row pointer has to be
    ``nnz``, columns below ``cols``. B [K, N] or [K] is float32 or float64, with unit column stride.
    None if row pointers or columns are wrong.
    """
    shape, dtype = B.shape, B.dtype
    rows, wide = indptr.shape[0] - 1, len(shape) == 2
    columns = shape[1] if wide else 1
    if rows * columns * dtype.itemsize < HUGE_BYTES:
        out = B.new_empty(rows, columns)  # the quickest
    else:
        out = empty_output(rows, columns, dtype)
    if rows and columns:
        threads = _threads(rows, nnz, columns)
        few = threads == 1 and columns <= _LEAST_COLUMNS
        chunks = min(_CHUNKS, 1 + nnz // _CHECKED) if few else _CHUNKS
        # As in Prepared, which takes longer to make than a small product.
        counters = _TwoCounters()
        packed = _LAYOUTS["spmm_sum"].pack(
            ctypes.addressof(counters), 0, rows, chunks, threads,
            indptr.data_ptr(), indices.data_ptr(), 0 if values is None else values.data_ptr(), nnz,
            B.data_ptr(), B.stride(0), out.data_ptr(), columns, columns,
            1.0, 0.0, mean, *_hints(rows, nnz, cols, columns, dtype), cols,
        )  # fmt: skip
        kernel = _kernel("spmm_sum", indptr.dtype, indices.dtype, dtype)
        if threads == 1:
            kernel(packed)
        else:
            run_shared(kernel, (packed,), (counters, out, indptr, indices, values, B), threads)
        if counters[1]:
            return None
    return out if wide else out[:, 0]


def arrays_fit(indptr: Tensor, indices: Tensor, cols: int) -> bool:
    """Whether row pointers ascend from 0 to the number of entries, and all columns exist."""
    nnz = indices.shape[0]
    if int(indptr[0]) != 0 or int(indptr[-1]) != nnz or not bool((indptr.diff() >= 0).all()):
        return False
    if nnz == 0:
        return True
    least, greatest = torch.aminmax(indices)
    return int(least) >= 0 and int(greatest) < cols


def sampled_product_of_arrays(
    indptr: Tensor, indices: Tensor, G: Tensor, B: Tensor
) -> Tensor | None:
    """Return dot(G[row], B[column]) of each entry of CSR arrays as they came; see :func:`sddmm`.

    None if row pointers or columns are wrong. The type is that of the sums.
    """
    dtype = _compute_dtype(G.dtype)
    if not arrays_fit(indptr, indices, B.shape[0]):
        return None
    out = torch.zeros(indices.shape[0], dtype=dtype)
    if indices.shape[0]:
        owners = (indptr, indices, None, None, _readable(G, dtype), _readable(B, dtype), out)
        _launch("sddmm", dtype, owners, B.shape[1], (out.data_ptr(),))
    return out


def _sparse(
    indptr: Tensor, indices: Tensor, values: Tensor | None, nnz: int
) -> tuple[int, int, int, int]:
    """Return A as kernels take it."""
    pointer = 0 if values is None else values.data_ptr()
    return indptr.data_ptr(), indices.data_ptr(), pointer, nnz


def _hints(rows: int, nnz: int, k: int, columns: int, dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether to fetch rows of B ahead, and to read as much of each as possible."""
    row = columns * dtype.itemsize
    if k * row <= cache_bytes(2):  # the quickest
        return False, False
    fetch = k * min(row, _PANEL_BYTES) > cache_bytes(2)
    # Rows of a few entries gain nothing: the prefetched rows belong to later rows anyway.
    long_rows = nnz > _SHORT_ROW * rows
    return fetch, long_rows and k * row > 2 * cache_bytes(3)


def _threads(rows: int, nnz: int, columns: int) -> int:
    """Return the threads that pay for themselves."""
    work = (nnz + _ROW_COST * rows) * max(columns, _LEAST_COLUMNS)
    if work < WORK_PER_THREAD:  # the quickest
        return 1
    return max(1, min(torch.get_num_threads(), 1 + work // WORK_PER_THREAD))


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
    """Write the largest (or smallest) product of each row to ``out``, its place to ``arg``.

    Candidates of ``out[i, j]`` are ``A[i, k] * B[k, j]`` over the stored entries of row i. The
    first of equal ones wins; NaN beats everything, the first NaN wins (as ``torch.amax``). ``arg``,
    int32 with any strides, gets the winner's place among its row's entries. An empty row gives 0
    and -1. Other tensors are as in `spmm_sum`.
    """
    _check_matrix("spmm_extremum", indptr, indices, values, bounds)
    _check_dense("spmm_extremum", "B", B, None)
    shape = (indptr.numel() - 1, B.shape[1])
    _check_dense("spmm_extremum", "out", out, B.dtype, shape)
    _check_dense("spmm_extremum", "arg", arg, torch.int32, shape)
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    dtype = _compute_dtype(B.dtype)
    B, values = _readable(B, dtype), _values(values, dtype)
    target = out if _in_place(out, dtype) else _staging(out, dtype, copy=False)
    positions = arg if _in_place(arg, torch.int32) else _staging(arg, torch.int32, copy=False)
    arguments = (positions.data_ptr(), positions.stride(0), maximum)
    owners = (indptr, indices, values, bounds, B, target, positions)
    _launch("spmm_extremum", dtype, owners, columns, arguments)
    if target is not out:
        out.copy_(target)
    if positions is not arg:
        arg.copy_(positions)


def spmm_won(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    grad: Tensor,
    arg: Tensor,
    order: Tensor,
    starts: Tensor,
    out: Tensor,
    bounds: Tensor,
) -> None:
    """Write to ``out`` the gradient for B of what `spmm_extremum` wrote.

    ``indptr``, ``indices``, ``values`` and ``bounds`` are those of the transpose, ``order`` (int64)
    the entry of A that is each of its entries, ``starts`` (int64) A's row pointers, ``arg`` the
    winners' places and ``grad`` the gradient of the extremum, of its shape.
    """
    _check_matrix("spmm_won", indptr, indices, values, bounds)
    _check_dense("spmm_won", "grad", grad, None)
    _check_dense("spmm_won", "arg", arg, torch.int32, (grad.shape[0], grad.shape[1]))
    _check_dense("spmm_won", "out", out, grad.dtype, (indptr.numel() - 1, grad.shape[1]))
    for name, tensor, size in (
        ("order", order, indices.numel()),
        ("starts", starts, len(grad) + 1),
    ):
        _check_tensor("spmm_won", name, tensor, (torch.int64,), (size,))
    if out.numel() == 0:
        return
    dtype = _compute_dtype(grad.dtype)
    grad, values, arg = _readable(grad, dtype), _values(values, dtype), arg.contiguous()
    order, starts = order.contiguous(), starts.contiguous()
    target = out if _in_place(out, dtype) else _staging(out, dtype, copy=False)
    arguments = (order.data_ptr(), starts.data_ptr(), arg.data_ptr(), arg.stride(0))
    owners = (indptr, indices, values, bounds, grad, target, order, starts, arg)
    _launch("spmm_won", dtype, owners, grad.shape[1], arguments)
    if target is not out:
        out.copy_(target)


def sddmm(
    indptr: Tensor, indices: Tensor, G: Tensor, B: Tensor, out: Tensor, bounds: Tensor
) -> None:
    """Write ``dot(G[row of e], B[column of e])`` to ``out[e]`` for every stored entry e.

    This is the gradient of A's values when G is the gradient of ``A @ B``. Sums run in float32
    (float64 for float64) over a fixed number of lanes and then across them: the same bits from run
    to run and for any number of threads. G, B and ``out`` have one type and any strides; other
    tensors are as in `spmm_sum`.
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
    _launch("sddmm", dtype, owners, B.shape[1], (target.data_ptr(),))
    if target is not out:
        out.copy_(target)


def _launch(
    name: str, dtype: torch.dtype, owners: tuple[Any, ...], columns: int, arguments: tuple[Any, ...]
) -> None:
    """Turn tensors into addresses and run the kernel on as many threads as pay off."""
    indptr, indices, values, bounds, first, second = owners[:6]
    rows, nnz = indptr.numel() - 1, indices.numel()
    threads = _threads(rows, nnz, columns)
    schedule = (0, rows, _CHUNKS, threads)  # chunks that the kernel finds
    if bounds is not None:
        schedule = (bounds.data_ptr(), rows, bounds.numel() - 1, threads)
    sparse = _sparse(indptr, indices, values, nnz)
    kernel = _kernel(name, indptr.dtype, indices.dtype, dtype)
    made = Prepared(
        kernel, _LAYOUTS[name], threads, schedule, sparse, first.stride(0), columns, arguments
    )
    made(first.data_ptr(), second, owners)


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
            function, argument, f"of shape {list(shape)}", list(tensor.shape),
            "Match it to A and B",
        )  # fmt: skip


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
            function, argument, "two-dimensional", f"shape {list(matrix.shape)}",
            "Call once for each matrix of a batch",
        )  # fmt: skip


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
                function, argument, f"contiguous, one-dimensional, with {least} elements or more",
                f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
                "Pass what intake and balance.row_chunks made",
            )  # fmt: skip
