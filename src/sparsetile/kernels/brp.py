"""Host side of ``spmm_brp.cu``: configurations and choice of slabs.

The kernel differs from ``spmm_rstile.cu`` only in A's part of a step and in entries outside tiles,
so slabs, rows and launches are those of ``kernels/rstile.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import out_dtypes
from sparsetile.kernels.rstile import ELEMENTS, ROWS, WINDOWS, Slabs, choose_slabs, rstile_config
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "DIRECT_TILES", "FIXED", "PAPER_FIXED", "SPMM_BRP", "brp_config", "choose_brp_slabs",
]  # fmt: skip

# Entries of a tile column that kernels are compiled for; the format supports 1 to 16.
FIXED = (1, 2, 4, 8)
# The paper's, which has its write-back by atomics and its loads straight into registers, too.
PAPER_FIXED = 1
# Tiles that a warp loads straight into registers (direct_groups.cuh): the paper's group.
DIRECT_TILES = 4
# Columns of a warp: the system is for narrow B, and entries outside tiles need registers.
WIDTHS = (32, 64)
# Blocks an SM should hold, which limits the registers.
_MIN_BLOCKS = {32: 5, 64: 4}
_DIRECT_MIN_BLOCKS = {32: 4, 64: 3}  # eight vectors of B a lane, and the next group's entries


def choose_brp_slabs(dtype: torch.dtype, n: int) -> Slabs:
    """Return the slabs for ``n`` columns, a multiple of 16 bytes."""
    return choose_slabs(dtype, n, WIDTHS)


def brp_config(
    dtype: torch.dtype,
    slabs: Slabs,
    weighted: bool,
    fixed: int,
    *,
    out_dtype: torch.dtype | None = None,
    atomic: bool = False,
    direct: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_brp.cu``. ``atomic``: pieces of windows are added to a float32 C;
    ``direct``: groups of float32 with one entry a column go straight into registers.
    """
    return {
        **rstile_config(dtype, slabs, weighted, out_dtype=torch.float32 if atomic else out_dtype),
        "kMinBlocks": (_DIRECT_MIN_BLOCKS if direct else _MIN_BLOCKS)[slabs.columns],
        "kFixed": fixed,
        "kAtomic": atomic,
        "kDirect": direct,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, weighted, fixed in itertools.product(ELEMENTS, (True, False), FIXED):
        for n in (8, 16, 32, 40, 64):  # one per kind of slabs
            slabs = choose_brp_slabs(dtype, n)
            papers = fixed == PAPER_FIXED
            for direct in (False, True) if papers and dtype is torch.float32 else (False,):
                for out in out_dtypes(dtype):
                    yield brp_config(dtype, slabs, weighted, fixed, out_dtype=out, direct=direct)
            if papers:
                yield brp_config(dtype, slabs, weighted, fixed, atomic=True)


SPMM_BRP = KernelSpec(
    file="windows/spmm_brp.cu",
    # Of groups straight into registers in slabs of 64 columns; 48 in half types with eight entries
    # per column, in the store and join of windows.
    allowed_spills=64,
    params=ParamStruct.of(
        *ROWS,
        *WINDOWS,
        pointer("slot_ids", "const unsigned char*", "8 * row + column, a byte an entry"),
        pointer("slot_values", "const E::Storage*"),
        pointer("window_rest", "const int*", "first of each window's entries outside tiles"),
        pointer("rest_rows", "const unsigned char*", "0 to 15, a byte an entry, by rows"),
        pointer("rest_columns", "const int*"),
        pointer("rest_values", "const E::Storage*"),
    ),
    configs=_configs,
    shared_memory=True,
)
