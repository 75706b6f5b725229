"""Host side of ``pack_groups.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["PACK_GROUPS", "WINDOW_COUNTS", "Stage"]

# Counts of a window, in the order of the kernel's ``counts``.
WINDOW_COUNTS = (
    "entries", "fresh", "pairs", "short_pairs", "slices_2", "slices_4", "slices_8",
)  # fmt: skip

# The steps of the kernel, in the order of the launches.
Stage = IntEnum("Stage", "COUNT ROWS SLICES GROUPS REST", start=0)

PACK_GROUPS = KernelSpec(
    file="pack/pack_groups.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "of A"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("order", "const i64*", "row at each position; null: the position itself"),
        pointer("starts", "const i64*", "entries before each position, [rows + 1]"),
        pointer("place", "int*", "position of each entry's row"),
        pointer("rank", "int*", "entries of its window before it, column by column"),
        pointer("mask", "u16*", "rows of its window that have its column, a bit each"),
        pointer("counts", "int*", "of windows, one list after the other"),
        pointer("tiles", "const int*", "of each window; 0 if it keeps no group"),
        pointer("tile_sums", "const int*", "tiles up to each window, itself included"),
        pointer("kept_sums", "const int*", "windows with groups"),
        pointer("outside_sums", "const int*", "entries outside groups of such windows"),
        pointer("slices", "int*", "of each column, at its first entry by columns; else 0"),
        pointer("slice_sums", "const int*", "slices up to each entry by columns"),
        pointer("outside", "int*", "1 for an entry outside groups of a window that has some"),
        pointer("rest_sums", "const int*", "such entries up to each one"),
        pointer("window_rows", "int*", "rows of A in windows"),
        pointer("other_rows", "i64*", "row, first entry and length of rows in none, [3, others]"),
        pointer("row_window_offset", "int*"),
        pointer("tile_columns", "int*"),
        pointer("slot_ids", "unsigned char*"),
        pointer("slot_entries", "int*"),
        pointer("window_rest", "int*"),
        pointer("rest_rows", "unsigned char*"),
        pointer("rest_columns", "int*"),
        pointer("rest_entries", "int*"),
        i64("work", "elements of the stage"),
        i64("others", "rows in no window"),
        i32("stage"),
        i32("rows", "of A"),
        i32("windows"),
        i32("fixed", "entries of a tile column"),
    ),
    configs=stage_configs,
)
