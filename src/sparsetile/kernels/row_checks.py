"""Host side of ``check_rows.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["CHECK_ROWS", "FACTS", "Stage"]

# What the kernel finds, in its order: numbers out of range, entries out of order.
FACTS = ("bad", "unsorted")

# The forms of a matrix.
Stage = IntEnum("Stage", "COMPRESSED EDGES SORTED", start=0)

CHECK_ROWS = KernelSpec(
    file="pack/check_rows.cu",
    params=ParamStruct.of(
        pointer("rows", "const void*", "row pointers, the row of each entry, or sorted keys"),
        pointer("columns", "const void*", "of entries"),
        pointer("indptr", "i64*", "row pointers that are written"),
        pointer("indices", "int*", "columns that are written"),
        pointer("keys", "i64*", "of edges"),
        pointer("order", "const i64*", "the entry of each sorted key"),
        pointer("entry_map", "i64*", "place of each entry among the sorted ones"),
        pointer("facts", "int*", "as FACTS says"),
        i64("row_count"),
        i64("column_count"),
        i64("entries"),
        i64("work", "threads of the stage"),
        i32("stage"),
        i32("wide_rows", "whether rows are 64-bit numbers"),
        i32("wide_columns"),
    ),
    configs=stage_configs,
)
