"""Kernels around the headers of ``epilogue/``: sources, and the cases that are tested."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sparsetile.jit import KernelSource
from sparsetile.jit.params import i32, i64, pointer
from sparsetile.kernels.params import EPILOGUE, POSITIONS, ROW_BIAS
from tests.kernels.device.primitives import BF16, F16, F32, F64, NAMES, primitive

_primitive = partial(primitive, Path(__file__).parent)


def epilogue(out: torch.dtype, vector: int, count: int, row_bias: bool) -> KernelSource:
    # A plain store where rows have a bias, a streaming one elsewhere: both are tried.
    acc = "double" if out is F64 else "float"
    return _primitive(
        "epilogue",
        {
            "OUTPUT": NAMES[out],
            "ACC": acc,
            "kVec": vector,
            "kCount": count,
            "kStream": not row_bias,
        },
        pointer("sums", "const Acc*", "[positions, n]"),
        pointer("c", "Out::Storage*"),
        *(ROW_BIAS if row_bias else ()),
        i64("c_row_stride"),
        i64("c_batch_stride"),
        *POSITIONS,
        *EPILOGUE,
        i32("n"),
    )


EPILOGUES = (
    *((out, vector, vector, False) for out in (F32, F16, BF16) for vector in (1, 2, 4, 8)),
    (F64, 1, 1, False), (F64, 2, 2, False), (F16, 2, 8, True), (F32, 4, 8, True),
)  # fmt: skip

SOURCES = (*(epilogue(*case) for case in EPILOGUES),)
