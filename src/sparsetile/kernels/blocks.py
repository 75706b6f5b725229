"""Host side of ``list_block.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["LIST_BLOCK", "OUTSIDE", "UNSORTED", "Stage"]

# Bits of the kernel's flags: an edge names no row or column, rows do not ascend.
OUTSIDE, UNSORTED = 1, 2


class Stage(IntEnum):
    """What a launch does."""

    CHECK = 0
    ITEMS = 1


LIST_BLOCK = KernelSpec(
    name="list_block",
    params=ParamStruct.of(
        pointer("targets", "const i64*", "row of each edge"),
        pointer("sources", "const i64*", "column of each edge"),
        pointer("rows", "int*", "the same in 32 bits; sorted where items are made"),
        pointer("columns", "int*"),
        pointer("flags", "int*"),
        pointer("indptr", "i64*", "[row_count + 1]"),
        pointer("items", "int4*", "[row_count] of a schedule"),
        i64("edges"),
        i64("work", "threads of the stage"),
        i32("stage"),
        i32("row_count"),
        i32("column_count"),
    ),
    configs=stage_configs,
)
