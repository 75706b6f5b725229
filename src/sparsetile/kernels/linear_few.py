"""Host side of ``linear_few.cu``: configurations, grid, number of warps that share a block row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.params import EPILOGUE, OPERANDS, POSITIONS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "EIGHT_UNIT", "FEW_COLUMNS", "FEW_TOKENS", "FEW_TYPES", "FEW_UNITS", "LINEAR_FEW", "FewTile",
    "choose_few_tile", "few_config",
]  # fmt: skip

# Most tokens of the kernel: two instructions' worth.
FEW_TOKENS = 16
FEW_TYPES = (torch.bfloat16, torch.float16)
# Sides of the blocks.
FEW_UNITS = (32, 64)
# The same for blocks of FP8.
EIGHT_UNIT = 64
# Columns of A, and row strides of X, are multiples of this: one access.
FEW_COLUMNS = 8
_WARPS, _STRIPS, _AHEAD = (4, 8, 16), (1, 2), 2


@dataclass(frozen=True)
class FewTile:
    """The work of a thread block: ``strips`` x 16 rows by ``tiles`` x 8 tokens, and its warps."""

    strips: int
    warps: int
    tiles: int
    unit: int
    paired: bool = False  # gate and up of a SwiGLU

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def grid(self, rows: int) -> tuple[int, int, int]:
        """A thread block for each strips x 16 rows, those of whole block rows."""
        block_rows = -(-rows // self.unit)
        return (block_rows * (self.unit // (16 * self.strips)), 1, 1)


def choose_few_tile(
    tokens: int, rows: int, blocks: int, unit: int, processors: int, paired: bool = False
) -> FewTile:
    """Two strips if that fills the GPU; about two blocks for each warp.

    Two strips halve the reads of X. More warps than a row has blocks would be idle. ``rows`` are
    those of the result: of a pair half of A's, each with the blocks of two.
    """
    tiles = 1 if tokens <= 8 else 2
    block_rows = max(-(-rows // unit), 1)
    strips = 2 if block_rows * (unit // 32) >= 2 * processors else 1
    per_row = blocks / block_rows
    warps = next((w for w in _WARPS if per_row <= 2 * w), _WARPS[-1])
    return FewTile(strips, warps, tiles, unit, paired)


def few_config(
    dtype: torch.dtype, tile: FewTile, out_dtype: torch.dtype | None = None, eight: bool = False
) -> dict[str, ConfigValue]:
    """Constants of ``linear_few.cu``; ``eight``: the blocks are FP8."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[out_dtype or dtype],
        "kUnit": tile.unit,
        "kStrips": tile.strips,
        "kWarps": tile.warps,
        "kTiles": tile.tiles,
        "kAhead": _AHEAD,
        "kPaired": tile.paired,
        "kEight": eight,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, unit, strips, warps, tiles in itertools.product(
        FEW_TYPES, FEW_UNITS, _STRIPS, _WARPS, (1, 2)
    ):
        tile = FewTile(strips, warps, tiles, unit)
        for out in (dtype, torch.float32):
            yield few_config(dtype, tile, out)
        yield few_config(dtype, replace(tile, paired=True))
        if unit == EIGHT_UNIT:
            yield few_config(dtype, tile, eight=True)
            yield few_config(dtype, replace(tile, paired=True), eight=True)


LINEAR_FEW = KernelSpec(
    file="block_sparse/linear_few.cu",
    params=ParamStruct.of(
        *OPERANDS,
        pointer("blocks", "const E::Storage*", "[blocks, kUnit, kUnit]; kEight: bytes"),
        pointer("exponents", "const signed char*", "kEight: of each block; at most 7"),
        pointer("block_row_ptr", "const int*", "[block rows + 1]"),
        pointer("block_col_idx", "const int*", "of each block"),
        *ROW_BIAS,
        pointer("spoilt", "i64*", "set to 1 if a sum is not finite; null: not wanted"),
        i64("x_stride", "of rows of X (b), in elements"),
        i64("c_stride", "of rows of Y (c)"),
        *POSITIONS,
        *EPILOGUE,
        i32("silu", "after the bias"),
        i32("pair_block_rows", "from a block row of the gate to that of up"),
        i32("n", "tokens"),
        i32("cols", "of A"),
    ),
    configs=_configs,
    shared_memory=True,
    # On sm_80, pairs with blocks of 32 and eight warps keep two words in local memory.
)
