"""cuSPARSE through ctypes: the SpMM and SDDMM algorithms by name, with their preprocessing.

torch calls cuSPARSE with its default algorithm and without preprocessing. The yardstick here is
the best that the library offers: CSR algorithms 1, 2 and 3 after ``cusparseSpMM_preprocess``,
Blocked-ELL, and SDDMM. B and C are row-major. Every status is checked. The library is the one
that torch itself loads.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import UnsupportedError
from sparsetile.intake.csr import CSR

__all__ = ["BlockedEllSpmm", "CsrSddmm", "CsrSpmm", "blocked_ell", "library_version"]

# Values of cusparse.h and library_types.h.
_INDEX_32I = 2
_BASE_ZERO = 0
_NON_TRANSPOSE, _TRANSPOSE = 0, 1
_ORDER_ROW = 2
_R_32F, _R_64F, _R_16F, _R_16BF = 0, 1, 2, 14
_TYPES = {
    torch.float32: _R_32F,
    torch.float64: _R_64F,
    torch.float16: _R_16F,
    torch.bfloat16: _R_16BF,
}
# CSR algorithm 2 is 6: 5 is a COO algorithm.
CSR_ALGORITHMS = {1: 4, 2: 6, 3: 12}
_BLOCKED_ELL_ALGORITHM = 13
_SDDMM_DEFAULT = 0

_POINTER = ctypes.c_void_p
_INT64 = ctypes.c_int64
_ENUM = ctypes.c_int
# The arguments that all SpMM and SDDMM calls begin with, up to the algorithm.
_PRODUCT = (
    _POINTER, _ENUM, _ENUM, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _ENUM, _ENUM,
)  # fmt: skip
_SIGNATURES: dict[str, Sequence[Any]] = {
    "cusparseCreate": (_POINTER,),
    "cusparseSetStream": (_POINTER, _POINTER),
    "cusparseGetVersion": (_POINTER, _POINTER),
    "cusparseCreateCsr": (
        _POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER,
        _ENUM, _ENUM, _ENUM, _ENUM,
    ),
    "cusparseCreateBlockedEll": (
        _POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _POINTER, _ENUM, _ENUM, _ENUM,
    ),
    "cusparseCreateDnMat": (_POINTER, _INT64, _INT64, _INT64, _POINTER, _ENUM, _ENUM),
    "cusparseDestroySpMat": (_POINTER,),
    "cusparseDestroyDnMat": (_POINTER,),
    **{f"cusparse{op}{step}": (*_PRODUCT, _POINTER)
       for op in ("SpMM", "SDDMM") for step in ("_bufferSize", "_preprocess", "")},
}  # fmt: skip


def _candidates() -> list[str]:
    """Places of libcusparse, torch's own first."""
    found: list[str] = []
    for root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for pattern in ("nvidia/cu*/lib", "nvidia/cusparse/lib"):
            found += sorted(str(path) for path in Path(root).glob(f"{pattern}/libcusparse.so*"))
    torch_lib = Path(torch.__file__).parent / "lib"
    found += sorted(str(path) for path in torch_lib.glob("libcusparse*.so*"))
    system = ctypes.util.find_library("cusparse")
    if system:
        found.append(system)
    return [*found, "/usr/local/cuda/lib64/libcusparse.so", "libcusparse.so.12", "libcusparse.so"]


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        for function, arguments in _SIGNATURES.items():
            entry = getattr(library, function)
            entry.argtypes = list(arguments)
            entry.restype = _ENUM
        library.cusparseGetErrorString.argtypes = [_ENUM]
        library.cusparseGetErrorString.restype = ctypes.c_char_p
        return library
    raise UnsupportedError(
        "bench: libcusparse must be loadable for the cuSPARSE baselines, got none. Install torch "
        "for CUDA, or the CUDA toolkit. Tried: " + "; ".join(tried)
    )


def _call(function: str, *arguments: Any) -> None:
    """Call a cuSPARSE function and raise on any status but success."""
    library = _library()
    status = getattr(library, function)(*arguments)
    if status != 0:
        text = library.cusparseGetErrorString(status)
        raise RuntimeError(f"{function}: {(text or b'unknown error').decode()} (status {status})")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cusparseCreate", ctypes.byref(handle))
    return handle


def library_version() -> str:
    """Return cuSPARSE's version, such as ``12.6.3``."""
    number = ctypes.c_int()
    _call("cusparseGetVersion", _handle(torch.cuda.current_device()), ctypes.byref(number))
    return f"{number.value // 1000}.{number.value // 100 % 10}.{number.value % 100}"


class _Descriptor:
    """Owns a matrix descriptor and keeps the tensors it points to alive."""

    def __init__(self, create: str, destroy: str, keep: Sequence[Tensor], *arguments: Any) -> None:
        self.handle = ctypes.c_void_p()
        self._keep = tuple(keep)
        self._destroy = getattr(_library(), destroy)
        _call(create, ctypes.byref(self.handle), *arguments)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)


def _dense(matrix: Tensor) -> _Descriptor:
    if matrix.dim() != 2 or matrix.stride(1) != 1:
        raise ValueError(f"cusparse: matrix must be row-major 2-D, got strides {matrix.stride()}.")
    rows, cols = matrix.shape
    return _Descriptor(
        "cusparseCreateDnMat", "cusparseDestroyDnMat", [matrix],
        rows, cols, matrix.stride(0), matrix.data_ptr(), _TYPES[matrix.dtype], _ORDER_ROW,
    )  # fmt: skip


def _sparse(csr: CSR, values: Tensor) -> _Descriptor:
    if csr.nnz >= 2**31:
        raise UnsupportedError(f"cusparse: 32-bit offsets cannot hold {csr.nnz} entries.")
    indptr = csr.indptr.to(torch.int32)
    indices = csr.indices.contiguous()
    return _Descriptor(
        "cusparseCreateCsr", "cusparseDestroySpMat", [indptr, indices, values],
        csr.shape[0], csr.shape[1], csr.nnz,
        indptr.data_ptr(), indices.data_ptr(), values.data_ptr(),
        _INDEX_32I, _INDEX_32I, _BASE_ZERO, _TYPES[values.dtype],
    )  # fmt: skip


class _Product:
    """A prepared call: descriptors, scalars, workspace. ``run`` launches on torch's stream."""

    def __init__(
        self, family: str, operands: Sequence[_Descriptor], transpose_b: bool, algorithm: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        double = dtype is torch.float64
        scalar = ctypes.c_double if double else ctypes.c_float
        self._family = family
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._operands = tuple(operands)  # keeps descriptors and their tensors alive
        self._alpha, self._beta = scalar(1.0), scalar(0.0)
        first, second, third = (operand.handle for operand in operands)
        self._arguments = (
            _handle(self._index), _NON_TRANSPOSE, _TRANSPOSE if transpose_b else _NON_TRANSPOSE,
            ctypes.byref(self._alpha), first, second, ctypes.byref(self._beta), third,
            _R_64F if double else _R_32F, algorithm,
        )  # fmt: skip
        size = ctypes.c_size_t()
        self._bind_stream()
        _call(f"{family}_bufferSize", *self._arguments, ctypes.byref(size))
        self._workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=device)
        _call(f"{family}_preprocess", *self._arguments, self._workspace.data_ptr())

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.numel()

    def _bind_stream(self) -> None:
        stream = torch.cuda.current_stream(self._index).cuda_stream
        _call("cusparseSetStream", self._arguments[0], stream)

    def launch(self) -> None:
        self._bind_stream()
        _call(self._family, *self._arguments, self._workspace.data_ptr())


class CsrSpmm:
    """C = A·B by one CSR algorithm, preprocessed at construction.

    Parameters
    ----------
    csr : CSR
        A, on a CUDA device.
    values : Tensor [nnz]
        A's values in B's dtype; ones for a pattern.
    B, C : Tensor [K, N], [M, N]
        Row-major.
    algorithm : {1, 2, 3}
    """

    def __init__(self, csr: CSR, values: Tensor, B: Tensor, C: Tensor, algorithm: int) -> None:
        self.C = C
        operands = (_sparse(csr, values), _dense(B), _dense(C))
        self._product = _Product(
            "cusparseSpMM", operands, False, CSR_ALGORITHMS[algorithm], B.dtype, B.device
        )
        self.workspace_bytes = self._product.workspace_bytes

    def run(self) -> Tensor:
        """Launch on torch's current stream and return C."""
        self._product.launch()
        return self.C


def blocked_ell(csr: CSR, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return Blocked-ELL's column ids and values.

    Returns
    -------
    columns : Tensor int32 [ceil(M / block), width]
        Block column of each slot, -1 for padding; ``width`` is the longest block row.
    dense : Tensor [ceil(M / block) * block, width * block]
        Values, row-major, zero where A has no entry.
    """
    rows, cols = csr.shape
    block_rows, block_cols = -(-rows // block), -(-cols // block)
    row_ids, column_ids = csr.row_ids(), csr.indices.to(torch.int64)
    keys = (row_ids // block) * block_cols + column_ids // block
    blocks, slot_of_entry = torch.unique(keys, return_inverse=True)
    owner = blocks // max(block_cols, 1)
    counts = torch.bincount(owner, minlength=block_rows)
    first = torch.cumsum(counts, 0) - counts
    slot = torch.arange(blocks.numel(), device=blocks.device) - first[owner]
    width = int(counts.max()) if counts.numel() else 0
    columns = torch.full((block_rows, width), -1, dtype=torch.int32, device=csr.device)
    columns[owner, slot] = (blocks % max(block_cols, 1)).to(torch.int32)
    dense = torch.zeros(
        (block_rows * block, width * block), dtype=values.dtype, device=values.device
    )
    dense[row_ids, slot[slot_of_entry] * block + column_ids % block] = values
    return columns, dense


class BlockedEllSpmm:
    """C = A·B in Blocked-ELL. Rows of A, B and C are padded to a multiple of the block."""

    def __init__(self, csr: CSR, values: Tensor, B: Tensor, block: int) -> None:
        columns, dense = blocked_ell(csr, values, block)
        rows, cols = columns.shape[0] * block, -(-csr.shape[1] // block) * block
        padded = torch.zeros((cols, B.shape[1]), dtype=B.dtype, device=B.device)
        padded[: B.shape[0]] = B
        out = torch.empty((rows, B.shape[1]), dtype=B.dtype, device=B.device)
        self.C = out[: csr.shape[0]]
        self.format_bytes = columns.numel() * 4 + dense.numel() * dense.element_size()
        sparse = _Descriptor(
            "cusparseCreateBlockedEll", "cusparseDestroySpMat", [columns, dense],
            rows, cols, block, dense.shape[1], columns.data_ptr(), dense.data_ptr(),
            _INDEX_32I, _BASE_ZERO, _TYPES[dense.dtype],
        )  # fmt: skip
        self._product = _Product(
            "cusparseSpMM", (sparse, _dense(padded), _dense(out)), False,
            _BLOCKED_ELL_ALGORITHM, B.dtype, B.device,
        )  # fmt: skip

    def run(self) -> Tensor:
        """Launch on torch's current stream and return C."""
        self._product.launch()
        return self.C


class CsrSddmm:
    """dot(G[row], B[column]) for every entry of A's pattern."""

    def __init__(self, csr: CSR, G: Tensor, B: Tensor) -> None:
        self.values = torch.zeros(csr.nnz, dtype=B.dtype, device=B.device)
        operands = (_dense(G), _dense(B), _sparse(csr, self.values))
        self._product = _Product("cusparseSDDMM", operands, True, _SDDMM_DEFAULT, B.dtype, B.device)
        self.workspace_bytes = self._product.workspace_bytes

    def run(self) -> Tensor:
        """Launch on torch's current stream and return one value per entry."""
        self._product.launch()
        return self.values
