"""Host side of ``spmm_csr.cu`` and ``sddmm_csr.cu``: configurations, limits, choice of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BUNDLE_DTYPES",
    "ELEMENTS",
    "LANES",
    "SDDMM_CSR",
    "SPMM_CSR",
    "THREADS",
    "RowTile",
    "choose_tile",
    "out_dtypes",
    "pipeline_pays",
    "sddmm_config",
    "spmm_config",
    "vector_width",
]

# torch dtype -> trait of element.cuh
ELEMENTS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
# Types whose four values of a bundle fit one access.
BUNDLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
THREADS = 128
# 16-byte accesses are the widest.
MAX_ACCESS_BYTES = 16
# Lanes of a group for full vectors; narrower vectors are for odd widths and strides only, and
# four lanes for rows of 64 bytes.
LANES = (4, 8, 16, 32)
NARROW_LANES = (8, 32)
# The least of a row of B that should be read at once: less wastes DRAM sectors.
SLAB_BYTES = 128
BUNDLE_ROWS = 4


@dataclass(frozen=True)
class RowTile:
    """Columns a group of lanes covers at once: ``lanes`` lanes of ``vector`` elements."""

    vector: int
    lanes: int

    @property
    def slab(self) -> int:
        return self.vector * self.lanes

    def slabs(self, n: int) -> int:
        return -(-n // self.slab)


def _widths(dtype: torch.dtype) -> tuple[int, ...]:
    full = MAX_ACCESS_BYTES // dtype.itemsize
    return (full, full // 2, 1) if full > 2 else (full, 1)


def vector_width(dtype: torch.dtype, *alignments: int) -> int:
    """Return the widest vector (elements) that divides every alignment given in elements."""
    for width in _widths(dtype):
        if not any(alignment % width for alignment in alignments):
            return width
    return 1


def _lanes(dtype: torch.dtype, vector: int) -> tuple[int, ...]:
    if vector < MAX_ACCESS_BYTES // dtype.itemsize:
        return NARROW_LANES
    return LANES if dtype.itemsize == 2 else LANES[1:]


def choose_tile(
    dtype: torch.dtype, n: int, vector: int, *, bundles: bool = False, cols: int = 0, l2: int = 0
) -> RowTile:
    """Return the narrowest group that covers ``n`` columns: at most a warp, half for bundles.

    Where B (``cols`` rows) is over twice the L2 cache of ``l2`` bytes but a slab of 128 bytes a
    row fits, the slab is 128 bytes: gathers from L2 run at twice DRAM's speed.

    A bundle has four rows of sums in registers, so that fewer of its warps fit an SM; half-warp
    groups make up for that with twice as many items in flight (measured: docs/csr.md).
    """
    allowed = [lanes for lanes in _lanes(dtype, vector) if not bundles or lanes <= LANES[-2]]
    if cols * n * dtype.itemsize > 2 * l2 and cols * SLAB_BYTES <= 0.85 * l2:
        fitting = [a for a in allowed if a * vector * dtype.itemsize >= SLAB_BYTES]
        allowed = fitting[:1] or allowed
    for lanes in allowed:
        if lanes * vector >= n:
            return RowTile(vector, lanes)
    return RowTile(vector, allowed[-1])


def _pipelined_tile(dtype: torch.dtype) -> RowTile:
    return RowTile(MAX_ACCESS_BYTES // dtype.itemsize, LANES[-1])


def pipeline_pays(dtype: torch.dtype, tile: RowTile, short_length: float, turns: int) -> bool:
    """Whether a group should take several short items in turn.

    It pays where rows are so short that waiting for column ids is most of their time, and where
    there are rows enough to give each group several.
    """
    return tile == _pipelined_tile(dtype) and short_length <= 8 and turns >= 4


def _in_flight(tile: RowTile, bundles: bool) -> int:
    """Rows of B that a group has in flight in whole chunks."""
    return 8 if tile.lanes == 8 and not bundles else 4


def _min_blocks(dtype: torch.dtype, tile: RowTile, bundles: bool, pipelined: bool) -> int:
    """Blocks an SM should hold: bounds the registers as far as nothing spills."""
    if bundles:
        return 5
    if pipelined:
        return 8 if dtype is torch.float32 else 6
    return 7 if dtype.itemsize < 4 or _in_flight(tile, bundles) > 4 else 8


def spmm_config(
    dtype: torch.dtype,
    tile: RowTile,
    weighted: bool,
    *,
    out_dtype: torch.dtype | None = None,
    extremum: bool = False,
    bundles: bool = False,
    repair: bool = False,
    pipelined: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[dtype if out_dtype is None else out_dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": _in_flight(tile, bundles),
        "kThreads": THREADS,
        "kMinBlocks": _min_blocks(dtype, tile, bundles, pipelined),
        "kExtremum": extremum,
        "kRows": BUNDLE_ROWS if bundles else 1,
        "kWeighted": weighted,
        "kRepair": repair,
        "kPipelined": pipelined,
    }


def sddmm_config(dtype: torch.dtype, tile: RowTile) -> dict[str, ConfigValue]:
    """Constants of ``sddmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": min(4, tile.lanes),
        "kThreads": THREADS,
    }


def _tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    for width in _widths(dtype):
        for lanes in _lanes(dtype, width):
            yield RowTile(width, lanes)


def out_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types a product may be written in: its own, and float32 for the 16-bit ones."""
    return (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)


def _spmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile, weighted in itertools.product(_tiles(dtype), (True, False)):
            for out in out_dtypes(dtype):
                yield spmm_config(dtype, tile, weighted, out_dtype=out)
                if dtype in BUNDLE_DTYPES and tile.lanes <= LANES[-2]:
                    yield spmm_config(dtype, tile, weighted, out_dtype=out, bundles=True)
                if tile == _pipelined_tile(dtype):
                    yield spmm_config(dtype, tile, weighted, out_dtype=out, pipelined=True)
            yield spmm_config(dtype, tile, weighted, extremum=True)
            if tile.lanes == LANES[-1]:
                yield spmm_config(dtype, tile, weighted, repair=True)


def _sddmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile in _tiles(dtype):
            yield sddmm_config(dtype, tile)


SPMM_CSR = KernelSpec(name="spmm_csr", params_format="16P4q2d17i", configs=_spmm_configs)
SDDMM_CSR = KernelSpec(name="sddmm_csr", params_format="5P5q2i", configs=_sddmm_configs)
