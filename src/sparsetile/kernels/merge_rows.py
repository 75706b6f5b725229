"""Host side of ``merge_rows.cu``: its stages and parameters."""

from __future__ import annotations

from enum import IntEnum

from sparsetile.jit.params import ParamStruct, i32, i32_array, i64, pointer
from sparsetile.kernels.spec import KernelSpec
from sparsetile.kernels.stages import stage_configs

__all__ = ["BLOCK", "MERGE_ROWS", "MOST_LEVELS", "RANGE", "SIDE", "Stage"]

# The steps of the kernel. From KEYS on, groups are merged level by level.
Stage = IntEnum("Stage", "ROWS SIGNATURES KEYS ROUND SIDES REST UNITE ORDER", start=0)
# Positions of a sort that a warp looks at, and MinHash values of a group: a lane each.
BLOCK = 32
# Positions of the first sort in which groups are left side by side.
SIDE = 1024
# Entries of A that a warp hashes.
RANGE = 256
MOST_LEVELS = 6

MERGE_ROWS = KernelSpec(
    file="pack/merge_rows.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "of A"),
        pointer("columns", "const int*", "of A's entries"),
        pointer("used_rows", "const int*", "rows with entries up to and including each row"),
        pointer("rows", "int*", "rows with entries, ascending"),
        pointer("order", "i64*", "the result: [height]"),
        pointer("range_rows", "int*", "number of the first row of each range among `rows`"),
        pointer("values", "int*", "[groups][kBlock], MinHash values of the level's groups"),
        pointer("united", "int*", "those of the next level's"),
        pointer("keys", "int*", "[sorts][groups]"),
        pointer("sorted", "const i64*", "places in `keys`, ascending by key"),
        pointer("best", "u64*", "[rounds][groups], how similar which group is; 0: none"),
        pointer("mate", "int*", "partner of each group; negative: none"),
        pointer("counts", "i64*", "of each group, as the stages say"),
        pointer("sums", "const i64*", "running sums of `counts`"),
        pointer("rest", "int*", "groups without a partner, ascending"),
        pointer("nodes", "int4*", "parts of each group made, rows of the first part, and of both"),
        i64("entries", "of A"),
        i64("work", "threads of the stage"),
        i32("stage"),
        i32("height", "rows of A"),
        i32("used", "rows with entries"),
        i32("groups", "of the level"),
        i32("level"),
        i32("turn", "round of the level, or how many there were"),
        i32("sorts"),
        i32("levels", "in all"),
        i32("key_bits", "of a key's first value: in UNITE for the next level"),
        i32_array("level_nodes", MOST_LEVELS, "first of `nodes` made in each level"),
    ),
    configs=stage_configs,
    shared_memory=True,
)
