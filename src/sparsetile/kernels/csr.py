"""Host side of ``spmm_csr.cu`` and ``sddmm_csr.cu``: configurations, limits, choice of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "ELEMENTS",
    "SDDMM_CSR",
    "SPMM_CSR",
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
REDUCE_CODES = {"sum": 0, "mean": 0, "max": 1, "min": 2}
THREADS = 128
# 16-byte accesses are the widest; a group narrower than 8 lanes would read under 128 bytes of a
# row of B at a time, which wastes DRAM sectors.
MAX_ACCESS_BYTES = 16
LANES = (8, 16, 32)
UNROLL = 4


@dataclass(frozen=True)
class RowTile:
    """Columns a group of lanes covers at once: ``lanes`` lanes of ``vector`` elements."""

    vector: int
    lanes: int
    unroll: int = UNROLL

    @property
    def slab(self) -> int:
        return self.vector * self.lanes

    def slabs(self, n: int) -> int:
        return -(-n // self.slab)


def vector_width(dtype: torch.dtype, *alignments: int) -> int:
    """Return the widest vector (elements) that divides every alignment given in elements."""
    width = MAX_ACCESS_BYTES // dtype.itemsize
    while width > 1 and any(alignment % width for alignment in alignments):
        width //= 2
    return width


def choose_tile(n: int, vector: int) -> RowTile:
    """Return the narrowest group that covers ``n`` columns, 8 lanes at least, 32 at most."""
    for lanes in LANES:
        if lanes * vector >= n:
            return RowTile(vector, lanes)
    return RowTile(vector, LANES[-1])


def spmm_config(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    tile: RowTile,
    reduce: str,
    weighted: bool,
    repair: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[out_dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": tile.unroll,
        "kThreads": THREADS,
        "kReduce": REDUCE_CODES[reduce],
        "kWeighted": weighted,
        "kRepair": repair,
    }


def sddmm_config(dtype: torch.dtype, tile: RowTile) -> dict[str, ConfigValue]:
    """Constants of ``sddmm_csr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": tile.unroll,
        "kThreads": THREADS,
    }


def _tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    width = MAX_ACCESS_BYTES // dtype.itemsize
    while width >= 1:
        for lanes in LANES:
            yield RowTile(width, lanes)
        width //= 2


def _spmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile in _tiles(dtype):
            for weighted in (True, False):
                for reduce in ("sum", "max", "min"):
                    yield spmm_config(dtype, dtype, tile, reduce, weighted)
                if tile.lanes == LANES[-1]:
                    yield spmm_config(dtype, dtype, tile, "sum", weighted, repair=True)


def _sddmm_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        for tile in _tiles(dtype):
            yield sddmm_config(dtype, tile)


SPMM_CSR = KernelSpec(name="spmm_csr", params_format="12P4q2d8i", configs=_spmm_configs)
SDDMM_CSR = KernelSpec(name="sddmm_csr", params_format="5P5q2i", configs=_sddmm_configs)
