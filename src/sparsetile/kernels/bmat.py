"""Host side of ``spmm_bmat.cu`` and ``redo_bmat.cu``: pipelines by width, configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetile.core.errors import value_error
from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import MMA_ELEMENTS as ELEMENTS
from sparsetile.kernels.csr import element_types, out_dtypes
from sparsetile.kernels.params import EPILOGUE, OPERANDS, POSITIONS, STRIDES, TREE
from sparsetile.kernels.repair import REDO_BLOCKS, REDO_THREADS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BITS", "ELEMENTS", "LADDER", "PIECE_BYTES", "PIPES", "REDO_BMAT", "SPMM_BMAT", "STACKED_PIPES",
    "STEP", "WIDTHS", "Pipe", "bmat_config", "choose_pipe", "most_shared_bytes",
    "redo_bmat_config", "redo_units", "row_pieces", "slab_width", "widest_slab",
]  # fmt: skip

# Bytes of a row of B that a consumer takes at once.
PIECE_BYTES = 128
# Pieces of a unit of recomputation.
UNIT_PIECES = 2
# The tiles of an item are a multiple of this.
STEP = 2
TILE_ROWS, TILE_CELLS, BITMAP_BYTES, PAD_BYTES = 8, 128, 16, 16


@dataclass(frozen=True)
class Pipe:
    """How a thread block moves and multiplies."""

    # pieces, consumers: pieces of 128 bytes of a row per consumer warp, and consumer warps: their
    # product is the widest slab.
    pieces: int
    consumers: int
    producers: int  # warps that issue copies
    # stages, step_tiles: stages of the ring, and tiles of each.
    stages: int
    blocks: int  # thread blocks per SM
    step_tiles: int = STEP
    bulk: bool = True  # bulk copies; otherwise loads and stores of threads
    dense: bool = False  # A's tiles as whole operands instead of bits and packed values
    # Whether producers and consumers wait for each other; without, C is wrong. Only for measuring
    # the overlap.
    hand_over: bool = True
    stack: int = 1  # parts of sixteen rows of a window

    @property
    def width(self) -> int:
        """Pieces of the widest slab."""
        return self.pieces * self.consumers

    @property
    def threads(self) -> int:
        return 32 * (self.consumers + self.producers)

    def stage_bytes(self, dtype: torch.dtype, weighted: bool) -> int:
        """Bytes of a stage: rows of B, bits, values."""
        rows = TILE_ROWS * self.step_tiles * (self.width * PIECE_BYTES + PAD_BYTES)
        values = self.step_tiles * self.stack * TILE_CELLS * dtype.itemsize
        if self.dense:
            return rows + values
        return (
            rows
            + self.step_tiles * self.stack * BITMAP_BYTES
            + (values + PAD_BYTES if weighted else 0)
        )

    def shared_bytes(self, dtype: torch.dtype, weighted: bool) -> int:
        """Dynamic shared memory: the ring and its barriers."""
        return self.stages * (self.stage_bytes(dtype, weighted) + 16)

    def sum_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a window's partial sums in a piece of columns."""
        return 16 * self.stack * (PIECE_BYTES // dtype.itemsize) * 4


# By bytes of an element and pieces of the slab. Chosen by the rate of bulk copies of rows of B to
# an SM (docs/explanation/notes/voltrix.md): several producers per SM, shared memory full of stages,
# no more warps than registers allow. Pipelines for 1 and 2 KB a row were compared with others on an
# H200, those for 512 bytes were not.
PIPES: dict[tuple[int, int], Pipe] = {
    (4, 4): Pipe(pieces=1, consumers=4, producers=2, stages=4, blocks=3, step_tiles=4, dense=True),
    (4, 8): Pipe(pieces=2, consumers=4, producers=2, stages=3, blocks=2, step_tiles=4, dense=True),
    (4, 16): Pipe(pieces=2, consumers=8, producers=4, stages=3, blocks=1, step_tiles=4, dense=True),
    (2, 4): Pipe(pieces=1, consumers=4, producers=2, stages=6, blocks=2, step_tiles=4, dense=True),
    (2, 8): Pipe(pieces=2, consumers=4, producers=2, stages=3, blocks=2, step_tiles=4, dense=True),
    (2, 16): Pipe(pieces=2, consumers=8, producers=4, stages=3, blocks=1, step_tiles=4, dense=True),
}
# Windows of 32 rows: twice the sums in registers.
STACKED_PIPES: dict[tuple[int, int], Pipe] = {
    (4, 4): Pipe(1, 4, 2, 5, 2, step_tiles=4, dense=True, stack=2),
    (4, 8): Pipe(2, 4, 2, 3, 2, step_tiles=4, dense=True, stack=2),
    (4, 16): Pipe(2, 8, 4, 3, 1, step_tiles=4, dense=True, stack=2),
    (2, 4): Pipe(1, 4, 2, 5, 2, step_tiles=4, dense=True, stack=2),
    (2, 8): Pipe(1, 8, 4, 6, 1, step_tiles=4, dense=True, stack=2),
}
# Pieces of the slabs that have pipelines.
WIDTHS = (4, 8, 16)


def _single(pipe: Pipe) -> Pipe:
    """One buffer ahead, one piece per consumer, one producer: before the multi-tier pipeline."""
    return replace(
        pipe,
        pieces=1,
        consumers=pipe.width,
        producers=1,
        stages=2,
        step_tiles=STEP,
        blocks=1 if pipe.width > 8 else 2,
    )


# The steps of the paper's breakdown that the kernel implements; each changes a table's entry.
BITS = "bits"
LADDER = {
    "sync": lambda pipe: replace(_single(pipe), stages=1, bulk=False),
    "tma": _single,
    "bmat": lambda pipe: replace(_single(pipe), dense=False),
    BITS: lambda pipe: replace(pipe, dense=False),
}


def row_pieces(dtype: torch.dtype, n: int) -> int:
    """Pieces of 128 bytes that a row of ``n`` columns has."""
    return -(-n * dtype.itemsize // PIECE_BYTES)


def redo_units(rows: int, width: int, stack: int) -> int:
    """Units of a slab that are recomputed separately: sixteen rows by two pieces."""
    return -(-rows // (16 * stack)) * stack * -(-width // UNIT_PIECES)


def slab_width(dtype: torch.dtype, n: int, most: int = WIDTHS[-1]) -> int:
    """Pieces of the slabs for ``n`` columns: as few equal slabs as ``most`` pieces allow."""
    pieces = max(row_pieces(dtype, n), 1)
    return -(-pieces // -(-pieces // most))


def widest_slab(dtype: torch.dtype, stack: int = 1) -> int:
    """Pieces of the widest slab with a pipeline: registers hold no more sums."""
    table = PIPES if stack == 1 else STACKED_PIPES
    return max(width for size, width in table if size == dtype.itemsize)


def choose_pipe(dtype: torch.dtype, width: int, variant: str | None = None, stack: int = 1) -> Pipe:
    """Return the narrowest pipeline for slabs of ``width`` pieces, windows of 16 ``stack`` rows."""
    table = PIPES if stack == 1 else STACKED_PIPES
    widest = widest_slab(dtype, stack)
    if width > widest:
        raise value_error("choose_pipe", "width", f"at most {widest}", width, "Use several slabs")
    pipe = table[dtype.itemsize, next(w for w in WIDTHS if w >= width)]
    return LADDER[variant](pipe) if variant else pipe


def most_shared_bytes(dtype: torch.dtype, n: int) -> int:
    """Return the most shared memory that a thread block may use for ``n`` columns."""
    tables = (PIPES, STACKED_PIPES)
    found = []
    for stack, table in enumerate(tables, start=1):
        width = slab_width(dtype, n, widest_slab(dtype, stack))
        widest = next(w for w in WIDTHS if w >= width)
        pipes = [p for (size, w), p in table.items() if size == dtype.itemsize and w <= widest]
        found += [pipe.shared_bytes(dtype, weighted=True) for pipe in pipes]
    return max(found)


def bmat_config(
    dtype: torch.dtype, pipe: Pipe, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_bmat.cu``."""
    return {
        **element_types(dtype, out_dtype),
        "kPieces": pipe.pieces,
        "kConsumers": pipe.consumers,
        "kProducers": pipe.producers,
        "kStages": pipe.stages,
        "kStepTiles": pipe.step_tiles,
        "kThreads": pipe.threads,
        "kMinBlocks": pipe.blocks,
        "kBulk": pipe.bulk,
        "kDense": pipe.dense,
        "kHandOver": pipe.hand_over,
        "kStack": pipe.stack,
        "kWeighted": weighted,
        "kSharedBytes": pipe.shared_bytes(dtype, weighted),
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, width, weighted in itertools.product(ELEMENTS, WIDTHS, (True, False)):
        stacked = [(variant, 2) for variant in (None, BITS) if width <= widest_slab(dtype, 2)]
        for variant, stack in [(variant, 1) for variant in (None, *LADDER)] + stacked:
            pipe = choose_pipe(dtype, width, variant, stack)
            for out in out_dtypes(dtype):
                yield bmat_config(dtype, pipe, weighted, out_dtype=out)


def redo_bmat_config(
    dtype: torch.dtype, pipe: Pipe, weighted: bool, *, out_dtype: torch.dtype | None = None
) -> dict[str, ConfigValue]:
    """Constants of ``redo_bmat.cu``, which recomputes non-finite results."""
    return {
        **element_types(dtype, out_dtype),
        "kThreads": REDO_THREADS,
        "kMinBlocks": REDO_BLOCKS,
        "kDense": pipe.dense,
        "kStack": pipe.stack,
        "kWeighted": weighted,
    }


def _redo_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, variant, stack, weighted in itertools.product(
        ELEMENTS, (None, BITS), (1, 2), (True, False)
    ):
        pipe = choose_pipe(dtype, WIDTHS[0], variant, stack)
        for out in out_dtypes(dtype):
            yield redo_bmat_config(dtype, pipe, weighted, out_dtype=out)


# Both kernels take the same struct, so that one set of values serves both launches.
_PARAMS = ParamStruct.of(
    pointer("items", "const int*", "eight each: balance/cobalance.py; first value is the seventh"),
    pointer("first_items", "const int*", "first item of each thread block, and the end"), *OPERANDS,
    pointer("window_tile_ptr", "const int*"),
    pointer("pair_values", "const int*", "first packed value of every second tile"),
    pointer("columns", "const int*", "eight a tile, -1: none"),
    pointer("bitmaps", "const uint4*", "one a tile"),
    pointer("values", "const E::Storage*", "packed, or dense operands; null for a pattern"),
    *STRIDES, *TREE,
    pointer("redo", "int*", "flags of units (bmat_windows.cuh), all zero; null: none is launched"),
    *POSITIONS, *EPILOGUE,
    i32("slab_pieces", "pieces of 128 bytes of a row in a slab; items may name more"), i32("n"),
)  # fmt: skip
SPMM_BMAT = KernelSpec(
    file="windows/spmm_bmat.cu",
    params=_PARAMS,
    configs=_configs,
    architectures=("sm_90",),
    shared_memory=True,
    # Steps of the paper's breakdown in 16 bits.
    allowed_spills=68,
)
REDO_BMAT = KernelSpec(
    file="windows/redo_bmat.cu",
    params=_PARAMS,
    configs=_redo_configs,
    architectures=("sm_90",),
    shared_memory=True,
    allowed_spills=76,  # of bits in windows of 32 rows
)
