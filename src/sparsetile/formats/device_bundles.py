"""Row bundles of a matrix on a GPU by ``pack_bundles``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.kernels.bundles import PACK_BUNDLES, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = ["PackedBundles", "bundled_on_device", "count_distinct"]

# Rows of a window; rows plus entries whose running sums stay below 2^31.
WINDOW, MOST_BUNDLED = 4, 2**29


@dataclass(frozen=True, eq=False)
class PackedBundles:
    """Arrays of ``RowBundles`` (formats/bundles.py), by the same names."""

    tagged: Tensor
    indptr: Tensor
    rows: Tensor
    loose: Tensor
    entries: Tensor
    slots: Tensor


class _Windows(StagedKernel):
    """Windows of rows in an order; their distinct columns are counted in ``distinct``."""

    def __init__(
        self,
        indptr: Tensor,
        columns: Tensor,
        order: Tensor | None,
        distinct: Tensor,
        index: int,
        **numbers: float,
    ) -> None:
        rows = indptr.numel() - 1
        super().__init__(PACK_BUNDLES, indptr.device, index, row_count=rows, **numbers)
        self._nnz = columns.numel()
        self.give("indptr", indptr.to(torch.int64).contiguous())
        self.give("columns", columns.contiguous())
        self.give("distinct", distinct)
        if order is not None:
            self.give("rows", order.to(torch.int64).contiguous())
            self.new("positions", rows)
            self.launch(Stage.POSITIONS, rows)

    def count(self) -> None:
        self.launch(Stage.FRESH, self._nnz)


def count_distinct(
    indptr: Tensor, columns: Tensor, order: Tensor | None, distinct: Tensor, index: int
) -> None:
    """Count the distinct columns of each window of A's rows in an order; the host does not wait.

    A has entries. ``distinct`` has zeros, 32 bits for each window; ``index`` is what
    ``building_on`` yields.
    """
    _Windows(indptr, columns, order, distinct, index).count()


def bundled_on_device(
    csr: CSR, order: Tensor | None, min_sharing: float, count: int, entry_count: int
) -> PackedBundles | None:
    """Pack the windows of rows that share columns; the host waits once, for the list's length.

    ``count`` windows, with ``entry_count`` entries, have ``min_sharing`` entries per distinct
    column or more. None if A has no or too many entries, or its device is not supported.
    """
    (rows, _), nnz, device = csr.shape, csr.nnz, csr.device
    if not (nnz and built_by_kernels(device)) or nnz + rows >= MOST_BUNDLED:
        return None
    windows = -(-rows // WINDOW)
    with building_on(device) as index:
        distinct = torch.zeros(windows, dtype=torch.int32, device=device)
        kernel = _Windows(
            csr.indptr, csr.indices, order, distinct, index,
            windows=windows, min_sharing=min_sharing,
        )  # fmt: skip
        kernel.new("fresh", nnz)
        kernel.count()
        kernel.new("plan", 2 * windows + rows)
        kernel.launch(Stage.WINDOWS, windows)
        sums = kernel.sums("plan", into="sums")
        kernel.sums("fresh", into="fresh_sums")
        # Bundles up to each of the last two windows, and the elements of all lists.
        ends = (sums[max(windows - 2, 0) : windows], sums[2 * windows - 1 : 2 * windows])
        *bundles, end = torch.cat(ends).tolist()
        last = bundles[-1] - sum(bundles[:-1])  # 1 if the last window is bundled
        elements, absent = end - bundles[-1], windows * WINDOW - rows
        tagged = kernel.new("tagged", elements)
        bundle_ptr = kernel.new("bundle_ptr", count + 1, dtype=torch.int64)
        bundle_rows = kernel.new("bundle_rows", count, WINDOW)
        loose = kernel.new("loose", rows - count * WINDOW + last * absent, dtype=torch.int64)
        if not count:
            bundle_ptr.zero_()
        kernel.launch(Stage.ROWS, windows * WINDOW)
        entries = kernel.new("entries", entry_count, dtype=torch.int64)
        slots = kernel.new("slots", entry_count, dtype=torch.int64)
        kernel.launch(Stage.ENTRIES, nnz)
    return PackedBundles(tagged, bundle_ptr, bundle_rows, loose, entries, slots)
