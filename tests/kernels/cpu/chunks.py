"""Chunks of rows as the CPU kernels take them."""

from __future__ import annotations

from torch import Tensor

from sparsetile.balance import RowChunks
from sparsetile.formats import Units


def row_chunks(indptr: Tensor, chunks: int) -> Tensor:
    """Bounds of ``chunks`` chunks of the rows of a CSR matrix, int64 [chunks + 1]."""
    return RowChunks.make(Units.from_offsets(indptr), chunks=chunks).bounds
