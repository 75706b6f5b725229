"""Host side of the kernels of graph attention.

``gat_scores.cu``, ``gat_softmax.cu``, ``spmm_gat.cu``, ``gat_terms.cu`` and ``gat_vectors.cu``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, f64, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.columns import COLUMN_LANES, COLUMN_THREADS, COLUMN_UNROLL
from sparsetile.kernels.csr import ELEMENTS, THREADS, RowTile, vector_widths
from sparsetile.kernels.params import SECTIONS, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "GAT_DTYPES",
    "GAT_SCORES",
    "GAT_SOFTMAX",
    "GAT_TERMS",
    "GAT_VECTORS",
    "MODES",
    "SOFTMAX_LANES",
    "SPMM_GAT",
    "TERMS_LANES",
    "TERMS_THREADS",
    "gat_config",
    "gat_parts",
    "gat_tile",
    "head_lanes",
    "scores_config",
    "slot_bytes",
    "softmax_config",
    "terms_config",
    "vectors_config",
]

GAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Modes of spmm_gat: only sums, sums with the inputs of gradients, or gradients.
MODES = ("infer", "train", "backward")
# Lanes of a group: eight heads read a sector of their numbers at once.
SOFTMAX_LANES = 8
SOFTMAX_UNROLL = 4
TERMS_LANES, TERMS_THREADS = 8, 256
# Lanes of narrow vectors, for odd head widths.
_NARROW_LANES = (8, 32)
_FULL_LANES = (8, 16, 32)


def head_lanes(heads: int) -> int:
    """Return how many heads ``gat_softmax`` processes side by side: a power of two."""
    return min(SOFTMAX_LANES, 1 << (heads - 1).bit_length())


def softmax_config(heads: int, edges: bool = False) -> dict[str, ConfigValue]:
    """Constants of ``gat_softmax.cu``; ``edges``: scores have a term of each entry."""
    return {
        "kLanes": SOFTMAX_LANES,
        "kHeadLanes": head_lanes(heads),
        "kUnroll": SOFTMAX_UNROLL,
        "kThreads": THREADS,
        "kEdges": edges,
    }


def gat_tile(dtype: torch.dtype, n: int, vector: int) -> RowTile:
    """Return the tile for rows of ``n`` columns: one slab if a warp can hold the row.

    Column ids and numbers of nodes are read once per slab, so few slabs are better. Sums and loads
    in flight fill the registers: 16-bit types have one vector per lane.
    """
    full = vector == vector_widths(dtype)[0]
    lanes = _FULL_LANES if full else _NARROW_LANES
    count = -(-n // vector)
    found = next((each for each in lanes if each >= count), lanes[-1])
    two = full and dtype is torch.float32 and count > found
    return RowTile(vector, found, 2 if two else 1)


def gat_parts(tile: RowTile, heads: int, width: int) -> int:
    """Return the most slabs of a head of ``width`` columns: parts of its d_source."""
    slab = tile.slab
    return max((head * width % slab + width - 1) // slab + 1 for head in range(heads))


def gat_config(
    dtype: torch.dtype, tile: RowTile, mode: str, scaled: bool, edges: bool = False
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_gat.cu``; ``edges``: scores have a term of each entry."""
    backward = mode == "backward"
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": tile.vector,
        "kLanes": tile.lanes,
        "kTimes": tile.times,
        "kUnroll": 2 if backward and tile.times > 1 else 4,
        "kThreads": THREADS,
        "kMinBlocks": 5,
        "kScaled": scaled,
        "kKeep": mode == "train",
        "kBackward": backward,
        "kEdges": edges,
    }


def slot_bytes(tile: RowTile, mode: str) -> int:
    """Return the bytes of a partial sum: the device's Sums for each lane of a group."""
    more = tile.vector if mode == "train" else 1
    return tile.lanes * tile.times * (tile.vector + more) * 4


def terms_config(dtype: torch.dtype, vector: int) -> dict[str, ConfigValue]:
    """Constants of ``gat_terms.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": vector,
        "kLanes": TERMS_LANES,
        "kThreads": TERMS_THREADS,
    }


def vectors_config(
    dtype: torch.dtype, vector: int, lanes: int, bias: bool
) -> dict[str, ConfigValue]:
    """Constants of ``gat_vectors.cu``: with the gradient of a ``bias``, or without."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kVec": vector,
        "kLanes": lanes,
        "kUnroll": COLUMN_UNROLL,
        "kThreads": COLUMN_THREADS,
        "kBias": bias,
    }


def scores_config(dtype: torch.dtype, vector: int, two: bool) -> dict[str, ConfigValue]:
    """Constants of ``gat_scores.cu``: ``two`` terms, or one."""
    return {**terms_config(dtype, vector), "kTwo": two}


def _tiles(dtype: torch.dtype) -> Iterator[RowTile]:
    full, *narrow = vector_widths(dtype)
    for lanes in _FULL_LANES:
        yield RowTile(full, lanes)
    if dtype is torch.float32:
        yield RowTile(full, _FULL_LANES[-1], 2)
    for vector, lanes in itertools.product(narrow, _NARROW_LANES):
        yield RowTile(vector, lanes)


def _gat_configs() -> Iterator[dict[str, ConfigValue]]:
    both = (False, True)
    for dtype, mode, scaled, edges in itertools.product(GAT_DTYPES, MODES, both, both):
        for tile in _tiles(dtype):
            yield gat_config(dtype, tile, mode, scaled, edges)


def _terms_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype in GAT_DTYPES:
        for vector in vector_widths(dtype):
            yield terms_config(dtype, vector)


def _scores_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, two in itertools.product(GAT_DTYPES, (False, True)):
        for vector in vector_widths(dtype):
            yield scores_config(dtype, vector, two)


def _vectors_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, lanes, bias in itertools.product(GAT_DTYPES, COLUMN_LANES, (False, True)):
        for vector in vector_widths(dtype):
            yield vectors_config(dtype, vector, lanes, bias)


# Fields that change from call to call are neighbours: a prepared launch writes them at once.
# Numbers of nodes, of which attention is computed (gat.cuh).
_ENTRIES = (
    pointer("items", "const int4*"),
    pointer("columns", "const int*"),
    pointer("counts", "const float*", "[entries] edges of each; null: one"),
    pointer("of_source", "const float*", "[sources, heads]"),
    pointer("of_edge", "const float*", "kEdges: [entries, heads]"),
)

GAT_SCORES = KernelSpec(
    file="attention/gat_scores.cu",
    params=ParamStruct.of(
        pointer("messages", "const E::Storage*", "[nodes, heads * width]"),
        pointer("first", "const float*", "[heads * width]"),
        pointer("second", "const float*", "kTwo: the same"),
        pointer("of_source", "float*", "[nodes, heads]"),
        pointer("of_target", "float*", "kTwo: the same"),
        i64("count", "nodes * heads"),
        i32("heads"),
        i32("width", "columns of a head"),
    ),
    configs=_scores_configs,
)
GAT_SOFTMAX = KernelSpec(
    file="attention/gat_softmax.cu",
    params=ParamStruct.of(
        *_ENTRIES,
        pointer("of_target", "const float*", "[targets, heads]; null: zeros"),
        pointer("terms", "float4*", "[targets, heads]"),
        f64("slope"),
        *TREE,
        *SECTIONS,
        i32("heads"),
    ),
    configs=lambda: (
        softmax_config(heads, edges) for heads in (1, 2, 4, 8) for edges in (False, True)
    ),
)
SPMM_GAT = KernelSpec(
    file="attention/spmm_gat.cu",
    params=ParamStruct.of(
        *_ENTRIES,
        pointer("scales", "const float*", "[entries, heads] factors of messages; null: counts"),
        pointer("order", "const i64*", "backward: A's number of each entry"),
        pointer("terms", "const float4*", "[targets, heads]"),
        pointer("b", "const E::Storage*", "rows that are gathered: messages, or grad"),
        pointer("c", "E::Storage*", "out, or d_messages"),
        pointer("messages", "const E::Storage*", "backward: of the rows of A^T"),
        pointer("first", "const float*", "backward: [n] of the sources' scores; null: not added"),
        pointer("second", "const float*", "backward: of the targets' scores"),
        pointer("d_target", "const float*", "backward, with first: [nodes, heads]"),
        pointer("bias", "const float*", "[n]; null: none"),
        pointer("plain", "float*", "kKeep: sums before bias and rounding"),
        pointer("bent", "float*", "kKeep: sums of terms times their slopes"),
        pointer("d_source", "float*", "backward: [sources, heads, parts]"),
        f64("slope"),
        *TREE,
        *SECTIONS,
        i32("heads"),
        i32("width", "columns of a head"),
        i32("n", "heads * width"),
        i32("parts", "slabs that a head lies in, at most"),
    ),
    configs=_gat_configs,
)
GAT_TERMS = KernelSpec(
    file="attention/gat_terms.cu",
    params=ParamStruct.of(
        pointer("grad", "const E::Storage*", "[targets, heads * width]"),
        pointer("plain", "const float*", "the same shape"),
        pointer("bent", "const float*", "the same shape"),
        pointer("terms", "const float4*", "[targets, heads]"),
        pointer("new_terms", "float4*", "[targets, heads]"),
        pointer("d_target", "float*", "[targets, heads]"),
        i64("count", "targets * heads"),
        i32("width", "columns of a head"),
    ),
    configs=_terms_configs,
)
GAT_VECTORS = KernelSpec(
    file="attention/gat_vectors.cu",
    params=ParamStruct.of(
        pointer("messages", "const E::Storage*", "[nodes, heads * width]"),
        pointer("grad", "const E::Storage*", "kBias: the same shape"),
        pointer("d_source", "const float*", "[nodes, heads]"),
        pointer("d_target", "const float*", "[nodes, heads]"),
        pointer("d_first", "float*", "[heads * width]"),
        pointer("d_second", "float*", "[heads * width]"),
        pointer("d_bias", "float*", "kBias: [heads * width]"),
        pointer("partials", "float*", "[slab][chunk] sums of thread blocks"),
        pointer("arrivals", "int*", "[slab]"),
        i64("nodes"),
        i32("heads"),
        i32("width", "columns of a head"),
        i32("n", "heads * width"),
    ),
    configs=_vectors_configs,
    shared_memory=True,
)
