"""Host side of ``spmm_won.cu``: parameters and configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS, MAX_ACCESS_BYTES, PLACES, THREADS, vector_widths
from sparsetile.kernels.params import SECTIONS, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = ["SPMM_WON", "won_config", "won_lanes", "won_vector"]

_LANES = (8, 16, 32)
# Rows of places of a group that are in flight.
_IN_FLIGHT = 4
_TYPES = {torch.int16: "short", torch.int32: "int"}


def won_lanes(n: int, vector: int) -> int:
    """Return the lanes of a row: as many as have columns of it."""
    return next((lanes for lanes in _LANES if lanes * vector >= n), _LANES[-1])


def won_vector(dtype: torch.dtype, places: torch.dtype, n: int) -> int:
    """Return the widest vector that divides n columns, whose places come with one access."""
    most = MAX_ACCESS_BYTES // PLACES[places]
    return next(width for width in vector_widths(dtype) if width <= most and n % width == 0)


def won_config(
    dtype: torch.dtype, places: torch.dtype, vector: int, lanes: int
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_won.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "PLACE": _TYPES[places],
        "kVec": vector,
        "kLanes": lanes,
        "kUnroll": _IN_FLIGHT,
        "kThreads": THREADS,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, places in itertools.product(ELEMENTS, PLACES):
        for vector, lanes in itertools.product(vector_widths(dtype), _LANES):
            if vector * PLACES[places] <= MAX_ACCESS_BYTES:
                yield won_config(dtype, places, vector, lanes)


SPMM_WON = KernelSpec(
    file="rows/spmm_won.cu",
    params=ParamStruct.of(
        pointer("items", "const int4*", "of Aᵀ's schedule"),
        pointer("columns", "const int*", "of Aᵀ's entries: rows of A"),
        pointer("order", "const i64*", "entry of A that is each entry of Aᵀ"),
        pointer("indptr", "const i64*", "of A"),
        pointer("values", "const E::Storage*", "of Aᵀ; null: all are 1"),
        pointer("grad", "const E::Storage*", "[batch][rows of A][n]"),
        pointer("places", "const void*", "as grad: the winner's place in its row of A, or -1"),
        pointer("out", "E::Storage*", "[batch][columns of A][n]"),
        i64("grad_batch_stride", "in elements"),
        i64("out_batch_stride"),
        *TREE,
        *SECTIONS,
        i32("n"),
    ),
    configs=_configs,
)
