"""Host side of ``spmm_rstile.cu``: configurations, limits, choice of slabs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import MMA_ELEMENTS as ELEMENTS
from sparsetile.kernels.csr import RowTile, element_types, out_dtypes
from sparsetile.kernels.params import (
    BUNDLES,
    EPILOGUE,
    OPERANDS,
    POSITIONS,
    SECTIONS,
    STRIDES,
    TREE,
)
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "ELEMENTS", "ROWS", "SPMM_RSTILE", "THREADS", "WINDOWS", "Slabs", "choose_slabs",
    "rstile_config",
]  # fmt: skip

THREADS = 128
WARPS = THREADS // 32
ACCESS_BYTES = 16
# Columns of a warp: its sums for sixteen rows take half as many registers.
WIDTHS = (32, 64, 128)
ROW_LANES = 8
GROUP = 256
# Steps in a warp's ring, including the current one.
STAGES = 2
# Blocks an SM should hold, which limits the registers.
_MIN_BLOCKS = {32: 5, 64: 5, 128: 4}


@dataclass(frozen=True)
class Slabs:
    """The distribution of the columns of B."""

    columns: int  # columns of a warp on windows
    shift: int  # 2**shift neighbouring slabs make a group, which a row of the grid covers
    rows: RowTile  # columns of a group of lanes on rows

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.columns << self.shift

    def groups(self, n: int) -> int:
        """Groups that cover ``n`` columns."""
        return -(-n // self.group)

    @property
    def warps(self) -> int:
        """Warps of an SM that work on windows."""
        return WARPS * _MIN_BLOCKS[self.columns]

    @property
    def row_slabs(self) -> int:
        """Slabs of rows that cover a group."""
        return -(-self.group // self.rows.slab)


def _row_tile(dtype: torch.dtype, n: int, group: int) -> RowTile:
    """Lanes and vectors for residual rows, which are usually short: few lanes with several vectors
    each, so that a warp works on four rows, if they fit exactly."""
    vector = ACCESS_BYTES // dtype.itemsize
    for times in (4, 2) if dtype.itemsize == 4 else (2,):
        tile = RowTile(vector, ROW_LANES, times)
        if n % tile.slab == 0:
            return tile
    covering = -(-min(n, group) // vector)
    return RowTile(vector, next((a for a in (4, 8, 16) if a >= covering), 16))


def choose_slabs(dtype: torch.dtype, n: int, widths: tuple[int, ...] = WIDTHS) -> Slabs:
    """Return the slabs for ``n`` columns, a multiple of 16 bytes.

    ``widths``: the columns that a warp may cover.
    """
    columns = next((c for c in widths if c >= n), widths[-1])
    shift = min((GROUP // columns).bit_length() - 1, max(0, (-(-n // columns) - 1).bit_length()))
    return Slabs(columns, shift, _row_tile(dtype, n, columns << shift))


def _in_flight(slabs: Slabs) -> int:
    """Rows of B that a group of lanes has in flight: as many as the windows' registers allow."""
    most = 8 if slabs.columns > WIDTHS[0] and slabs.rows.times <= 2 else 4
    return min(most, slabs.rows.lanes)


def rstile_config(
    dtype: torch.dtype, slabs: Slabs, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_rstile.cu``. ``weighted`` concerns only residual rows."""
    return {
        **element_types(dtype, out_dtype),
        "kCols": slabs.columns,
        "kStages": STAGES,
        "kRowVec": slabs.rows.vector,
        "kRowLanes": slabs.rows.lanes,
        "kRowTimes": slabs.rows.times,
        "kRowUnroll": _in_flight(slabs),
        "kThreads": THREADS,
        "kMinBlocks": _MIN_BLOCKS[slabs.columns],
        "kWeighted": weighted,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, weighted in itertools.product(ELEMENTS, (True, False)):
        for n in (8, 16, 32, 40, 64, 72, 128, 192):  # one per kind of slabs
            slabs = choose_slabs(dtype, n)
            for out in out_dtypes(dtype):
                yield rstile_config(dtype, slabs, weighted, out_dtype=out)


# Parameters of all hybrid kernels: rows on CUDA cores, and windows without their weights.
ROWS = (
    pointer("items", "const int4*", "rows, as in kernels/csr.py"),
    pointer("columns", "const int*", "of A's entries"),
    pointer("values", "const E::Storage*"),
    *OPERANDS,
    *BUNDLES,
    *STRIDES,
    *TREE,
    *EPILOGUE,
    *SECTIONS,
    i32("n"),
    i32("slabs", "of rows, all groups"),
)
WINDOWS = (
    *POSITIONS,
    pointer("window_items", "const int4*", "first window, first tile, end, slot or -windows"),
    pointer("row_window_offset", "const int*"),
    pointer("tile_columns", "const int*", "eight a tile"),
    pointer("window_parent_of_slot", "const int*"),
    pointer("window_nodes", "const int4*"),
    pointer("window_arrivals", "int*"),
    pointer("window_partials", "char*"),
    i32("window_slot_count"),
    i32("window_node_count"),
    i32("window_item_count"),
    i32("shared_item_count", "the first of them: all warps of a block work on one"),
    i32("window_slabs", "of windows, all groups"),
    i32("window_blocks"),
    i32("slab_shift"),
    i32("row_slabs", "of rows, in a group"),
)
SPMM_RSTILE = KernelSpec(
    file="windows/spmm_rstile.cu",
    # In the join of warps' sums and the exact recomputation, once per item; 8 of them around the
    # loop over steps in half types. The times of docs/explanation/notes/rsh.md include them.
    allowed_spills=68,
    params=ParamStruct.of(
        *ROWS,
        *WINDOWS,
        pointer("bitmaps", "const u64*", "two a tile"),
        pointer("fragments", "const E::Storage*"),
    ),
    configs=_configs,
    shared_memory=True,
)
