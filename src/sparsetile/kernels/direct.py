"""Host side of ``spmm_direct.cu`` and ``sddmm_direct.cu``: tiles, lengths of lists, configurations.

The host knows the numbers of rows and entries and nothing else of A. Choices were measured on 14
real matrices (docs/explanation/notes/direct.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import (
    ELEMENTS,
    FULL_LANES,
    SDDMM_CSR,
    RowShape,
    RowTile,
    choose_narrow_tile,
    narrow_tiles,
    out_dtypes,
    row_tiles,
    sddmm_config,
    spmm_config,
    vector_widths,
)
from sparsetile.kernels.params import EPILOGUE, OPERANDS, STRIDES
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "LIST_COUNTERS",
    "SDDMM_DIRECT",
    "SPMM_DIRECT",
    "Lists",
    "direct_config",
    "direct_sddmm_config",
    "direct_tile",
]

# Mean entries of a row from which a whole warp should work on one, and below which several rows
# should share a warp if there are MANY_ROWS.
LONG_MEAN, SHORT_MEAN, MANY_ROWS = 20.0, 5.5, 100_000
# Mean entries up to which rows are short, and rows below which a long one needs a whole warp.
SHORT, FEW_ROWS = 9.0, 16_000
# If groups of lanes do not fill FULL_LANES, which hides a row's chain of gathers, a row of more
# than FEW_WIDE entries gets a warp.
FEW_WIDE, WIDE = 32, 64
# Entries of a piece: at least SEGMENT, and so many that there are at most PIECES, each with a place
# for its sum; longer if most rows would be cut and are enough to fill the GPU's warps (4,096).
SEGMENT, PIECES, BUSY_WARPS = 128, 8192, 2048
# A row is gathered in rounds of as many entries as are in flight, ROUND seconds each, one after the
# other. Products that L2's rate (bytes a second) lets end soon must not wait for one row: it may
# take as long as half of all gathers and LISTING, the seconds until a listed row is begun.
ROUND, LISTING, GATHERED, FEWEST = 0.75e-6, 5e-6, 6.4e12, 16
# Numbers of 32 bits that the list's counters take: kCounters in direct_items.cuh.
LIST_COUNTERS = 8


@dataclass(frozen=True)
class Lists:
    """Lengths from which rows are listed and cut, and room for the lists of right row pointers.

    Attributes
    ----------
    wide, segment : int
        Longer rows are listed; entries of a piece at most.
    items, slots, nodes : int
        Room in the lists: rows over ``wide`` have at most ``entries / segment + 1`` pieces each,
        and 16 children of a tree share a node (balance/tree.py).
    """

    wide: int
    segment: int
    items: int
    slots: int
    nodes: int

    @classmethod
    def of(cls, rows: int, entries: int, lanes: int, row_bytes: int, in_flight: int) -> Lists:
        """Return those of a matrix for groups of ``lanes`` lanes, which gather ``in_flight`` rows
        of B at once, of ``row_bytes`` each."""
        mean, segment = entries // max(rows, 1), SEGMENT
        while segment * PIECES < entries:
            segment *= 2
        while segment < 2 * mean and segment * BUSY_WARPS < entries:
            segment *= 2
        if lanes == 32:
            wide = segment
        elif rows * lanes < FULL_LANES:
            wide = FEW_WIDE
        else:
            rounds = (entries * row_bytes / GATHERED / 2 + LISTING) / ROUND
            most = max(1 << int(in_flight * rounds).bit_length() - 1, FEWEST)
            wide = min(max(WIDE, 4 * mean), segment, most)
        cut = entries // segment
        return cls(wide, segment, entries // wide + cut + 1, 5 * cut // 2 + 16, 3 * cut // 2 + 16)


def direct_tile(
    dtype: torch.dtype, n: int, vector: int, rows: int, entries: int, *, extremum: bool = False
) -> RowTile:
    """Return the tile for ``n`` columns read ``vector`` elements at a time."""
    narrow = choose_narrow_tile(dtype, n, vector, rows, entries / max(rows, 1))
    if narrow is not None and not extremum:
        return narrow
    tiles = [tile for tile in row_tiles(dtype) if tile.vector == vector]
    if vector != vector_widths(dtype)[0]:
        return next((tile for tile in tiles if tile.slab >= n), tiles[-1])
    mean = entries / max(rows, 1)
    many = mean < SHORT_MEAN and rows >= MANY_ROWS
    whole = [tile for tile in tiles if n % tile.slab == 0 and tile.slab * dtype.itemsize >= 128]
    if not whole:
        single = [tile for tile in tiles if tile.times == 1]
        return next((tile for tile in single if tile.slab >= n), single[-1])
    if many:  # few lanes, much of a row each
        return max(whole, key=lambda tile: (tile.slab if tile.lanes <= 8 else 0, -tile.lanes))
    lanes = 32 if mean >= LONG_MEAN or n * dtype.itemsize >= 1024 else 1
    if n * dtype.itemsize == 128:
        lanes = 1 if mean < SHORT else 32
    elif n * dtype.itemsize == 512:
        few = mean >= LONG_MEAN and rows < FEW_ROWS
        lanes = 32 if few else 8 if mean <= SHORT and rows >= MANY_ROWS // 3 else 16
    return max(whole, key=lambda tile: (tile.slab, -abs(tile.lanes - lanes)))


def direct_config(
    dtype: torch.dtype,
    tile: RowTile,
    *,
    out_dtype: torch.dtype | None = None,
    extremum: bool = False,
    args: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_direct.cu``: those of ``spmm_csr.cu`` for rows of unknown lengths."""
    shape = RowShape(long_share=1.0)
    config = spmm_config(
        dtype, tile, True, out_dtype=out_dtype, extremum=extremum, args=args, shape=shape
    )
    for name in ("kRows", "kWeighted", "kRepair", "kShared", "kHeads"):
        del config[name]
    # Checks of indices take registers: with as few as spmm_csr.cu has, these spill.
    if tile.parts > 1:
        config["kMinBlocks"] = 5
    elif tile.times > 1:
        config["kMinBlocks"] = min(int(config["kMinBlocks"]) - 1, 6)
    return config


def direct_sddmm_config(dtype: torch.dtype, tile: RowTile) -> dict[str, ConfigValue]:
    """Constants of ``sddmm_direct.cu``."""
    return {**sddmm_config(dtype, tile), "kMinBlocks": 4}


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in ELEMENTS:
        tiles = itertools.chain(row_tiles(dtype), narrow_tiles(dtype))
        for tile, out in itertools.product(tiles, out_dtypes(dtype)):
            yield direct_config(dtype, tile, out_dtype=out)
        for tile in row_tiles(dtype):
            yield direct_config(dtype, tile, extremum=True)


# First in each struct, because they change from call to call.
_SIZES = (i64("entries"), i64("cols"), i32("rows"))
# The list of long rows, and what is checked.
_LIST = (
    pointer("items", "int4*"),
    pointer("parent_of_slot", "int*"),
    pointer("nodes", "int4*"),
    pointer("counts", "int*", "see direct_items.cuh"),
    pointer("faults", "unsigned long long*", "where the host reads what is wrong; null: nowhere"),
    i32("wide_indptr", "row pointers have 64 bits, not 32"),
    i32("wide_columns", "columns have 64 bits, not 32"),
    i32("wide_length", "longer rows are listed"),
    i32("segment", "most entries of a piece"),
    i32("most_items", "room in the list"),
    i32("slot_count"),
    i32("node_count"),
    i32("wide_blocks", "thread blocks for the list"),
)
SPMM_DIRECT = KernelSpec(
    file="rows/spmm_direct.cu",
    params=ParamStruct.of(
        pointer("indptr", "const void*"),
        pointer("columns", "const void*"),
        pointer("values", "const E::Storage*", "null: all ones"),
        *OPERANDS,
        *_SIZES,
        *_LIST,
        pointer("arrivals", "int*"),
        pointer("partials", "char*", "[batch][slab][slot]"),
        *STRIDES,
        *(field for field in EPILOGUE if field.name != "indptr"),
        pointer("args", "i64*", "winning entry of each element of C, -1 if the row is empty"),
        i32("minimum", "an extremum is the least, not the greatest"),
        i32("slabs"),
        i32("n"),
        i32("early", "let the next kernel start as soon as all blocks are running"),
    ),
    configs=_configs,
    shared_memory=True,
)
SDDMM_DIRECT = KernelSpec(
    file="rows/sddmm_direct.cu",
    params=ParamStruct.of(
        pointer("indptr", "const void*"),
        pointer("columns", "const void*"),
        pointer("g", "const E::Storage*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "Acc*", "[batch][entries]"),
        *_SIZES,
        *_LIST,
        i64("g_row_stride"),
        i64("b_row_stride"),
        i64("g_batch_stride"),
        i64("b_batch_stride"),
        i64("out_batch_stride"),
        i32("n"),
    ),
    configs=lambda: ({**each, "kMinBlocks": 4} for each in SDDMM_CSR.configs()),
    shared_memory=True,
)
