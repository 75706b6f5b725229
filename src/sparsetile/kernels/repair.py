"""Host side of ``repair_strided.cu``: configurations. Sizes of launches of ``redo.cuh``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS, out_dtypes
from sparsetile.kernels.params import EPILOGUE, OPERANDS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "REDO_BLOCKS", "REDO_THREADS", "REPAIR_BLOCKS", "REPAIR_STRIDED", "REPAIR_THREADS",
    "repair_config",
]  # fmt: skip

REPAIR_THREADS = 256
# Thread blocks per SM: enough to hide the loads, and few to start if nothing is spoilt.
REPAIR_BLOCKS = 4
# Threads that share a unit of redo.cuh, and their thread blocks per SM: 128 registers each.
REDO_THREADS, REDO_BLOCKS = 256, 2
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def repair_config(
    dtype: torch.dtype, out_dtype: torch.dtype, weighted: bool
) -> dict[str, ConfigValue]:
    """Constants of ``repair_strided.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[out_dtype],
        "kThreads": REPAIR_THREADS,
        "kWeighted": weighted,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, weighted in itertools.product(_TYPES, (True, False)):
        for out_dtype in out_dtypes(dtype):
            yield repair_config(dtype, out_dtype, weighted)


REPAIR_STRIDED = KernelSpec(
    file="rows/repair_strided.cu",
    params=ParamStruct.of(
        pointer("flag", "const int*", "0: nothing to do"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("values", "const E::Storage*"),
        *ROW_BIAS,
        *OPERANDS,
        i64("b_row_stride", "in elements, as the others"),
        i64("b_column_stride"),
        i64("c_row_stride"),
        i64("c_column_stride"),
        *EPILOGUE,
        i32("rows"),
        i32("n"),
    ),
    configs=_configs,
)
