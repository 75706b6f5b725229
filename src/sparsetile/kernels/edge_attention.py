"""Host side of the kernels of scores and messages that are computed per entry.

``edge_scores.cu``, ``edge_rows.cu`` and ``edge_columns.cu``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, f64, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.columns import COLUMN_LANES, COLUMN_THREADS
from sparsetile.kernels.csr import ELEMENTS, THREADS, RowTile, vector_widths
from sparsetile.kernels.gat import GAT_DTYPES
from sparsetile.kernels.params import SECTIONS, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BENT",
    "DOT",
    "EDGE_COLUMNS",
    "EDGE_ROWS",
    "EDGE_SCORES",
    "ENTRY_THREADS",
    "FEATURES",
    "GRADIENT",
    "SUMS",
    "columns_config",
    "entry_grid",
    "rows_config",
    "rows_slot_bytes",
    "rows_tile",
    "scores_per_entry_config",
]  # fmt: skip

# Modes (gat.cuh).
DOT, BENT, GRADIENT, FEATURES, RELU, RELU_GRADIENT = range(6)
# Features whose gradients are computed in one launch.
SUMS = (4, 2, 1)
# Lanes of an entry, and steps of them that are in flight.
ENTRY_LANES, ENTRY_THREADS, _ENTRY_UNROLL = 8, 128, 4
_FULL_LANES, _NARROW_LANES = (8, 16, 32), (8, 32)
_ROWS_UNROLL, _COLUMNS_UNROLL = 4, 2


def entry_grid(entries: int) -> tuple[int, int, int]:
    """Return the grid with a group of lanes for each entry."""
    return -(-entries // (ENTRY_THREADS // ENTRY_LANES)), 1, 1


def scores_per_entry_config(
    dtype: torch.dtype, vector: int, mode: int, edges: bool, sums: int = 1
) -> dict[str, ConfigValue]:
    """Constants of ``edge_scores.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": vector,
        "kLanes": ENTRY_LANES,
        "kUnroll": _ENTRY_UNROLL,
        "kThreads": ENTRY_THREADS,
        "kMode": mode,
        "kEdges": edges,
        "kSums": sums,
    }


def rows_tile(dtype: torch.dtype, n: int, vector: int) -> RowTile:
    """Return the tile of ``edge_rows.cu`` for rows of ``n`` columns."""
    lanes = _FULL_LANES if vector == vector_widths(dtype)[0] else _NARROW_LANES
    count = -(-n // vector)
    return RowTile(vector, next((each for each in lanes if each >= count), lanes[-1]))


def rows_config(
    dtype: torch.dtype, tile: RowTile, mode: int, edges: bool, keep: bool
) -> dict[str, ConfigValue]:
    """Constants of ``edge_rows.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kUnroll": _ROWS_UNROLL,
        "kThreads": THREADS,
        "kMode": mode,
        "kEdges": edges,
        "kKeep": keep,
    }


def rows_slot_bytes(tile: RowTile, keep: bool) -> int:
    """Return the bytes of a partial sum: the device's Sums for each lane of a group."""
    return tile.lanes * tile.vector * (2 if keep else 1) * 4


def columns_config(
    dtype: torch.dtype, vector: int, lanes: int, sums: int
) -> dict[str, ConfigValue]:
    """Constants of ``edge_columns.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": vector,
        "kLanes": lanes,
        "kUnroll": _COLUMNS_UNROLL,
        "kThreads": COLUMN_THREADS,
        "kSums": sums,
    }


def _scores_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in GAT_DTYPES:
        for vector in vector_widths(dtype):
            for mode, edges in ((DOT, False), (BENT, False), (BENT, True), (GRADIENT, False)):
                yield scores_per_entry_config(dtype, vector, mode, edges)
            for sums in SUMS:
                yield scores_per_entry_config(dtype, vector, FEATURES, True, sums)


def _rows_configs() -> Iterator[dict[str, ConfigValue]]:
    both = (False, True)
    kinds = [(DOT, False, False), *((BENT, *each) for each in itertools.product(both, both))]
    kinds += [(mode, edges, False) for mode in (RELU, RELU_GRADIENT) for edges in both]
    for dtype in GAT_DTYPES:
        full, *narrow = vector_widths(dtype)
        tiles = [RowTile(full, lanes) for lanes in _FULL_LANES]
        tiles += [RowTile(vector, lanes) for vector in narrow for lanes in _NARROW_LANES]
        for tile, (mode, edges, keep) in itertools.product(tiles, kinds):
            yield rows_config(dtype, tile, mode, edges, keep)


def _columns_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, lanes, sums in itertools.product(GAT_DTYPES, COLUMN_LANES, SUMS):
        for vector in vector_widths(dtype):
            yield columns_config(dtype, vector, lanes, sums)


# Both ends of an entry.
_ENDS = (
    pointer("rows", "const i64*", "[entries] targets"),
    pointer("columns", "const int*", "[entries] sources"),
    pointer("left", "const E::Storage*", "[targets, n]"),
    pointer("right", "const E::Storage*", "[sources, n]"),
)
# Edges' features and the weights that map them.
_EDGES = (
    pointer("vector", "const float*", "[n]"),
    pointer("features", "const float*", "[entries, dims]"),
    pointer("weights", "const float*", "[dims, n]"),
)
_SIZES = (i32("heads"), i32("width", "columns of a head"), i32("n", "heads * width"), i32("dims"))

EDGE_SCORES = KernelSpec(
    file="attention/edge_scores.cu",
    params=ParamStruct.of(
        *_ENDS,
        *_EDGES,
        pointer("chunk", "const float*", "kFeatures: rows of weights"),
        pointer("terms", "const float4*", "kGradient: [targets, heads], D the last number"),
        pointer("of_source", "const float*", "kGradient: [sources, heads]; null: zeros"),
        pointer("of_edge", "const float*", "[entries, heads] scores; kFeatures: weights"),
        pointer("counts", "const float*", "kGradient: edges of each entry; null: one"),
        pointer("scales", "const float*", "kGradient: factors of messages; null: counts"),
        pointer("out", "float*", "[entries, heads]; kFeatures: some of [entries, dims]"),
        f64("slope", "of the leaky ReLU; kDot: a factor"),
        i64("count", "entries"),
        *_SIZES,
        i32("shared", "kDot: whether all heads use one row of right, [width]"),
    ),
    configs=_scores_configs,
)
EDGE_ROWS = KernelSpec(
    file="attention/edge_rows.cu",
    params=ParamStruct.of(
        pointer("items", "const int4*"),
        pointer("columns", "const int*"),
        pointer("order", "const i64*", "A's number of each entry; null: its own"),
        pointer("weight", "const float*", "[entries of A, heads]"),
        pointer("b", "const E::Storage*", "rows that are gathered"),
        pointer("own", "const E::Storage*", "kBent, kReluGradient: rows that are summed to"),
        pointer("direct", "const E::Storage*", "kRelu, kReluGradient: [entries of A, n]"),
        *_EDGES,
        pointer("c", "E::Storage*", "[rows, n]"),
        pointer("more", "float*", "kKeep: the same shape"),
        f64("slope", "of the leaky ReLU; kDot: a factor"),
        *TREE,
        *SECTIONS,
        *_SIZES,
        i32("shared", "kDot: whether all heads use one row of b, [width]"),
    ),
    configs=_rows_configs,
)
EDGE_COLUMNS = KernelSpec(
    file="attention/edge_columns.cu",
    params=ParamStruct.of(
        *_ENDS,
        *_EDGES,
        pointer("chunk", "const float*", "features of the first d"),
        pointer("weight", "const float*", "[entries, heads]"),
        pointer("out", "float*", "[kSums, n]"),
        f64("slope"),
        pointer("partials", "float*", "[slab][chunk] sums of thread blocks"),
        pointer("arrivals", "int*", "[slab]"),
        i64("count", "entries"),
        *_SIZES,
    ),
    configs=_columns_configs,
    shared_memory=True,
)
