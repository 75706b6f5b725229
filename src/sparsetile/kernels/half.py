"""Host side of ``half_rows.cu`` and ``spmm_half.cu``: configurations and grids.

Both take the same parameters: one launch makes the copy of B, the next gathers from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import (
    LONG_ROWS,
    MIDDLING_ROWS,
    MIXED_ROWS,
    SHORT_ROWS,
    RowShape,
    RowTile,
    bundle_tiles,
    scheduled_tiles,
    spmm_config,
)
from sparsetile.kernels.params import BUNDLES, EPILOGUE, SECTIONS, STRIDES, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "COPY_DTYPE", "COPY_THREADS", "HALF_ROWS", "SPMM_HALF", "copy_config", "copy_grid",
    "copy_pitch", "half_config",
]  # fmt: skip

# Type of the copy of B; tiles are those of a B of this type.
COPY_DTYPE = torch.float16
COPY_THREADS = 256
# Elements of a row of the copy are a multiple of this: 16 bytes.
_PITCH = 8
# Lanes of a row, and vectors that a lane may hold of it. Fewer lanes with more vectors have more
# loads in flight; below four a warp would load rows in pieces of less than 64 bytes.
_LANES = (4, 8, 16, 32)
_FEW_VECTORS, _MOST_VECTORS = 4, 8
_VECTORS = (4, 1)


def copy_pitch(n: int) -> int:
    """Return the row stride of the copy in elements."""
    return -(-n // _PITCH) * _PITCH


def _copy_lanes(n: int, vector: int) -> int:
    """Return the lanes of a row of ``n`` elements, read ``vector`` at a time."""
    fits = (lanes for lanes in _LANES if lanes * vector * _FEW_VECTORS >= n)
    return next(fits, _LANES[-1])


def copy_grid(k: int, n: int, vector: int) -> tuple[int, int, int]:
    """Return the thread blocks that copy ``k`` rows of ``n`` elements."""
    return (-(-k * _copy_lanes(n, vector) // COPY_THREADS), 1, 1)


def copy_config(n: int, vector: int) -> dict[str, ConfigValue]:
    """Constants of ``half_rows.cu`` for rows of ``n`` elements, read ``vector`` at a time."""
    lanes = _copy_lanes(n, vector)
    vectors = _FEW_VECTORS if n <= lanes * vector * _FEW_VECTORS else _MOST_VECTORS
    return {"kVector": vector, "kLanes": lanes, "kHeld": vectors, "kThreads": COPY_THREADS}


def half_config(
    tile: RowTile, weighted: bool, *, bundles: bool = False, shape: RowShape = MIXED_ROWS
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_half.cu``: those of a product of float16 with sums stored in float32."""
    found = spmm_config(
        COPY_DTYPE, tile, weighted, out_dtype=torch.float32, bundles=bundles, shape=shape
    )
    fixed = ("ELEMENT", "OUTPUT", "kParts", "kExtremum", "kArgs", "kRepair", "kShared", "kHeads")
    return {name: value for name, value in found.items() if name not in fixed}


def _half_configs() -> Iterator[dict[str, ConfigValue]]:
    seen: set[tuple[tuple[str, ConfigValue], ...]] = set()
    for weighted in (True, False):
        shapes = (MIXED_ROWS, SHORT_ROWS, MIDDLING_ROWS, LONG_ROWS)
        plain = itertools.product(scheduled_tiles(COPY_DTYPE), shapes)
        found = [half_config(tile, weighted, shape=shape) for tile, shape in plain]
        found += [half_config(tile, weighted, bundles=True) for tile in bundle_tiles(COPY_DTYPE)]
        for config in found:
            key = tuple(config.items())
            if key not in seen:
                seen.add(key)
                yield config


def _copy_configs() -> Iterator[dict[str, ConfigValue]]:
    for vector in _VECTORS:
        for lanes in _LANES:
            yield copy_config(lanes * vector * _FEW_VECTORS, vector)
        yield copy_config(_LANES[-1] * vector * _MOST_VECTORS, vector)


_BUNDLES = tuple(
    pointer("packed", "const V::Storage*", "bundles: kRows values of each list element")
    if each.name == "packed"
    else each
    for each in BUNDLES
)
_PARAMS = ParamStruct.of(
    pointer("items", "const int4*"), pointer("columns", "const int*"),
    pointer("values", "const V::Storage*"), pointer("b", "const float*", "B itself"),
    pointer("c", "Out::Storage*"), pointer("copy", "E::Storage*", "[k, pitch]"),
    pointer("scales", "float*", "[k]; 0: the copy cannot hold the row"),
    pointer("unfit", "const int*", "[1] of bundles: not 0 if values are too large or small"),
    *_BUNDLES, i64("wide_row_bytes", "of b"), *STRIDES, *TREE, *EPILOGUE, *SECTIONS, i32("k"),
    i32("n"), i32("pitch", "elements of a row of the copy"), i32("slabs"),
    i32("slab_fast", "grid.x counts slabs within blocks of items"),
    i32("early", "let the next kernel start as soon as all blocks are running"),
)  # fmt: skip
SPMM_HALF = KernelSpec(
    file="rows/spmm_half.cu", params=_PARAMS, configs=_half_configs, shared_memory=True
)
HALF_ROWS = KernelSpec(
    file="pack/half_rows.cu", params=_PARAMS, configs=_copy_configs, allowed_spills=8
)
