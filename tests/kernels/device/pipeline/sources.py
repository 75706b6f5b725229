"""Kernels around the headers of ``pipeline/``: sources, and the cases that are tested."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch

from sparsetile.jit import KernelSource
from sparsetile.jit.params import i32, pointer
from tests.kernels.device.primitives import BF16, F16, F32, NAMES, primitive

_primitive = partial(primitive, Path(__file__).parent)


def copy_ring(dtype: torch.dtype, columns: int, stages: int, whole: bool) -> KernelSource:
    return _primitive(
        "copy_ring",
        {"ELEMENT": NAMES[dtype], "kCols": columns, "kStages": stages, "kWhole": whole},
        pointer("ids", "const int*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "E::Storage*", "[tiles, 8, kCols]"),
        i32("b_row_bytes"),
        i32("tiles"),
        i32("n"),
    )


def barrier_ring(stages: int, bulk: bool) -> KernelSource:
    return _primitive(
        "barrier_ring",
        {"kStages": stages, "kBulk": bulk},
        pointer("given", "const u32*", "[steps, 128]"),
        pointer("out", "u32*", "[2, steps, 128]"),
        i32("steps"),
    )


COPY_RINGS = (
    *((F32, 32, stages, True) for stages in (1, 2, 4)),
    (F32, 128, 2, True), (F32, 64, 2, False), (F16, 64, 2, True), (BF16, 128, 3, False),
)  # fmt: skip
BARRIER_RINGS = tuple(itertools.product((1, 3, 4), (False, True)))

SOURCES = (
    *(copy_ring(*case) for case in COPY_RINGS),
    *(barrier_ring(*case) for case in BARRIER_RINGS),
)
