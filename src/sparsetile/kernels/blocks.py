"""Host side of ``spmm_block.cu`` and ``transpose_block.cu``: parameters and configurations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS, MAX_ACCESS_BYTES
from sparsetile.kernels.params import OPERANDS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BLOCK_THREADS", "LOOPS", "MAX_TRANSPOSED", "OUTSIDE", "SPMM_BLOCK", "TRANSPOSE_BLOCK",
    "TRANSPOSE_THREADS", "UNSORTED", "block_config", "block_lanes", "transpose_config",
]  # fmt: skip

# Bits of the first product's findings: an edge names no row or column, rows do not ascend, an edge
# leads from a node to itself.
OUTSIDE, UNSORTED, LOOPS = 1, 2, 4
BLOCK_THREADS = 256
# Lanes of a group, and the most entries that it processes alone.
_LANES = (8, 16, 32)
_ALONE = 512
# One thread block sorts the entries by column, up to this many entries and columns: their numbers
# have 16 bits each, and half of an entry's key fits the space of the digit counts.
TRANSPOSE_THREADS = 1024
MAX_TRANSPOSED = 2**14, 2**16


def block_lanes(n: int, vector: int) -> int:
    """Return the lanes of a row: as many as have columns of it."""
    return next((lanes for lanes in _LANES if lanes * vector >= n), _LANES[-1])


def block_config(dtype: torch.dtype, vector: int, lanes: int) -> dict[str, ConfigValue]:
    """Constants of ``spmm_block``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kThreads": BLOCK_THREADS,
        "kVec": vector,
        "kLanes": lanes,
        "kAlone": _ALONE,
    }


def _block_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for vector in (1, MAX_ACCESS_BYTES // dtype.itemsize):
            for lanes in _LANES:
                yield block_config(dtype, vector, lanes)


SPMM_BLOCK = KernelSpec(
    file="rows/spmm_block.cu",
    params=ParamStruct.of(
        pointer("targets", "const i64*", "row of each edge, of the first product; else null"),
        pointer("sources", "const i64*", "column of each edge"),
        pointer("found", "int*", "errors of the edges"),
        pointer("rows", "int*", "row of each entry, ascending"),
        pointer("columns", "int*"),
        pointer("order", "const int*", "place of entry i's column; null: i"),
        pointer("ends", "const int*", "[row_count], end of each row; null: searched"),
        pointer("divisors", "const int*", "of rows of B; null: all are 1"),
        pointer("lengths", "int*", "[row_count], written; null: not wanted"),
        pointer("bias", "const Acc*", "[n]; null: none"),
        *OPERANDS,
        i64("edges"),
        i64("b_row_bytes"),
        i32("row_count"),
        i32("column_count"),
        i32("n"),
        i32("mean"),
        i32("relu"),
    ),
    configs=_block_configs,
    shared_memory=True,
)


def transpose_config() -> dict[str, ConfigValue]:
    """Constants of ``transpose_block``."""
    return {"kThreads": TRANSPOSE_THREADS, "kMaxEdges": MAX_TRANSPOSED[0]}


def _transpose_configs() -> Iterator[dict[str, ConfigValue]]:
    yield transpose_config()


TRANSPOSE_BLOCK = KernelSpec(
    file="pack/transpose_block.cu",
    params=ParamStruct.of(
        pointer("columns", "const int*", "of each entry"),
        pointer("sorted", "int*", "[edges]"),
        pointer("order", "int*", "[edges]"),
        pointer("ends", "int*", "[column_count], end of each column in the sorted list"),
        i32("edges"),
        i32("column_count"),
    ),
    configs=_transpose_configs,
    shared_memory=True,
)
