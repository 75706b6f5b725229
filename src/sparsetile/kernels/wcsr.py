"""Host side of ``spmm_wcsr.cu``: configurations, limits, choice of the tile's width."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS as CSR_ELEMENTS
from sparsetile.kernels.csr import out_dtypes
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "ELEMENTS",
    "HEIGHTS",
    "SPMM_WCSR",
    "STAGED_COLUMNS",
    "STRIP",
    "TILE",
    "WindowTile",
    "choose_window_tile",
    "wcsr_config",
    "window_tiles",
]

# torch dtype -> trait of element.cuh; float32 is multiplied as TF32.
ELEMENTS = {d: CSR_ELEMENTS[d] for d in (torch.float32, torch.float16, torch.bfloat16)}
# Rows of a window, and columns of C that a block of threads makes of it.
HEIGHTS = (64, 128)
WIDTHS = (128, 256)
# Columns of A in a tile, and rows of a window that a warp decodes.
TILE, STRIP = 8, 16
# Order in which a tile's column ids are stored: the even ones are k = 0 to 3 of TF32's product.
STAGED_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# 16-byte loads of B that a thread has under way, by columns: 32 KB an SM in either case.
LOADS = {128: 4, 256: 8}
# What shared memory takes to begin at a multiple of the swizzle's 1024 bytes.
SWIZZLE_ATOM = 1024
HEADS = 4


@dataclass(frozen=True)
class WindowTile:
    """What a block of threads makes: ``columns`` columns of a window of ``height`` rows."""

    height: int
    columns: int

    @property
    def threads(self) -> int:
        return 2 * self.height

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def sums(self) -> int:
        """Sums that a lane holds."""
        return self.columns // 2

    def step_tiles(self, dtype: torch.dtype) -> int:
        """Tiles whose rows of B are loaded at once."""
        return LOADS[self.columns] * 16 * self.threads // (TILE * self.columns * dtype.itemsize)

    def shared_bytes(self, dtype: torch.dtype, weighted: bool) -> int:
        """Dynamic shared memory: stages of B, tiles of A, column ids, alignment."""
        tiles, size = self.step_tiles(dtype), dtype.itemsize
        words = STRIP * TILE * size // 4 + (size < 4)
        tile_bytes = 16 + (-(-words * 4 // 16) * 16 if weighted else 0)
        head_ints = -(-(TILE * tiles + tiles * self.warps + 1) // 4) * 4
        stage = 2 * TILE * tiles * self.columns * size
        return stage + 2 * self.warps * tiles * tile_bytes + HEADS * head_ints * 4 + SWIZZLE_ATOM

    def slabs(self, n: int) -> int:
        return -(-n // self.columns)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM's registers should hold."""
        return {(64, 256): 2, (64, 128): 4, (128, 256): 1, (128, 128): 2}[self.height, self.columns]


def window_tiles() -> list[WindowTile]:
    return [WindowTile(height, columns) for height in HEIGHTS for columns in WIDTHS]


def choose_window_tile(height: int, n: int) -> WindowTile:
    """Return the wide tile where ``n`` columns need it."""
    return WindowTile(height, WIDTHS[0] if n <= WIDTHS[0] else WIDTHS[1])


def wcsr_config(
    dtype: torch.dtype,
    tile: WindowTile,
    weighted: bool,
    *,
    out_dtype: torch.dtype | None = None,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_wcsr.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": CSR_ELEMENTS[dtype if out_dtype is None else out_dtype],
        "kHeight": tile.height,
        "kCols": tile.columns,
        "kStepTiles": tile.step_tiles(dtype),
        "kThreads": tile.threads,
        "kMinBlocks": tile.blocks_per_sm,
        "kWeighted": weighted,
        "kSharedBytes": tile.shared_bytes(dtype, weighted),
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, tile, weighted in itertools.product(ELEMENTS, window_tiles(), (True, False)):
        for out in out_dtypes(dtype):
            yield wcsr_config(dtype, tile, weighted, out_dtype=out)


SPMM_WCSR = KernelSpec(
    name="spmm_wcsr",
    params_format="15P4q2d8i",
    configs=_configs,
    architectures=("sm_90a",),
)
