"""cuSPARSE through ctypes: SpMM, SpMV and SDDMM by algorithm, with their preprocessing.

torch calls cuSPARSE with its default algorithm and without preprocessing. The yardstick here is
the best that the library offers: CSR algorithms 1, 2 and 3 after ``cusparseSpMM_preprocess``, for
one column algorithms 1 and 2 of SpMV, and SDDMM. B and C are row-major. Every status is checked.
The library is the one that torch loads.
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

__all__ = ["CsrSddmm", "CsrSpmm", "CsrSpmv", "library_version"]

# Values of cusparse.h and library_types.h.
_INDEX_32I, _INDEX_64I = 2, 3
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
SPMV_ALGORITHMS = {1: 2, 2: 3}
_SDDMM_DEFAULT = 0

_POINTER = ctypes.c_void_p
_INT64 = ctypes.c_int64
_ENUM = ctypes.c_int
# The arguments that all SpMM and SDDMM calls begin with, up to the algorithm.
_PRODUCT = (
    _POINTER, _ENUM, _ENUM, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _ENUM, _ENUM,
)  # fmt: skip
# A vector has no transpose.
_VECTOR_PRODUCT = (_POINTER, _ENUM, *_PRODUCT[3:])
_SIGNATURES: dict[str, Sequence[Any]] = {
    "cusparseCreate": (_POINTER,),
    "cusparseSetStream": (_POINTER, _POINTER),
    "cusparseGetVersion": (_POINTER, _POINTER),
    "cusparseCreateCsr": (
        _POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER,
        _ENUM, _ENUM, _ENUM, _ENUM,
    ),
    "cusparseCreateDnMat": (_POINTER, _INT64, _INT64, _INT64, _POINTER, _ENUM, _ENUM),
    "cusparseCreateDnVec": (_POINTER, _INT64, _POINTER, _ENUM),
    "cusparseDestroySpMat": (_POINTER,),
    "cusparseDestroyDnMat": (_POINTER,),
    "cusparseDestroyDnVec": (_POINTER,),
    **{f"cusparse{op}{step}": (*arguments, _POINTER)
       for op, arguments in (("SpMM", _PRODUCT), ("SDDMM", _PRODUCT), ("SpMV", _VECTOR_PRODUCT))
       for step in ("_bufferSize", "_preprocess", "")},
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


def _vector(matrix: Tensor) -> _Descriptor:
    if matrix.dim() != 2 or matrix.shape[1] != 1 or not matrix.is_contiguous():
        raise ValueError(
            f"cusparse: vector must be a contiguous column, got shape {list(matrix.shape)} "
            f"with strides {matrix.stride()}."
        )
    return _Descriptor(
        "cusparseCreateDnVec", "cusparseDestroyDnVec", [matrix],
        matrix.shape[0], matrix.data_ptr(), _TYPES[matrix.dtype],
    )  # fmt: skip


def _sparse(csr: CSR, values: Tensor) -> _Descriptor:
    # Offsets of 64 bits only if 32 do not suffice; columns as the matrix has them.
    indptr = csr.indptr if csr.nnz >= 2**31 else csr.indptr.to(torch.int32)
    indices = csr.indices.contiguous()
    index_types = [_INDEX_64I if each.dtype is torch.int64 else _INDEX_32I
                   for each in (indptr, indices)]  # fmt: skip
    return _Descriptor(
        "cusparseCreateCsr", "cusparseDestroySpMat", [indptr, indices, values],
        csr.shape[0], csr.shape[1], csr.nnz,
        indptr.data_ptr(), indices.data_ptr(), values.data_ptr(),
        *index_types, _BASE_ZERO, _TYPES[values.dtype],
    )  # fmt: skip


class _Product:
    """A prepared call: descriptors, scalars, workspace. ``run`` launches on torch's stream."""

    def __init__(
        self, family: str, operands: Sequence[_Descriptor], operations: Sequence[int],
        algorithm: int, out: Tensor,
    ) -> None:  # fmt: skip
        double = out.dtype is torch.float64
        scalar = ctypes.c_double if double else ctypes.c_float
        self._family, self._out = family, out
        self._index = torch.cuda.current_device() if out.device.index is None else out.device.index
        self._operands = tuple(operands)  # keeps descriptors and their tensors alive
        self._alpha, self._beta = scalar(1.0), scalar(0.0)
        first, second, third = (operand.handle for operand in operands)
        self._arguments = (
            _handle(self._index), *operations,
            ctypes.byref(self._alpha), first, second, ctypes.byref(self._beta), third,
            _R_64F if double else _R_32F, algorithm,
        )  # fmt: skip
        size = ctypes.c_size_t()
        self._bind_stream()
        _call(f"{family}_bufferSize", *self._arguments, ctypes.byref(size))
        self._workspace = torch.empty(max(size.value, 16), dtype=torch.uint8, device=out.device)
        _call(f"{family}_preprocess", *self._arguments, self._workspace.data_ptr())
        self.workspace_bytes = self._workspace.numel()

    def _bind_stream(self) -> None:
        stream = torch.cuda.current_stream(self._index).cuda_stream
        _call("cusparseSetStream", self._arguments[0], stream)

    def run(self) -> Tensor:
        """Launch on torch's current stream and return the result."""
        self._bind_stream()
        _call(self._family, *self._arguments, self._workspace.data_ptr())
        return self._out


class CsrSpmm(_Product):
    """C = A·B by CSR algorithm 1, 2 or 3, preprocessed at construction.

    ``values`` are A's in B's dtype, ones for a pattern. B [K, N] and C [M, N] are row-major.
    """

    def __init__(self, csr: CSR, values: Tensor, B: Tensor, C: Tensor, algorithm: int) -> None:
        operands = (_sparse(csr, values), _dense(B), _dense(C))
        transposes = _NON_TRANSPOSE, _NON_TRANSPOSE
        super().__init__("cusparseSpMM", operands, transposes, CSR_ALGORITHMS[algorithm], C)


class CsrSpmv(_Product):
    """C = A·B of one column by SpMV's CSR algorithm 1 or 2, preprocessed at construction.

    ``values`` are A's in B's dtype, ones for a pattern. B [K, 1] and C [M, 1] are contiguous.
    """

    def __init__(self, csr: CSR, values: Tensor, B: Tensor, C: Tensor, algorithm: int) -> None:
        operands = (_sparse(csr, values), _vector(B), _vector(C))
        code = SPMV_ALGORITHMS[algorithm]
        super().__init__("cusparseSpMV", operands, (_NON_TRANSPOSE,), code, C)


class CsrSddmm(_Product):
    """dot(G[row], B[column]) for every entry of A's pattern."""

    def __init__(self, csr: CSR, G: Tensor, B: Tensor) -> None:
        values = torch.zeros(csr.nnz, dtype=B.dtype, device=B.device)
        operands = (_dense(G), _dense(B), _sparse(csr, values))
        transposes = _NON_TRANSPOSE, _TRANSPOSE
        super().__init__("cusparseSDDMM", operands, transposes, _SDDMM_DEFAULT, values)
