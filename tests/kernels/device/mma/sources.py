"""Kernels around the headers of ``mma/``: sources, and the cases that are tested."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch

from sparsetile.jit import KernelSource
from sparsetile.jit.params import i32, pointer
from tests.kernels.device.primitives import BF16, F16, F32, FP8, MMA_TYPES, NAMES, primitive

_primitive = partial(primitive, Path(__file__).parent)


def tile_product(dtype: torch.dtype, weighted: bool, stack: int, stored: bool) -> KernelSource:
    return _primitive(
        "tile_product",
        {"ELEMENT": NAMES[dtype], "kWeighted": weighted, "kStack": stack, "kStored": stored},
        pointer("bitmaps", "const u64*"),
        pointer("values", "const E::Storage*"),
        pointer("b", "const E::Storage*", "[8, 8 kSpan]"),
        pointer("weights", "u32*", "[32, kStack, words]"),
        pointer("c", "float*", "[8 kStack, 8 kSpan]"),
        pointer("count", "int*"),
        i32("tile"),
        i32("begin"),
        i32("end"),
    )


def registers(out: torch.dtype) -> KernelSource:
    return _primitive(
        "registers",
        {"OUTPUT": NAMES[out]},
        pointer("given", "const u32*"),
        pointer("rounded", "u32*"),
        pointer("transposed", "u32*"),
        pointer("pairs", "u32*"),
    )


def wgmma_shared(dtype: torch.dtype, k_major: bool) -> KernelSource:
    return _primitive(
        "wgmma_shared",
        {"ELEMENT": NAMES[dtype], "kKMajor": k_major, "kRowBytes": 64 if dtype is FP8 else 128},
        pointer("a", "const E::Storage*"),
        pointer("b", "const E::Storage*"),
        pointer("c", "float*", "[64, 128]"),
    )


def wgmma_registers(dtype: torch.dtype, columns: int) -> KernelSource:
    return _primitive(
        "wgmma_registers",
        {"ELEMENT": NAMES[dtype], "kCols": columns},
        pointer("a", "const E::Storage*", "[64, kK]"),
        pointer("b", "const E::Storage*", "[kK, kCols]"),
        pointer("c", "float*", "[64, kCols]"),
    )


TILE_PRODUCTS = tuple(itertools.product(MMA_TYPES, (True, False), (1, 2), (True, False)))
WGMMA_SHARED = (
    *itertools.product((F16, BF16), (True, False)), (F32, True), (FP8, True),
)  # fmt: skip
WGMMA_REGISTERS = tuple(itertools.product(MMA_TYPES, (128, 256)))

SOURCES = (
    *(tile_product(*case) for case in TILE_PRODUCTS),
    *(registers(out) for out in (F16, BF16)),
    *(wgmma_shared(*case) for case in WGMMA_SHARED),
    *(wgmma_registers(*case) for case in WGMMA_REGISTERS),
)
