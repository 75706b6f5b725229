"""Host side of ``spmm_wcsr.cu``, ``join_wcsr.cu`` and both redos: configurations, tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import MMA_ELEMENTS as ELEMENTS
from sparsetile.kernels.csr import element_types, out_dtypes
from sparsetile.kernels.params import EPILOGUE, OPERANDS, PARTIALS, POSITIONS, STRIDES
from sparsetile.kernels.repair import REDO_BLOCKS, REDO_THREADS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "ELEMENTS", "HEIGHTS", "JOIN_COLUMNS", "JOIN_PARTS", "JOIN_WCSR", "REDO_WCSR", "REDO_WINDOWS",
    "SPMM_WCSR", "STAGED_COLUMNS", "STRIP", "TILE", "WINDOW_REDO_THREADS", "JoinTile", "WindowTile",
    "choose_join_tile", "choose_window_tile", "join_config", "join_tiles", "redo_wcsr_config",
    "redo_windows_config", "redo_windows_pays", "wcsr_config", "window_tiles",
]  # fmt: skip

# Rows of a window, and columns of C that a thread block makes of it.
HEIGHTS = (64,)
WIDTHS = (128, 256)
# Columns of C that a block of the second kernel makes; the warps that share the pieces of a strip
# in it, and the mean pieces per window from which they do.
JOIN_COLUMNS = 32
JOIN_PARTS, MANY_PIECES = 16, 6
# Bytes of a row of B in a unit of recomputation.
UNIT_BYTES = 256
# Threads that recompute a window: 128 registers each, all of an SM.
WINDOW_REDO_THREADS = 512
# Instructions of units relative to whole windows, by bytes of an element, counted for one row of
# B in a hundred with NaN (2.3 and 1.3); rounded down.
REDO_GAIN = {4: 2, 2: 1}
# Columns of A in a tile, and rows of a window that a warp decodes.
TILE, STRIP = 8, 16
# Order in which a tile's column ids are stored: the even ones are k = 0 to 3 of TF32's product.
STAGED_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# Shared memory spent on alignment to the swizzle's 1024 bytes.
SWIZZLE_ATOM = 1024
# Threads that load B in a step, groups of them in turn; 16-byte loads of each in flight, by
# columns: 64 KB per SM for the wide tile.
PRODUCERS, GROUPS = 128, 2
LOADS = {128: 8, 256: 16}
# Stages of B, and of A's tiles, which are copied further ahead.
STAGES, TILE_STAGES = 4, 10
# Registers of a consumer and of a producer thread. A block starts with 168 for each of its 384
# threads, and would wait for ever for more than that in all.
REGISTERS = (200, 152)


@dataclass(frozen=True)
class WindowTile:
    """The work of a thread block: ``columns`` columns of a window of ``height`` rows."""

    height: int
    columns: int

    @property
    def warps(self) -> int:
        """Warps that multiply, each a strip of sixteen rows."""
        return self.height // STRIP

    @property
    def threads(self) -> int:
        return 32 * self.warps + GROUPS * PRODUCERS

    @property
    def sums(self) -> int:
        """Sums of a lane."""
        return self.columns // 2

    def step_tiles(self, dtype: torch.dtype) -> int:
        """Tiles whose rows of B are loaded at once."""
        return LOADS[self.columns] * 16 * PRODUCERS // (TILE * self.columns * dtype.itemsize)

    def shared_bytes(self, dtype: torch.dtype, weighted: bool) -> int:
        """Dynamic shared memory: stages of B, tiles of A, barriers, alignment."""
        tiles, size = self.step_tiles(dtype), dtype.itemsize
        a_bytes = 4 * TILE * tiles + self.height * tiles
        if weighted:
            a_bytes += 4 * tiles * self.warps + 16 + TILE * tiles * self.height * size + 16
        b_bytes = TILE * tiles * self.columns * size
        return STAGES * (b_bytes + 16) + TILE_STAGES * (a_bytes + 16) + SWIZZLE_ATOM

    def slabs(self, n: int) -> int:
        return -(-n // self.columns)

    def units(self, rows: int, dtype: torch.dtype) -> int:
        """Units of a slab that are recomputed separately: strips of 256 bytes of columns."""
        pieces = self.columns * dtype.itemsize // UNIT_BYTES
        return -(-rows // self.height) * self.warps * pieces


def window_tiles(widths: Sequence[int] = WIDTHS) -> list[WindowTile]:
    return [WindowTile(height, columns) for height in HEIGHTS for columns in widths]


def choose_window_tile(height: int, n: int) -> WindowTile:
    """Return the wide tile if ``n`` columns need it."""
    return WindowTile(height, WIDTHS[0] if n <= WIDTHS[0] else WIDTHS[1])


def wcsr_config(
    dtype: torch.dtype, tile: WindowTile, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_wcsr.cu``."""
    return {
        **element_types(dtype, out_dtype),
        "kCols": tile.columns,
        "kStepTiles": tile.step_tiles(dtype),
        "kStages": STAGES,
        "kTileStages": TILE_STAGES,
        "kThreads": tile.threads,
        "kConsumerRegisters": REGISTERS[0],
        "kProducerRegisters": REGISTERS[1],
        "kWeighted": weighted,
        "kSharedBytes": tile.shared_bytes(dtype, weighted),
    }


def _each(
    tiles: Callable[[], Sequence[object]], config: Callable[..., dict[str, ConfigValue]]
) -> Iterator[dict[str, ConfigValue]]:
    """Yield ``config`` for all types of operands and of C, all tiles, with and without weights."""
    for dtype, tile, weighted in itertools.product(ELEMENTS, tiles(), (True, False)):
        for out in out_dtypes(dtype):
            yield config(dtype, tile, weighted, out_dtype=out)


@dataclass(frozen=True)
class JoinTile:
    """The join of pieces of windows: ``parts`` warps share those of sixteen rows."""

    tile: WindowTile
    parts: int

    @property
    def threads(self) -> int:
        return 32 * (self.tile.warps if self.parts == 1 else self.parts)

    @property
    def blocks(self) -> int:
        """Thread blocks for each window in pieces."""
        strips = 1 if self.parts == 1 else self.tile.warps
        return strips * self.tile.columns // JOIN_COLUMNS


def join_tiles() -> list[JoinTile]:
    return [JoinTile(tile, parts) for tile in window_tiles() for parts in (1, JOIN_PARTS)]


def choose_join_tile(tile: WindowTile, cuts: int, slots: int) -> JoinTile:
    """Return several warps per strip if windows are in many pieces."""
    return JoinTile(tile, JOIN_PARTS if slots >= MANY_PIECES * cuts else 1)


def join_config(
    dtype: torch.dtype, join: JoinTile, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``join_wcsr.cu``, which adds up the product's pieces."""
    return {
        **element_types(dtype, out_dtype),
        "kCols": join.tile.columns,
        "kParts": join.parts,
        "kThreads": join.threads,
        "kWeighted": weighted,
    }


def redo_wcsr_config(
    dtype: torch.dtype, tile: WindowTile, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``redo_wcsr.cu``, which recomputes non-finite results."""
    return {
        **element_types(dtype, out_dtype),
        "kCols": tile.columns,
        "kThreads": REDO_THREADS,
        "kMinBlocks": REDO_BLOCKS,
        "kWeighted": weighted,
    }


def redo_windows_pays(dtype: torch.dtype, tile: WindowTile, share: float, longest: int) -> bool:
    """Whether whole windows are recomputed; ``share``: tiles of all slabs for each SM.

    One thread block then processes all tiles of a window. Its units would be spread over many
    blocks, with REDO_GAIN times as many instructions. So the longest window decides.
    """
    return tile.columns == WIDTHS[1] and longest <= REDO_GAIN[dtype.itemsize] * share


def redo_windows_config(
    dtype: torch.dtype, tile: WindowTile, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``redo_windows.cu``, which does so a window at a time; only wide tiles."""
    config = redo_wcsr_config(dtype, tile, weighted, out_dtype=out_dtype)
    del config["kMinBlocks"]
    return config | {"kThreads": WINDOW_REDO_THREADS}


# All kernels take the same struct, so that one set of values serves all launches.
_PARAMS = ParamStruct.of(
    pointer("items", "const int4*", "window, first tile, end, slot of a piece or -1"),
    pointer("first_items", "const int*", "first item of each thread block, and the end"),
    pointer("cuts", "const int4*", "windows in pieces: window, first slot, slots, 0"), *OPERANDS,
    pointer("window_row_ptr", "const int*"),
    pointer("strip_value_ptr", "const int*", "first value of 16 rows of a tile, [4 tiles + 1]"),
    pointer("columns", "const int*", "of a tile, in the order 0 2 4 6 1 3 5 7"),
    pointer("bitmaps", "const u64*"),
    pointer("values", "const E::Storage*", "packed; null for a pattern"), *STRIDES, *PARTIALS,
    pointer("redo", "int*", "flags of units (wcsr.cuh), all zero; null: no launch that reads them"),
    *POSITIONS, *EPILOGUE, i32("n"),
)  # fmt: skip
SPMM_WCSR = KernelSpec(
    file="windows/spmm_wcsr.cu",
    params=_PARAMS,
    configs=partial(_each, window_tiles, wcsr_config),
    architectures=("sm_90a",),
    shared_memory=True,
)
JOIN_WCSR = KernelSpec(
    file="windows/join_wcsr.cu",
    params=_PARAMS,
    configs=partial(_each, join_tiles, join_config),
    architectures=("sm_90a",),
    shared_memory=True,
    allowed_spills=16,  # of a warp's place, outside loops
)
REDO_WCSR = KernelSpec(
    file="windows/redo_wcsr.cu",
    params=_PARAMS,
    configs=partial(_each, window_tiles, redo_wcsr_config),
    architectures=("sm_90a",),
    shared_memory=True,
    allowed_spills=44,  # outside the loop over tiles
)
REDO_WINDOWS = KernelSpec(
    file="windows/redo_windows.cu",
    params=_PARAMS,
    configs=partial(_each, partial(window_tiles, WIDTHS[1:]), redo_windows_config),
    architectures=("sm_90a",),
    shared_memory=True,
    allowed_spills=24,  # of a block's place, outside the loop over tiles
)
