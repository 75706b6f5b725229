"""Groups of kernel parameters that several kernels share.

C types are those that each .cu defines before its struct: ``E`` and ``Out`` are the element types
of B and C, ``Acc`` is the type of sums.
"""

from __future__ import annotations

from sparsetile.jit.params import f64, i32, i32_array, i64, pointer

__all__ = [
    "BUNDLES", "EPILOGUE", "OPERANDS", "PARTIALS", "POSITIONS", "ROW_BIAS", "SECTIONS", "STRIDES",
    "TREE",
]  # fmt: skip

# Neighbours, so that a prepared launch writes both at once.
OPERANDS = (pointer("b", "const E::Storage*"), pointer("c", "Out::Storage*"))
STRIDES = (
    i64("b_row_bytes"),
    i64("c_row_stride", "in elements, as the strides of batches"),
    i64("b_batch_stride"),
    i64("c_batch_stride"),
)
# Read by row_items.cuh for bundles and extrema.
BUNDLES = (
    pointer("tagged", "const uint4*", "bundles: bits and column of four list elements"),
    pointer("packed", "const E::Storage*", "bundles: kRows values of each list element"),
    pointer("bundle_rows", "const int4*", "bundles: their rows of C, -1 for none"),
    pointer("args", "i64*", "kArgs: places in its row of the winner of each element of C"),
    i32("minimum", "an extremum is the least, not the greatest"),
)
# The row of C at each position of a plan's order. A kernel may own a part of C's rows.
POSITIONS = (
    pointer("order", "const int*", "row of C at each position; null: the position itself"),
    i32("rows", "positions"),
)
# Operations on a row of C after its sum (epilogue.cuh).
EPILOGUE = (
    pointer("indptr", "const i64*", "row pointers, for the mean"),
    pointer("bias", "const Acc*", "[n]; null: none"),
    f64("alpha"),
    f64("beta"),
    i32("epilogue", "0: alpha 1, beta 0, no mean, bias or ReLU"),
    i32("mean"),
    i32("relu"),
)
# A bias along C's rows, as it is given (epilogue.cuh).
ROW_BIAS = (
    pointer("row_bias", "const void*", "[rows], in the given order; null: none"),
    i32("row_bias_type", "0: float32, 1: float16, 2: bfloat16"),
)
# Partial sums of units of work that were split, one slot each.
PARTIALS = (pointer("partials", "char*", "[batch][slab][slot]"), i32("slot_count"))
# The tree that adds them up (tree.cuh).
TREE = (
    pointer("parent_of_slot", "const int*"),
    pointer("nodes", "const int4*"),
    pointer("arrivals", "int*"),
    *PARTIALS,
    i32("node_count"),
)
# End of each of the five sections of the item list (segment.cuh).
SECTIONS = (i32_array("item_end", 5, "in items"), i32_array("block_end", 5, "in thread blocks"))
