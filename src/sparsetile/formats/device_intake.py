"""Arrays of a matrix on a GPU, checked and copied in one launch by ``check_rows``.

By tensor operations the checks are a dozen launches, and copies three more. What is wrong with a
matrix, and how entries in any order are sorted, stays with ``intake``, which a caller asks if this
finds a matrix not canonical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.kernels.row_checks import CHECK_ROWS, FACTS, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = ["canonical_edges", "canonical_rows"]

_INDICES = (torch.int32, torch.int64)
# Rows, columns and entries that the kernel numbers by 32 bits.
_MOST = 2**31


def canonical_rows(
    indptr: Tensor, columns: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Return copies of row pointers and columns, int64 [M + 1] and int32 [nnz].

    None if they are not those of a canonical matrix of this shape, or not on a device with kernels.
    The host waits once.
    """
    if indptr.shape != (shape[0] + 1,):
        return None
    return _checked(Stage.COMPRESSED, indptr, columns, shape)


def canonical_edges(
    rows: Tensor, columns: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """Return the same of the rows and columns of entries, if these are sorted, none twice."""
    if rows.shape != columns.shape:
        return None
    return _checked(Stage.EDGES, rows, columns, shape)


def _checked(
    stage: Stage, rows: Tensor, columns: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    device, entries = columns.device, columns.numel()
    if not built_by_kernels(device) or max(*shape, entries) >= _MOST:
        return None
    for each in (rows, columns):
        if each.dtype not in _INDICES or each.dim() != 1 or each.device != device:
            return None
        if not each.is_contiguous():
            return None
    with building_on(device) as index:
        kernel = StagedKernel(
            CHECK_ROWS, device, index, row_count=shape[0], column_count=shape[1], entries=entries,
            wide_rows=rows.dtype is torch.int64, wide_columns=columns.dtype is torch.int64,
        )  # fmt: skip
        kernel.give("rows", rows)
        kernel.give("columns", columns)
        facts = kernel.give("facts", torch.zeros(len(FACTS), dtype=torch.int32, device=device))
        indptr = kernel.new("indptr", shape[0] + 1, dtype=torch.int64)
        indices = kernel.new("indices", entries)
        kernel.launch(stage, max(shape[0] + 1, entries))
        found: list[int] = facts.tolist()
    return None if any(found) else (indptr, indices)
