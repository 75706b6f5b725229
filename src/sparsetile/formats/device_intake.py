"""Arrays of a matrix on a GPU, checked and copied by ``check_rows``.

By tensor operations the checks are a dozen launches, and copies three more; sorting edges takes
forty. What is wrong with a matrix, columns out of order and entries at one place stay with
``intake``, which a caller asks if this returns nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsetile.kernels.row_checks import CHECK_ROWS, FACTS, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = ["Canonical", "canonical_edges", "canonical_rows"]

_INDICES = (torch.int32, torch.int64)
# Rows, columns and entries that the kernel numbers by 32 bits.
_MOST = 2**31


class Canonical(NamedTuple):
    """Copies of a matrix's pattern, as ``CSR`` has it."""

    indptr: Tensor
    indices: Tensor
    entry_map: Tensor | None = None
    order: Tensor | None = None  # the caller's entry at each place; None if it is the same


def canonical_rows(indptr: Tensor, columns: Tensor, shape: tuple[int, int]) -> Canonical | None:
    """Return a copy of row pointers and columns.

    None if they are not those of a canonical matrix of this shape, or not on a device with kernels.
    The host waits once.
    """
    device, entries = columns.device, columns.numel()
    if indptr.shape != (shape[0] + 1,) or not _takes(indptr, columns, shape):
        return None
    with building_on(device) as index:
        kernel = _Checked(indptr, columns, shape, index)
        kernel.launch(Stage.COMPRESSED, max(shape[0] + 1, entries))
        return None if any(kernel.facts()) else kernel.made


def canonical_edges(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Canonical | None:
    """Return the same of the rows and columns of entries in any order, none of them twice.

    The host waits once if they are sorted, else twice.
    """
    device, entries = columns.device, columns.numel()
    if rows.shape != columns.shape or not _takes(rows, columns, shape):
        return None
    work = max(shape[0] + 1, entries)
    with building_on(device) as index:
        kernel = _Checked(rows, columns, shape, index)
        keys = kernel.new("keys", entries, dtype=torch.int64)
        kernel.launch(Stage.EDGES, work)
        bad, unsorted = kernel.facts()
        if bad:
            return None
        if not unsorted:
            return kernel.made
        keys, order = torch.sort(keys, stable=True)
        kernel = _Checked(keys, columns, shape, index)
        kernel.give("order", order)
        entry_map = kernel.new("entry_map", entries, dtype=torch.int64)
        kernel.launch(Stage.SORTED, work)
        return None if any(kernel.facts()) else kernel.made._replace(
            entry_map=entry_map, order=order
        )  # fmt: skip


class _Checked(StagedKernel):
    """One pass over a matrix."""

    def __init__(self, rows: Tensor, columns: Tensor, shape: tuple[int, int], index: int) -> None:
        device, entries = columns.device, columns.numel()
        super().__init__(
            CHECK_ROWS, device, index, row_count=shape[0], column_count=shape[1], entries=entries,
            wide_rows=rows.dtype is torch.int64, wide_columns=columns.dtype is torch.int64,
        )  # fmt: skip
        self.give("rows", rows)
        self.give("columns", columns)
        zeros = torch.zeros(len(FACTS), dtype=torch.int32, device=device)
        self._facts = self.give("facts", zeros)
        indptr = self.new("indptr", shape[0] + 1, dtype=torch.int64)
        self.made = Canonical(indptr, self.new("indices", entries))

    def facts(self) -> list[int]:
        """Wait for what was found, as FACTS says."""
        found: list[int] = self._facts.tolist()
        return found


def _takes(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> bool:
    """Whether the kernel reads such arrays."""
    device = columns.device
    return (
        built_by_kernels(device)
        and max(*shape, columns.numel()) < _MOST
        and all(
            each.dtype in _INDICES
            and each.dim() == 1
            and each.device == device
            and each.is_contiguous()
            for each in (rows, columns)
        )
    )
