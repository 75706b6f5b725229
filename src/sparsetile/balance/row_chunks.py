"""Contiguous row chunks of equal cost: the work list of the CPU kernels.

A chunk is never less than a row, so that a row with more than its share of the entries makes a
heavy chunk, and the chunks it swallows come out empty. The kernels share such a chunk out by
columns instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error

__all__ = ["row_chunks"]


def row_chunks(indptr: Tensor, chunks: int, row_cost: float = 4.0) -> Tensor:
    """Split the rows of a CSR matrix into contiguous chunks of about equal cost.

    A row costs its number of stored entries plus ``row_cost``.

    Parameters
    ----------
    indptr : Tensor
        int64 [M+1], the row pointers, on any device.
    chunks : int
        Number of chunks, at least 1. More chunks than rows leaves some empty.
    row_cost : float
        Cost of a row besides its entries (loop, store of C), in entries; above 0.

    Returns
    -------
    Tensor
        int64 [chunks+1] on the device of ``indptr``, from 0 to M, never decreasing; chunk ``c``
        is rows ``bounds[c]`` to ``bounds[c+1] - 1``. No chunk costs more than the mean plus one
        row.

    Raises
    ------
    TypeError, ValueError
        Where an argument is not as described.
    """
    if not isinstance(indptr, Tensor) or indptr.dtype != torch.int64:
        actual = indptr.dtype if isinstance(indptr, Tensor) else type(indptr).__name__
        raise type_error(
            "row_chunks", "indptr", "an int64 tensor", actual, "Pass the indptr of a CSR"
        )
    if indptr.dim() != 1 or indptr.numel() == 0:
        raise value_error(
            "row_chunks",
            "indptr",
            "one-dimensional with M+1 elements",
            f"shape {tuple(indptr.shape)}",
            "Pass the indptr of a CSR",
        )
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise type_error(
            "row_chunks", "chunks", "an int", type(chunks).__name__, "Give a whole number"
        )
    if chunks < 1:
        raise value_error("row_chunks", "chunks", "at least 1", chunks, "Ask for one chunk or more")
    if not (math.isfinite(row_cost) and row_cost > 0):
        raise value_error(
            "row_chunks", "row_cost", "a finite number above 0", row_cost, "Leave it at its default"
        )
    rows = indptr.numel() - 1
    # float64 holds every sum exactly enough: entries and rows are far below 2^53.
    numbers = torch.arange(rows + 1, dtype=torch.float64, device=indptr.device)
    cost = indptr.to(torch.float64) + row_cost * numbers
    shares = torch.arange(1, chunks, dtype=torch.float64, device=indptr.device)
    bounds = torch.zeros(chunks + 1, dtype=torch.int64, device=indptr.device)
    bounds[1:-1] = torch.searchsorted(cost, cost[-1] / chunks * shares)
    bounds[-1] = rows
    return bounds
