"""Contiguous row chunks of equal cost: the work list of the CPU kernels.

A chunk has at least one row. A row with more than its share of the entries makes a heavy chunk,
followed by empty ones; the kernels split such a chunk by columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.balance.base import Schedule
from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.units import Units

__all__ = ["RowChunks"]


@dataclass(frozen=True, eq=False)
class RowChunks(Schedule):
    """Chunks of neighbouring rows; int64, as the CPU kernels take them."""

    consecutive = True
    arrays: ClassVar[tuple[str, ...]] = ("bounds",)
    dtype: ClassVar[torch.dtype] = torch.int64

    items: Tensor  # [chunks, 2]: first row of each chunk, and the row after its last
    bounds: Tensor  # [chunks + 1]: the same: from 0 to M, never decreasing
    offsets: Tensor  # [M + 1]: row pointers of the units, which the kernels read beside the bounds

    @classmethod
    def make(cls, units: Units, *, chunks: int, row_cost: float = 4.0) -> Self:
        """Split consecutive rows 0 to M-1 into contiguous chunks of about equal cost.

        A row costs its number of stored entries plus ``row_cost``, above 0, for its loop and store.
        No chunk costs more than the mean plus one row. More chunks than rows leaves some empty.
        """
        cls._require(units)
        if isinstance(chunks, bool) or not isinstance(chunks, int):
            raise type_error(
                "RowChunks.make", "chunks", "an int", type(chunks).__name__, "Give a whole number"
            )
        if chunks < 1:
            raise value_error(
                "RowChunks.make", "chunks", "at least 1", chunks, "Ask for one chunk or more"
            )
        if not (math.isfinite(row_cost) and row_cost > 0):
            raise value_error(
                "RowChunks.make", "row_cost", "a finite number above 0", row_cost,
                "Leave it at its default",
            )  # fmt: skip
        indptr = units.offsets
        assert indptr is not None  # checked by _require
        rows = indptr.numel() - 1
        # float64 holds every sum exactly enough: entries and rows are far below 2^53.
        numbers = torch.arange(rows + 1, dtype=torch.float64, device=indptr.device)
        cost = indptr.to(torch.float64) + row_cost * numbers
        shares = torch.arange(1, chunks, dtype=torch.float64, device=indptr.device)
        bounds = torch.zeros(chunks + 1, dtype=torch.int64, device=indptr.device)
        bounds[1:-1] = torch.searchsorted(cost, cost[-1] / chunks * shares)
        bounds[-1] = rows
        return cls(torch.stack([bounds[:-1], bounds[1:]], 1), bounds, indptr)
