"""Sums of columns over all rows: host side of ``column_sums.cuh``, and of ``epilogue_gradient.cu``.

torch sums the columns of a tall matrix with a buffer of up to twice the matrix (float32, 18333 x
256: 37.6 MB), which was the peak of a training step's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS, vector_widths
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "COLUMN_DTYPES", "COLUMN_LANES", "COLUMN_THREADS", "COLUMN_UNROLL", "EPILOGUE_GRADIENT",
    "ColumnGrid", "column_grid", "epilogue_gradient_config",
]  # fmt: skip

COLUMN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMN_THREADS = 256
# Lanes of a row, and rows of a thread that are in flight.
COLUMN_LANES, COLUMN_UNROLL = (4, 16), 4
# Thread blocks that fill a current GPU (two on each of 132 SMs), and sets of rows below which
# another block costs more than it saves.
_BLOCKS, _SETS = 264, 8


@dataclass(frozen=True)
class ColumnGrid:
    """Lanes and thread blocks of a kernel that sums columns."""

    lanes: int
    chunks: int
    slabs: int

    def scratch(self, vector: int, sums: int) -> tuple[int, int]:
        """Return the bytes of all blocks' partial sums, ``sums`` of each column, and the counters
        of arrived blocks."""
        if self.chunks == 1:
            return 0, 0
        return self.chunks * self.slabs * self.lanes * vector * sums * 4, self.slabs


def column_grid(rows: int, n: int, vector: int) -> ColumnGrid:
    """Return the grid for ``rows`` of ``n`` columns, which fixes the order of the sums."""
    count = -(-n // vector)
    lanes = next((each for each in COLUMN_LANES if each >= count), COLUMN_LANES[-1])
    slabs = -(-count // lanes)
    sets = -(-rows // (COLUMN_THREADS // lanes))
    chunks = min(-(-sets // _SETS), -(-_BLOCKS // slabs))
    return ColumnGrid(lanes, max(chunks, 1), slabs)


def epilogue_gradient_config(
    dtype: torch.dtype, vector: int, lanes: int, relu: bool
) -> dict[str, ConfigValue]:
    """Constants of ``epilogue_gradient.cu``: through ReLU and bias, or the bias alone."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": vector,
        "kLanes": lanes,
        "kUnroll": COLUMN_UNROLL,
        "kThreads": COLUMN_THREADS,
        "kRelu": relu,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, lanes, relu in itertools.product(COLUMN_DTYPES, COLUMN_LANES, (False, True)):
        for vector in vector_widths(dtype):
            yield epilogue_gradient_config(dtype, vector, lanes, relu)


EPILOGUE_GRADIENT = KernelSpec(
    file="epilogue/epilogue_gradient.cu",
    params=ParamStruct.of(
        pointer("grad", "const E::Storage*", "[rows, n]"),
        pointer("c", "const E::Storage*", "kRelu: the same shape"),
        pointer("masked", "E::Storage*", "kRelu: the same shape, contiguous rows"),
        pointer("sums", "float*", "[n]"),
        pointer("partials", "float*", "[slab][chunk] sums of thread blocks"),
        pointer("arrivals", "int*", "[slab]"),
        i64("rows"),
        i64("grad_stride", "of a row, in elements"),
        i64("c_stride"),
        i32("n"),
    ),
    configs=_configs,
    shared_memory=True,
)
