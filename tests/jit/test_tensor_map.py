"""Tensor maps: what the driver is asked for, what it is not asked for, and what it answers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparsetile.jit import encode_matrix
from sparsetile.jit import tensor_map as module
from sparsetile.jit.tensor_map import MAP_WORDS, NO_MAP

SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
)  # fmt: skip


class Driver:
    """Stands for the driver: a C function that notes its arguments and writes 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.status = 0
        self.asked: list[dict[str, Any]] = []
        self.function = SIGNATURE(self._encode)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def _encode(self, to, kind, rank, pointer, dims, strides, box, steps, *modes):
        self.asked.append({
            "aligned": to % 64 == 0, "kind": kind, "rank": rank, "pointer": pointer,
            "dims": dims[:2], "strides": strides[:1], "box": box[:2], "steps": steps[:2],
            "modes": modes,
        })  # fmt: skip
        (ctypes.c_uint64 * MAP_WORDS).from_address(to)[:] = range(MAP_WORDS)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from cuda.bindings import driver as bindings

    made = Driver()
    module._encoder.cache_clear()
    monkeypatch.setattr(
        bindings, "cuGetProcAddress", lambda name, version, flags: (0, made.address, 0)
    )
    yield made
    module._encoder.cache_clear()


def test_the_driver_is_asked_for_the_matrix_columns_first(driver):
    from cuda.bindings import driver as bindings

    words = encode_matrix(4096, torch.bfloat16, (300, 70), 160, (64, 32))
    assert words == tuple(range(MAP_WORDS))
    (asked,) = driver.asked
    assert asked.pop("aligned"), "the driver wants a map at a multiple of 64 bytes"
    assert asked == {
        "kind": int(bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        "rank": 2, "pointer": 4096, "dims": [70, 300], "strides": [160], "box": [32, 64],
        "steps": [1, 1],
        "modes": (
            int(bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        ),
    }  # fmt: skip


def test_each_type_has_its_own_map(driver):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        encode_matrix(0, dtype, (8, 8), 64, (8, 8))
    assert len({asked["kind"] for asked in driver.asked}) == 3


def test_fp8_is_copied_as_bytes_in_a_swizzle_of_half_the_width(driver):
    from cuda.bindings import driver as bindings

    encode_matrix(0, torch.float8_e4m3fn, (300, 70), 80, (256, 64))
    (asked,) = driver.asked
    assert asked["kind"] == int(bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8)
    assert asked["modes"][1] == int(bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B)
    with pytest.raises(ValueError) as caught:
        encode_matrix(0, torch.float8_e4m3fn, (300, 70), 80, (64, 65))
    assert str(caught.value).startswith("tensor map: box must be at most 256 rows of 64 bytes, got")


def test_sizes_beyond_32_bits_reach_the_driver(driver):
    encode_matrix(2**40, torch.float16, (2**31, 8), 2**39, (64, 64))
    assert driver.asked[0]["pointer"] == 2**40
    assert driver.asked[0]["dims"] == [8, 2**31] and driver.asked[0]["strides"] == [2**39]


def test_a_driver_error_names_the_matrix(driver):
    driver.status = 1
    with pytest.raises(RuntimeError) as caught:
        encode_matrix(4096, torch.float16, (300, 70), 160, (64, 64))
    text = str(caught.value)
    assert text.startswith(
        "tensor map: the driver must accept 300 x 70 torch.float16 at 0x1000, rows 160 bytes "
        "apart, boxes of 64 x 64, got <CUresult.CUDA_ERROR_INVALID_VALUE"
    )
    assert text.endswith("If the GPU is of sm_90 or newer, report this as a bug.")


def test_a_driver_without_tensor_maps_is_named_as_the_reason(driver, monkeypatch):
    from cuda.bindings import driver as bindings

    monkeypatch.setattr(bindings, "cuGetProcAddress", lambda *_: (500, 0, 0))
    with pytest.raises(RuntimeError) as caught:
        encode_matrix(0, torch.float16, (8, 8), 16, (8, 8))
    assert str(caught.value) == (
        "tensor map: the driver must offer cuTensorMapEncodeTiled, got 500. Install a driver of "
        "CUDA 12 or newer; `sparsetile doctor` names the one that is used."
    )


@pytest.mark.parametrize("pointer, row_bytes", [(4098, 160), (4096, 150)])
def test_rejects_misaligned_matrices_before_calling_the_driver(driver, pointer, row_bytes):
    with pytest.raises(ValueError) as caught:
        encode_matrix(pointer, torch.float16, (300, 70), row_bytes, (64, 64))
    assert str(caught.value) == (
        f"tensor map: the matrix must be aligned to 16 bytes, got address {pointer:#x} with rows "
        f"{row_bytes} bytes apart. Copy it to aligned memory."
    )
    assert driver.asked == []


@pytest.mark.parametrize("row_bytes", [0, 128, 2**40])
def test_rows_that_overlap_or_are_too_far_apart_are_refused(driver, row_bytes):
    with pytest.raises(ValueError) as caught:
        encode_matrix(0, torch.float16, (300, 70), row_bytes, (64, 64))
    assert str(caught.value) == (
        "tensor map: the rows must be at least 140 and under 2^40 bytes apart, got "
        f"{row_bytes} bytes. Copy it to a contiguous matrix."
    )


@pytest.mark.parametrize("box", [(0, 64), (257, 64), (64, 65), (64, 0)])
def test_a_box_wider_than_the_swizzle_or_too_high_is_refused(driver, box):
    with pytest.raises(ValueError) as caught:
        encode_matrix(0, torch.float16, (300, 70), 160, box)
    assert str(caught.value) == (
        f"tensor map: box must be at most 256 rows of 128 bytes, got {box}. Copy several boxes."
    )


def test_an_unused_map_has_the_size_of_a_map():
    assert len(NO_MAP) == MAP_WORDS and not any(NO_MAP)
