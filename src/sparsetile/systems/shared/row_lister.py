"""Launches of ``list_rows``: rows of a matrix on a GPU, counted and listed for a schedule
(formats/device_rows.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsetile.formats.device_rows import (
    ArrangedUnits,
    HeadShape,
    RowCounts,
    RowKernels,
    UnitLimits,
)
from sparsetile.formats.units import LENGTHS, RowUnits, Tally
from sparsetile.kernels.row_lists import CLASSES, LIST_ROWS, TALLY, Stage
from sparsetile.kernels.stages import STAGE_THREADS
from sparsetile.systems.shared.bundle_packer import count_distinct, pack_bundles
from sparsetile.systems.shared.staged import StagedKernel, building_on

__all__ = ["ROW_KERNELS", "arrange_units", "count_rows", "head_columns"]

# Rows of a window that may become a bundle, and the length that no unit exceeds.
WINDOW, NO_LIMIT = 4, 2**31 - 1


def count_rows(units: RowUnits, columns: Tensor | None, min_sharing: float) -> RowCounts:
    """Count lengths and, where columns are given, windows of rows; the host waits once.

    Parameters
    ----------
    units : RowUnits
        At least one; where columns are given, a permutation of A's rows.
    columns : Tensor of int32 [nnz] or None
    min_sharing : float
    """
    windows = 0 if columns is None else -(-units.count // WINDOW)
    # One allocation for both, since both begin as zeros: windows have half a number each.
    counts = torch.zeros(TALLY + -(-windows // 2), dtype=torch.int64, device=units.device)
    with building_on(units.device) as index:
        kernel = _Units(units, index, limits=LENGTHS, min_sharing=min_sharing)
        kernel.give("tally", counts)
        if columns is not None:
            distinct = kernel.give("distinct", counts[TALLY:])
            count_distinct(units.indptr, columns, units.rows, distinct, index)
        kernel.launch(Stage.COUNT, units.count)
        longest, end, *found = counts[:TALLY].tolist()
    count = len(LENGTHS)
    total, a, b, c = found[count], *found[-3:]
    upto, longer, longer_total = (
        dict(zip(LENGTHS, found[first : first + count], strict=True))
        for first in (0, count + 1, 2 * count + 1)
    )
    tally = Tally(longest, total, end, units.bundle_count, longer, longer_total, upto)
    return RowCounts(tally, None if columns is None else (a, b, c))


def arrange_units(
    units: RowUnits, limits: UnitLimits, counts: Sequence[int] | None
) -> ArrangedUnits:
    """List units by class; the host waits where units are cut or their counts are not known."""
    with building_on(units.device) as index:
        return _Arranged(units, limits, counts, index)


def head_columns(items: Tensor, columns: Tensor, shape: HeadShape) -> Tensor:
    """Return the column of each thread's first entry; the host does not wait."""
    lanes = (shape.block, 32, 32, shape.lanes, shape.lanes)
    threads = sum(
        -(-number * each // shape.block) * shape.block
        for number, each in zip(shape.sections, lanes, strict=True)
    )
    with building_on(items.device) as index:
        kernel = StagedKernel(
            LIST_ROWS,
            items.device,
            index,
            sections=shape.sections,
            block=shape.block,
            lanes=shape.lanes,
        )
        kernel.give("items", items.contiguous())
        kernel.give("columns", columns.contiguous())
        heads = kernel.new("heads", threads)
        kernel.launch(Stage.HEADS, threads)
    return heads


ROW_KERNELS = RowKernels(count_rows, arrange_units, head_columns, pack_bundles)


class _Units(StagedKernel):
    """The units of one list."""

    def __init__(self, units: RowUnits, index: int, **numbers: float | Sequence[int]) -> None:
        super().__init__(
            LIST_ROWS,
            units.device,
            index,
            units=units.count,
            bundles=units.bundle_count,
            **numbers,
        )
        self.give("indptr", units.indptr.contiguous())
        if units.rows is not None:
            self.give("rows", units.rows.to(torch.int64).contiguous())
        if units.bundle_ptr is not None:
            self.give("bundle_ptr", units.bundle_ptr.contiguous())


def _in_blocks(work: int) -> int:
    """Threads of as many whole blocks as hold that many elements."""
    return -(-work // STAGE_THREADS) * STAGE_THREADS


class _Arranged(_Units):
    """Units by class, as :class:`ArrangedUnits` says."""

    def __init__(
        self, units: RowUnits, limits: UnitLimits, counts: Sequence[int] | None, index: int
    ) -> None:
        super().__init__(
            units,
            index,
            max_length=min(limits.longest, NO_LIMIT),
            wide_length=min(limits.wide, NO_LIMIT),
            shared_length=NO_LIMIT if limits.shared is None else min(limits.shared, NO_LIMIT),
        )
        work = _in_blocks(units.count)
        chunks = work // STAGE_THREADS
        self.new("sums", len(CLASSES) * chunks)
        self.launch(Stage.CLASSES, work)
        sums = self.sums("sums")
        if counts is None:
            ends = sums[chunks - 1 :: chunks].tolist()
            counts = [end - begin for begin, end in itertools.pairwise([0, *ends])]
        self.counts = counts
        self.new("arranged", units.count)
        cut = self.new("cut", counts[0], 4)
        self.launch(Stage.ARRANGE, work)
        self.cut = cut.cpu() if counts[0] else torch.empty((0, 4), dtype=torch.int32)

    def items(self, pieces: tuple[int, int, int]) -> Tensor:
        _, shared, wide_bundles, wide_rows, bundles, rows = self.counts
        self.params.update(counts=tuple(self.counts), pieces=pieces)
        parts = (shared + wide_bundles + wide_rows, bundles, rows)
        with building_on(self._device):
            found = self.new("items", sum(parts) + sum(pieces), 4)
            if any(parts):
                self.launch(Stage.ITEMS, sum(map(_in_blocks, parts)))
        return found
