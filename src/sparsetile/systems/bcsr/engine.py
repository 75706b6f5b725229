"""Matrices that TMA can copy as they are, and their tensor maps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsetile.jit.tensor_map import MAP_WORDS, NO_MAP, TensorMap
from sparsetile.kernels.bcsr import STORE_COLUMNS
from sparsetile.launch.geometry import aligned

__all__ = [
    "MapOf", "copies_well", "described", "no_map", "side_by_side", "stores_well", "transposed_well",
]  # fmt: skip

# Address -> map of the matrix there.
MapOf = Callable[[int], TensorMap]


def side_by_side(matrix: Tensor) -> bool:
    """Whether elements of a row are neighbours."""
    return matrix.stride(-1) == 1 or matrix.shape[-1] == 1


def copies_well(matrix: Tensor) -> bool:
    """Whether TMA can copy a matrix as it is: row-major, aligned, rows not overlapping."""
    return side_by_side(matrix) and aligned(matrix) and matrix.stride(-2) >= matrix.shape[-1]


def transposed_well(matrix: Tensor) -> bool:
    """Whether B is the transpose of a matrix that TMA can copy as it is."""
    return matrix.stride(-1) != 1 and copies_well(matrix.mT)


def stores_well(out: Tensor) -> bool:
    """Whether rows of C can be written in place, 16 bytes at once, also by TMA.

    TMA omits elements outside of the matrix, but only in units of 16 bytes.
    """
    return copies_well(out) and out.shape[-1] % STORE_COLUMNS == 0


def described(
    pointer: int, dtype: torch.dtype, shape: tuple[int, int], row_bytes: int, box: tuple[int, int],
) -> TensorMap:  # fmt: skip
    """In place of a map if threads copy instead of TMA: address and sizes."""
    return (pointer, *shape, row_bytes, *[0] * (MAP_WORDS - 4))


def no_map(pointer: int) -> TensorMap:
    """In place of a map that no thread block reads."""
    return NO_MAP
