"""Host side of ``pack_bundles.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, f64, i32, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["PACK_BUNDLES", "Stage"]

# The steps of the kernel, in the order of the launches.
Stage = IntEnum("Stage", "POSITIONS FRESH WINDOWS ROWS ENTRIES", start=0)

PACK_BUNDLES = KernelSpec(
    file="pack/pack_bundles.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "of A"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("rows", "const i64*", "row at each position; null: the position itself"),
        pointer("positions", "int*", "place of each row; null: the row itself"),
        pointer("distinct", "int*", "columns of each window"),
        pointer(
            "fresh",
            "int*",
            "whether an entry is its column's first in the window; null: not wanted",
        ),
        pointer("fresh_sums", "const int*", "such entries up to each one"),
        pointer("plan", "int*", "of windows: whether bundled, padded list; of rows: entries"),
        pointer("sums", "const int*", "running sums of the plan, over its three lists"),
        pointer("tagged", "int*", "columns and bits of list elements"),
        pointer("bundle_ptr", "i64*"),
        pointer("bundle_rows", "int*"),
        pointer("loose", "i64*", "rows in no bundle"),
        pointer("entries", "i64*", "those in bundles"),
        pointer("slots", "i64*", "place of each one's value"),
        f64("min_sharing", "entries per distinct column from which a window is bundled"),
        i64("work", "elements of the stage"),
        i32("stage"),
        i32("row_count", "of A"),
        i32("windows"),
    ),
    configs=stage_configs,
)
