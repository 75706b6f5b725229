"""Rows of a matrix on a GPU, counted and listed for a schedule by ``list_rows``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparsetile.core.layout import LENGTHS
from sparsetile.formats.device_bundles import WINDOW, count_distinct
from sparsetile.kernels.row_lists import CLASSES, LIST_ROWS, TALLY, TREE_LEVELS, Stage
from sparsetile.kernels.stages import STAGE_THREADS
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels

__all__ = [
    "ArrangedUnits", "CutSizes", "HeadShape", "ListedRows", "RowCounts", "Tally", "UnitLimits",
    "arranged_on_device", "counted_on_device", "heads_on_device",
]  # fmt: skip

# Limits of units and entries that kernels number by 32 bits; a length that no unit exceeds.
MOST, NO_LIMIT = 2**31, 2**31 - 1


@dataclass(frozen=True)
class Tally:
    """Counts of units on the host."""

    # longest, total, end: greatest length, sum of the lengths, and the largest end of a range; 0
    # without units.
    longest: int
    total: int
    end: int
    bundled: int  # units that are bundles
    # longer, longer_total: mapping of int to int: units of more elements than each of
    # ``units.LENGTHS``, and the sum of their lengths.
    longer: dict[int, int]
    longer_total: dict[int, int]
    # Mapping of int to int: greatest length up to each of ``units.LENGTHS``; 0 without such a unit.
    upto: dict[int, int]


class ListedRows(Protocol):
    """Rows, or bundles of rows, as kernels read them: ``units.RowUnits``."""

    @property
    def device(self) -> torch.device: ...

    @property
    def count(self) -> int: ...

    @property
    def bundle_count(self) -> int: ...

    @property
    def indptr(self) -> Tensor: ...

    @property
    def rows(self) -> Tensor | None: ...

    @property
    def bundle_ptr(self) -> Tensor | None: ...


class CutSizes(NamedTuple):
    """Sizes of a schedule that cuts units at some length."""

    pieces: int
    nodes: int  # of the trees that add pieces up
    of_bundles: int  # pieces of bundles
    longest: int  # the longest piece


@dataclass(frozen=True)
class RowCounts:
    """Counts of rows on the host, which waits once for them."""

    tally: Tally
    # Windows of four rows that share columns, their entries and their
    # distinct columns; None if they were not requested.
    shared: tuple[int, int, int] | None
    cut: dict[int, CutSizes]  # by length; right for powers of two


@dataclass(frozen=True)
class UnitLimits:
    """Lengths above which units are cut, get a warp, and get a thread block (None: none does)."""

    longest: int
    wide: int
    shared: int | None


@dataclass(frozen=True)
class HeadShape:
    """Items of each section; threads of a thread block, and lanes of a short item."""

    sections: tuple[int, int, int, int, int]
    block: int
    lanes: int


def counted_on_device(
    units: ListedRows, columns: Tensor | None = None, min_sharing: float = 1.0
) -> RowCounts | None:
    """Count lengths and, if columns of A's entries are given, windows of rows; the host waits once.

    None if there are no units or too many, or their device is not supported. With columns, units
    are a permutation of A's rows.
    """
    if not (0 < units.count < MOST and built_by_kernels(units.device)):
        return None
    if columns is not None and not 0 < columns.numel() < MOST:
        return None
    windows = 0 if columns is None else -(-units.count // WINDOW)
    # One allocation for both, which begin as zeros: windows have half a number each.
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
    total, behind = found[count], 3 * count + 1
    a, b, c = found[behind : behind + 3]
    upto, longer, longer_total = (
        dict(zip(LENGTHS, found[first : first + count], strict=True))
        for first in (0, count + 1, 2 * count + 1)
    )
    tally = Tally(longest, total, end, units.bundle_count, longer, longer_total, upto)
    sizes = (found[first : first + count] for first in range(behind + 3, len(found), count))
    cut = dict(zip(LENGTHS, map(CutSizes, *sizes), strict=True))
    return RowCounts(tally, None if columns is None else (a, b, c), cut)


def arranged_on_device(
    units: ListedRows, limits: UnitLimits, counts: Sequence[int] | None
) -> ArrangedUnits | None:
    """List units by class; the host waits if units are cut or their counts are not known.

    The caller has checked that every range ends below 2^31. None if there are no units or too many,
    or their device is not supported.
    """
    if not (0 < units.count < MOST and built_by_kernels(units.device)):
        return None
    with building_on(units.device) as index:
        return ArrangedUnits(units, limits, counts, index)


def heads_on_device(items: Tensor, columns: Tensor, shape: HeadShape) -> Tensor | None:
    """Return the column of each thread's first entry; the host does not wait.

    None if there are no items, or their device is not supported.
    """
    if not (items.shape[0] and built_by_kernels(items.device)):
        return None
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


class _Units(StagedKernel):
    """The units of one list."""

    def __init__(self, units: ListedRows, index: int, **numbers: float | Sequence[int]) -> None:
        super().__init__(
            LIST_ROWS, units.device, index, units=units.count, bundles=units.bundle_count, **numbers
        )
        self.give("indptr", units.indptr.contiguous())
        if units.rows is not None:
            self.give("rows", units.rows.to(torch.int64).contiguous())
        if units.bundle_ptr is not None:
            self.give("bundle_ptr", units.bundle_ptr.contiguous())


def _in_blocks(work: int) -> int:
    """Threads of enough whole blocks for that many elements."""
    return -(-work // STAGE_THREADS) * STAGE_THREADS


class ArrangedUnits(_Units):
    """Units by class: bundles and rows to be cut, shared, wide bundles, wide rows, bundles, rows.

    Attributes
    ----------
    counts : sequence of int
        Units of each class.
    cut_count : int
        Those of the first two.
    cut : Tensor of int32 [cut units, 4]
        ``label, begin, length, whether a bundle``.
    """

    def __init__(
        self, units: ListedRows, limits: UnitLimits, counts: Sequence[int] | None, index: int
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
        self.cut_count = counts[0] + counts[1]
        self.params["cut_units"] = self.cut_count
        self.cut = self.new("cut", self.cut_count, 4)
        self.launch(Stage.ARRANGE, work)

    def items(self, pieces: tuple[int, int, int]) -> Tensor:
        """Return the items of a schedule on the device, int32 [items, 4].

        ``pieces`` counts those of cut units in the sections of shared rows, wide bundles and wide
        rows. Their items are left uninitialised, before the section's whole units.
        """
        _, _, shared, wide_bundles, wide_rows, bundles, rows = self.counts
        self.params.update(counts=tuple(self.counts), pieces=pieces)
        parts = (shared + wide_bundles + wide_rows, bundles, rows)
        with building_on(self._device):
            found = self.new("items", sum(parts) + sum(pieces), 4)
            if any(parts):
                self.launch(Stage.ITEMS, sum(map(_in_blocks, parts)))
        return found

    def cut_units(self, slots: int, nodes: int) -> tuple[Tensor, Tensor]:
        """Write the items of pieces, and return ``parent_of_slot`` and ``nodes`` of their tree.

        After :meth:`items`. All pieces of rows are in one section.
        """
        count = self.cut_count
        with building_on(self._device):
            self.new("levels", 2 * TREE_LEVELS * count)
            self.launch(Stage.LEVELS, count)
            self.sums("levels", into="level_sums")
            made = self.new("parent_of_slot", slots), self.new("nodes", nodes, 4)
            self.launch(Stage.PIECES, slots)
        return made
