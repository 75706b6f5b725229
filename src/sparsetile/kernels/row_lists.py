"""Host side of ``list_rows.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.core.layout import LENGTHS
from sparsetile.jit.params import ParamStruct, f64, i32, i32_array, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["CLASSES", "LIST_ROWS", "TALLY", "TREE_LEVELS", "Stage"]

# Classes of units, in the order of the kernel's lists.
CLASSES = ("cut bundle", "cut row", "shared", "wide bundle", "wide row", "bundle", "row")
# Numbers of the kernel's tally: longest, end, longest up to each length; total, longer, their
# total; windows that share columns, their entries, their distinct columns; of longer units, if they
# are cut at the length: pieces, nodes of their trees, pieces of bundles, the longest piece.
TALLY = 2 + len(LENGTHS) + 1 + 2 * len(LENGTHS) + 3 + 4 * len(LENGTHS)
# Levels of the tree over a row of 2^31 entries in pieces of one.
TREE_LEVELS = 8

# The steps of the kernel.
Stage = IntEnum("Stage", "COUNT CLASSES ARRANGE LEVELS PIECES ITEMS HEADS", start=0)

LIST_ROWS = KernelSpec(
    file="pack/list_rows.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "of A"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("rows", "const i64*", "rows to be listed; null: 0, 1, 2, ..."),
        pointer("bundle_ptr", "const i64*", "ranges of bundles, which come before rows"),
        pointer("distinct", "const int*", "columns of each window; null: windows are not counted"),
        pointer("tally", "i64*", "as TALLY says"),
        pointer("sums", "int*", "units of a class in a chunk, by class; then their running sums"),
        pointer("arranged", "int*", "units by class"),
        pointer("cut", "int4*", "label, begin, length, whether a bundle"),
        pointer("levels", "int*", "slots and nodes of each level of the tree of each cut unit"),
        pointer("level_sums", "const int*", "their running sums"),
        pointer("parent_of_slot", "int*", "of the tree"),
        pointer("nodes", "int4*", "of the tree"),
        pointer("items", "int4*", "of a schedule"),
        pointer("heads", "int*", "column of each thread's first entry"),
        f64("min_sharing", "entries per distinct column from which a window counts"),
        i64("units"),
        i64("bundles"),
        i64("cut_units", "units that are cut"),
        i64("work", "threads of the stage"),
        i32("stage"),
        i32("max_length", "longer units are cut"),
        i32("wide_length", "longer ones have a warp"),
        i32("shared_length", "longer rows get a thread block"),
        i32("block", "threads of a product's block"),
        i32("lanes", "of a short item"),
        i32_array("limits", len(LENGTHS), "lengths that units are counted by"),
        i32_array("counts", len(CLASSES), "units of each class"),
        i32_array("pieces", 3, "of cut units, in the sections of shared and wide units"),
        i32_array("sections", 5, "items of each"),
    ),
    configs=stage_configs,
    shared_memory=True,
)
