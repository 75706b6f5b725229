"""Host side of ``spmm_csr.cu`` and ``sddmm_csr.cu``: configurations, limits, choice of tiles."""

from __future__ import annotations

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


def choose_tile(dtype: torch.dtype, n: int, vector: int, bundles: bool = False) -> RowTile:
    """Return the narrowest group that covers ``n`` columns: at most a warp, half for bundles.

    A bundle has four rows of sums in registers, so that fewer of its warps fit an SM; half-warp
    groups make up for that with twice as many items in flight (measured: docs/csr.md).
    """
    allowed = [lanes for lanes in _lanes(dtype, vector) if not bundles or lanes <= LANES[-2]]
    for lanes in allowed:
        if lanes * vector >= n:
            return RowTile(vector, lanes)
    return RowTile(vector, allowed[-1])


def _in_flight(tile: RowTile, bundles: bool) -> int:
    """Rows of B that a group has in flight in whole chunks."""
    return 8 if tile.lanes == 8 and not bundles else 4


def _min_blocks(dtype: torch.dtype, tile: RowTile, bundles: bool) -> int:
    """Blocks an SM should hold: bounds the registers as far as nothing spills."""
    if bundles:
        return 5
    return 7 if dtype.itemsize < 4 or _in_flight(tile, bundles) > 4 else 8


def spmm_config(
    dtype: torch.dtype,
    tile: RowTile,
    weighted: bool,
    *,
    extremum: bool = False,
    bundles: bool = False,
    repair: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": _in_flight(tile, bundles),
        "kThreads": THREADS,
        "kMinBlocks": _min_blocks(dtype, tile, bundles),
        "kExtremum": extremum,
        "kRows": BUNDLE_ROWS if bundles else 1,
        "kWeighted": weighted,
        "kRepair": repair,
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


def _spmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile in _tiles(dtype):
            for weighted in (True, False):
                yield spmm_config(dtype, tile, weighted)
                yield spmm_config(dtype, tile, weighted, extremum=True)
                if dtype in BUNDLE_DTYPES and tile.lanes <= LANES[-2]:
                    yield spmm_config(dtype, tile, weighted, bundles=True)
                if tile.lanes == LANES[-1]:
                    yield spmm_config(dtype, tile, weighted, repair=True)


def _sddmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile in _tiles(dtype):
            yield sddmm_config(dtype, tile)


SPMM_CSR = KernelSpec(name="spmm_csr", params_format="16P4q2d16i", configs=_spmm_configs)
SDDMM_CSR = KernelSpec(name="sddmm_csr", params_format="5P5q2i", configs=_sddmm_configs)
