"""Tensor maps: TMA descriptors of a matrix (sm_90 and newer), as 16 words of 64 bits.

A map goes into a kernel's parameter struct by value. cuda.core hides the bytes of its maps, so
this module calls the driver through ctypes: the driver needs the map at a multiple of 64 bytes,
which an object of cuda.bindings does not guarantee.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch

from sparsetile.core.errors import value_error

__all__ = ["MAP_ALIGNMENT", "MAP_WORDS", "NO_MAP", "TensorMap", "encode_matrix", "map_bytes"]

TensorMap = tuple[int, ...]

MAP_WORDS = 16
# In place of a map that the kernel will not read: there is nothing to copy.
NO_MAP: TensorMap = (0,) * MAP_WORDS
MAP_ALIGNMENT = 64
_MAP_BYTES = 8 * MAP_WORDS
_WORDS = struct.Struct(f"={MAP_WORDS}Q")
# Widest row of a box in bytes: the swizzle's width.
_SWIZZLE_BYTES, _FP8_SWIZZLE_BYTES = 128, 64
_MAX_BOX_ROWS = 256
_ADDRESS_STEP = 16
_STRIDE_LIMIT = 2**40
_DATA_TYPES = {
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
    torch.float8_e4m3fn: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
}
# First driver interface with tensor maps.
_SINCE = 12000


def map_bytes(words: TensorMap) -> bytes:
    """Return a map as a prepared launch takes it."""
    return _WORDS.pack(*words)


@functools.cache
def _encoder() -> Any:
    """``cuTensorMapEncodeTiled`` of the loaded driver."""
    from cuda.bindings import driver

    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    status, address, *_ = driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", _SINCE, flags)
    if int(status) != 0 or not address:
        raise RuntimeError(
            f"tensor map: the driver must offer cuTensorMapEncodeTiled, got {status!r}. Install a "
            "driver of CUDA 12 or newer; `sparsetile doctor` names the one that is used."
        )
    integer, words = ctypes.c_int, ctypes.c_void_p
    arguments = [words, integer, ctypes.c_uint32, ctypes.c_void_p, *[words] * 4, *[integer] * 4]
    return ctypes.CFUNCTYPE(integer, *arguments)(int(address))


def _swizzle_bytes(item: int) -> int:
    return _FP8_SWIZZLE_BYTES if item == 1 else _SWIZZLE_BYTES


def _check(pointer: int, row_bytes: int, width: int, box: tuple[int, int], item: int) -> None:
    if pointer % _ADDRESS_STEP or row_bytes % _ADDRESS_STEP:
        raise value_error(
            "tensor map", "the matrix", f"aligned to {_ADDRESS_STEP} bytes",
            f"address {pointer:#x} with rows {row_bytes} bytes apart", "Copy it to aligned memory",
        )  # fmt: skip
    if not width * item <= row_bytes < _STRIDE_LIMIT:
        raise value_error(
            "tensor map", "the rows", f"at least {width * item} and under 2^40 bytes apart",
            f"{row_bytes} bytes", "Copy it to a contiguous matrix",
        )  # fmt: skip
    widest = _swizzle_bytes(item)
    if not 0 < box[0] <= _MAX_BOX_ROWS or not 0 < box[1] * item <= widest:
        raise value_error(
            "tensor map", "box", f"at most {_MAX_BOX_ROWS} rows of {widest} bytes", box,
            "Copy several boxes",
        )  # fmt: skip


def encode_matrix(
    pointer: int, dtype: torch.dtype, shape: tuple[int, int], row_bytes: int, box: tuple[int, int]
) -> TensorMap:
    """Return the map of a row-major matrix, copied box by box in the 128-byte swizzle.

    FP8 uses the 64-byte swizzle: 64 columns are its widest box. The address and the row stride in
    bytes are multiples of 16. A box of (rows, columns) is at most 256 rows of 128 bytes, or 64 of
    FP8; its elements outside of ``shape`` are copied as zeros. RuntimeError if the driver has no
    tensor maps.
    """
    _check(pointer, row_bytes, shape[1], box, dtype.itemsize)
    from cuda.bindings import driver

    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{_swizzle_bytes(dtype.itemsize)}B"
    memory = ctypes.create_string_buffer(_MAP_BYTES + MAP_ALIGNMENT)
    address = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    # The driver lists the contiguous dimension first.
    status = _encoder()(
        address, int(getattr(driver.CUtensorMapDataType, _DATA_TYPES[dtype])), 2, pointer,
        (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, swizzle)),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"tensor map: the driver must accept {shape[0]} x {shape[1]} {dtype} at {pointer:#x}, "
            f"rows {row_bytes} bytes apart, boxes of {box[0]} x {box[1]}, got "
            f"{driver.CUresult(status)!r}. If the GPU is of sm_90 or newer, report this as a bug."
        )
    return tuple((ctypes.c_uint64 * MAP_WORDS).from_address(address))
