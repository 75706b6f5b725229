"""Host side of ``pack_cells.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["PACK_CELLS", "Stage"]

# The steps of the kernel, in the order of the launches.
Stage = IntEnum("Stage", "KEYS HEADS TILES BITS COUNTS ENTRIES", start=0)

PACK_CELLS = KernelSpec(
    file="pack/pack_cells.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "of A"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("positions", "const i64*", "place of each row in the order; null: the row itself"),
        pointer("starts", "const i64*", "entries before each position, [rows + 1]"),
        pointer("keys", "int*", "if 31 bits are enough"),
        pointer("wide_keys", "i64*", "if they are not"),
        pointer("entry", "const i64*", "entry of each sorted key"),
        pointer("place", "int*", "position of each entry's row"),
        pointer("pair", "int*", "pairs up to each sorted entry"),
        pointer("window_ptr", "int*", "first tile of each window"),
        pointer("tile_columns", "int*", "column of A behind each column of a tile"),
        pointer("cells", "i64*", "cell of each sorted entry"),
        pointer("words", "u64*", "a bit for each cell"),
        pointer("word_ptr", "int*", "packed values before each word"),
        pointer("entries", "int*", "entry of each packed value"),
        pointer("places", "i64*", "cell of each entry; null: not wanted"),
        i64("count", "entries of A"),
        i64("work", "elements of the stage"),
        i32("stage"),
        i32("wide", "which keys there are"),
        i32("rows", "of A"),
        i32("cols"),
        i32("height", "rows of a window"),
        i32("pad", "columns of a tile"),
        i32("group", "a window's tiles are a multiple of this"),
        i32("fragments", "cells in the order of an MMA's lanes, not row by row"),
        i32("repeat", "slots without a column repeat the last one; otherwise they are -1"),
    ),
    configs=stage_configs,
)
