"""Host side of ``finish_dense.cu``: configurations and the launch of a product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.params import EPILOGUE, OPERANDS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "FINISH_BLOCKS",
    "FINISH_DENSE",
    "FINISH_THREADS",
    "WATCH_BLOCKS",
    "finish_config",
    "finish_vector",
]

FINISH_THREADS = 256
# Thread blocks per SM: half of what its threads allow, so that none spills its registers; one if
# most of them only look at a row.
FINISH_BLOCKS, WATCH_BLOCKS = 4, 1
_ACCESS_BYTES = 16


def finish_vector(dtype: torch.dtype, n: int) -> int:
    """Return the columns of a thread: an access of 16 bytes of sums if ``n`` allows it."""
    most = _ACCESS_BYTES // max(dtype.itemsize, 4)
    return most if n % most == 0 else 1


def finish_config(
    dtype: torch.dtype, vector: int, weighted: bool, *, plain: bool
) -> dict[str, ConfigValue]:
    """Constants of ``finish_dense.cu``; ``plain``: sums are C, without an epilogue."""
    sums = torch.float32 if dtype.itemsize == 2 else dtype
    return {
        "ELEMENT": ELEMENTS[dtype],
        "SUMS": ELEMENTS[sums],
        "kThreads": FINISH_THREADS,
        "kBlocks": FINISH_BLOCKS,
        "kVec": vector,
        "kWeighted": weighted,
        "kPlain": plain,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, weighted in itertools.product(ELEMENTS, (True, False)):
        for vector in (1, finish_vector(dtype, 0)):
            for plain in (False, True) if dtype.itemsize > 2 else (False,):
                yield finish_config(dtype, vector, weighted, plain=plain)


FINISH_DENSE = KernelSpec(
    file="rows/finish_dense.cu",
    params=ParamStruct.of(
        pointer("columns", "const int*", "of A's entries"),
        pointer("values", "const E::Storage*"),
        *OPERANDS,
        pointer("sums", "const Sum::Storage*", "[rows, n]"),
        *EPILOGUE,
        i64("b_row_stride", "in elements"),
        i32("rows"),
        i32("n"),
    ),
    configs=_configs,
)
