"""Work lists of rows on CUDA cores: all rows of A, or those that a hybrid system leaves to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import SegmentSchedule, l2_reload_factor
from sparsetile.balance.segments import default_wide_length
from sparsetile.core.device import l2_bytes
from sparsetile.formats.device_rows import HeadShape, heads_on_device
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR
from sparsetile.kernels.csr import (
    FEW_LONG,
    MANY_RELOADS,
    SMALL_BYTES,
    SMALL_LANES,
    THREADS,
    WIDE_SLAB_BYTES,
    RowShape,
    may_reload,
)

__all__ = [
    "ItemLengths",
    "first_columns",
    "item_lengths",
    "row_shape",
    "schedule_sizes",
    "segment_length",
]

# Lengths of items. Rows up to UNCUT entries are not cut if none is longer (UNCUT_NARROW if rows of
# B are narrow: a tree then costs as much as hundreds of entries). If nearly all entries are in long
# rows, each of the GPU's warps gets one item, or long ones.
SHORT_SEGMENT, LONGEST_SEGMENT = 128, 2048
MANY, MANY_NARROW = 1_000_000, 400_000  # entries from which items are twice as long
UNCUT, UNCUT_NARROW, NARROW_BYTES = 256, 512, 256
LONG_UNIT, LONG_UNITS_SHARE = 256, 0.8
BUSY_WARPS = 3_700
# Products of fewer than FEW entries end before one warp has gone through a long row, so their rows
# are cut at FEW_SEGMENT. The first cut row costs a second memory latency, 1.5 us, so a row must be
# longer than FEW_UNCUT, or UNCUT if a chain of entries takes less (rows of B that are narrow, or so
# wide that each entry brings many bytes).
FEW, FEW_SEGMENT, FEW_UNCUT, FEW_UNCUT_BYTES = 130_000, 64, 160, 1024
# Small products: rows of B of at most SMALL_BYTES, and at most SMALL_WAVES times the GPU's lanes;
# some rows are long (FEW_LONG of the entries: without, PROTEINS took 4.9 instead of 4.1 us in 16
# bits). A row's chain of gathers then takes the time. So the first of these lengths is taken above
# which rows may get a whole warp, or a whole thread block, for SPARE of the GPU's lanes or for the
# idle ones. Rows and pieces of SHARED_UNCUT are then not cut.
# If a warp for each row or bundle would not fill the GPU either, rows of similar lengths are small
# products too, and bundles above the first length get a warp: N = 32, float32 and float16, s3rmt3m3
# 6.7 to 3.4 and 8.5 to 3.4 us, maros-r7 6.9 to 3.7 and 5.6 to 3.0, bcsstk17 8.1 to 5.6 and 9.3 to
# 5.7 (H200).
SMALL_WAVES, SPARE = 3.0, 0.33
WIDE_LENGTHS: tuple[int, ...] = (16, 24)
SHARED_LENGTHS: tuple[int, ...] = (32, 64, 128, 256)
SHARED_UNCUT = 512
# A row of up to LAST_UNCUT times that is not cut if none is longer: it would be the only reason for
# a tree (N = 32, float32: wiki-Vote 6.4 to 4.5 us, memplus 5.5 to 3.9, gemsec-FB-government 6.6 to
# 4.7).
LAST_UNCUT = 2
# A longer row alone makes a product small that few entries are in (south31: 5.4 to 3.5 us).
LONG_ALONE = 128
# Products that are not small: thread blocks share rows of over WIDER_SHARED entries where rows of B
# have at most so many bytes, the mean row has as many entries as stands beside them, the matrix
# fewer than WIDER_ENTRIES, at most WIDER_SHARE of them in such rows, and no row over WIDER_PIECES
# pieces.
# Elsewhere the registers of the kernel cost more, or few blocks are too many.
WIDER_SHARED, WIDER_ENTRIES, WIDER_SHARE, WIDER_PIECES = 128, 700_000, 0.8, 10
WIDER_MEANS = {512: 5.0, 1024: 15.0}
# Rows from WIDE_LENGTHS[0] on have a warp if the mean row is shorter than this.
SHORT_MEAN = 6.0
LANES_PER_SM, ACCESS_BYTES = 1024, 16


@dataclass(frozen=True)
class ItemLengths:
    """Entries above which an item is cut, gets a whole warp, and gets a whole thread block.

    Attributes
    ----------
    longest : int
        Most entries of an item.
    wide, shared : int or None
        For ``SegmentSchedule.make``.
    small : bool
        Whether the product is small: its rows do not fill the GPU several times.
    """

    longest: int
    wide: int | None = None
    shared: int | None = None
    small: bool = False

    def schedule(self, units: Units) -> SegmentSchedule:
        """Return the schedule of the units."""
        return SegmentSchedule.make(
            units, max_length=self.longest, wide_length=self.wide, shared_length=self.shared
        )

    def short(self, units: Units) -> tuple[int, int]:
        """Return the number of short rows and their entries; no bundles.

        Those are rows with neither a warp nor a thread block. In products that are not small, rows
        that have a warp because most others are very short count too: tiles are chosen without.
        """
        wide = default_wide_length(units) if self.wide is None or not self.small else self.wide
        limit = min(self.longest, wide, wide if self.shared is None else self.shared)
        count = units.count - units.longer(limit)
        return count, units.tally.total - units.longer_total(limit)


def segment_length(units: Units, row_bytes: int) -> int:
    """Return the entries (or list elements) of the longest item, for rows of B of that many bytes.

    Long enough that starting an item and joining pieces are a small share of its work, short enough
    that the longest ends before the rest. If no row is very long, none is cut: the first cut row
    costs a second memory latency, whatever its length. (docs/explanation/notes/csr.md)
    """
    if not units.count:
        return SHORT_SEGMENT
    narrow = row_bytes <= NARROW_BYTES
    if units.tally.longest <= (UNCUT_NARROW if narrow else UNCUT):
        return UNCUT_NARROW
    total = units.tally.total
    if units.longer_total(LONG_UNIT) >= LONG_UNITS_SHARE * total:
        fair = 2 ** round(math.log2(total / BUSY_WARPS))
        return min(max(fair, SHORT_SEGMENT), LONGEST_SEGMENT)
    return 2 * SHORT_SEGMENT if total >= (MANY_NARROW if narrow else MANY) else SHORT_SEGMENT


def _least(
    lengths: tuple[int, ...], units: Units, longest: int, cost: int, most: float
) -> int | None:
    """Return the first of some lengths that few enough rows exceed, at a cost for each.

    Rows over ``longest`` do not count.
    """
    beyond = units.longer(longest)
    return next((t for t in lengths if cost * max(units.longer(t) - beyond, 0) <= most), None)


def _few_length(units: Units, row_bytes: int, longest: int) -> int:
    """Return the entries of the longest item if few entries let the longest row end last.

    Of 29 real matrices on an H200, those of fewer than 130 thousand entries with a row this long
    take 0.45 to 1.03 of the time (WN18RR, float16, N = 128: 19.3 to 8.7 us; Cora, N = 512: 12.8 to
    9.2); larger ones lose (docs/explanation/notes/csr.md).
    """
    if units.tally.total >= FEW:
        return longest
    between = NARROW_BYTES < row_bytes <= FEW_UNCUT_BYTES
    uncut = FEW_UNCUT if between else UNCUT
    return FEW_SEGMENT if units.tally.longest > uncut else longest


def _uncut(units: Units, shares: bool) -> int:
    """Return the entries of the longest item of a small product if thread blocks share rows."""
    whole = shares and SHARED_UNCUT < units.tally.longest <= LAST_UNCUT * SHARED_UNCUT
    return LAST_UNCUT * SHARED_UNCUT if whole else SHARED_UNCUT


def _wide_product(units: Units, row_bytes: int, shares: bool) -> ItemLengths:
    """Return the lengths for a product that is not small."""
    mean = units.tally.total / units.count
    wide = WIDE_LENGTHS[0] if mean < SHORT_MEAN and units.tally.longest > WIDE_LENGTHS[0] else None
    least = next((each for most, each in WIDER_MEANS.items() if row_bytes <= most), math.inf)
    total, may_share = units.tally.total, shares and row_bytes > SMALL_BYTES and mean >= least
    if may_share and total < WIDER_ENTRIES:
        long = WIDER_SHARED < units.tally.longest <= WIDER_PIECES * SHARED_UNCUT
        if long and units.longer_total(WIDER_SHARED) <= WIDER_SHARE * total:
            return ItemLengths(SHARED_UNCUT, wide, WIDER_SHARED)
    longest = segment_length(units, row_bytes)
    return ItemLengths(_few_length(units, row_bytes, longest), wide)


def item_lengths(
    units: Units, row_bytes: int, processors: int, side_by_side: bool = False, shares: bool = True
) -> ItemLengths:
    """Return the lengths of items of the units, for rows of B of that many bytes.

    ``side_by_side``: B has few columns, and a warp loads 128 entries or more at once. ``shares``:
    the kernel lets a thread block share a row of a product that is not small.
    """
    longest, room = segment_length(units, row_bytes), processors * LANES_PER_SM
    if not units.count:
        return ItemLengths(longest)
    unfilled = row_bytes <= SMALL_BYTES and 32 * units.count <= room
    # Entries of four rounds of a warp's loads; cutting a row takes longer than those.
    rounds = UNCUT_NARROW // max(row_bytes // ACCESS_BYTES, 1) if side_by_side else 0
    longest = max(longest, rounds)
    if units.tally.bundled:
        return ItemLengths(longest, WIDE_LENGTHS[0] if unfilled else None)
    few = ItemLengths(longest) if side_by_side else _wide_product(units, row_bytes, shares)
    if row_bytes > SMALL_BYTES:
        return few
    group = min(max(-(-row_bytes // ACCESS_BYTES), 4), 32)
    longest_alone = default_wide_length(units)
    long = units.longer(longest_alone)
    used = 32 * long + group * (units.count - long)
    some_long = units.longer_total(longest_alone) >= FEW_LONG * units.tally.total
    some_long = some_long or units.tally.longest > LONG_ALONE
    if used > SMALL_WAVES * room or not (some_long or unfilled):
        return few
    spare = max(SPARE * room, room - used)
    wide = _least(WIDE_LENGTHS, units, longest_alone, 32 - group, spare)
    shared = _least(SHARED_LENGTHS, units, units.tally.longest, THREADS - 32, spare)
    if shared is not None:
        longest = max(longest, rounds * THREADS // 32, _uncut(units, shares))
    return ItemLengths(longest, wide, shared, True)


def first_columns(schedule: SegmentSchedule, columns: Tensor) -> Tensor:
    """Return the column of each thread's first entry, in whole thread blocks.

    A thread block has a shared item, a wide one per warp, or one per group of SMALL_LANES lanes;
    lane l of an item begins with the item's entry l. Threads without an entry get column 0.
    """
    shape = HeadShape(schedule.sections, THREADS, SMALL_LANES)
    made = heads_on_device(schedule.items, columns, shape)
    if made is not None:
        return made
    found, begun = [], 0
    for number, lanes in zip(
        schedule.sections, (THREADS, 32, 32, SMALL_LANES, SMALL_LANES), strict=True
    ):
        if not number:
            continue
        items = schedule.items[begun : begun + number].to(torch.int64)
        begun += number
        entry = items[:, 1:2] + torch.arange(lanes, device=items.device)
        there = entry < items[:, 2:3]
        if columns.numel():
            heads = columns[entry.clamp(max=columns.numel() - 1)].to(torch.int32) * there
        else:
            heads = torch.zeros_like(entry, dtype=torch.int32)
        flat = heads.reshape(-1)
        found.append(torch.nn.functional.pad(flat, (0, -flat.numel() % THREADS)))
    return torch.cat(found) if found else columns.new_zeros(0, dtype=torch.int32)


def schedule_sizes(schedule: SegmentSchedule) -> dict[str, Any]:
    """Return the numbers of a schedule that a runner needs beside its tensors."""
    return {
        "sections": list(schedule.sections),
        "slots": schedule.slot_count,
        "nodes": schedule.node_count,
    }


def row_shape(
    csr: CSR,
    schedule: SegmentSchedule,
    order: Tensor | None,
    row_bytes: int,
    short: tuple[int, int],
    small: bool = False,
) -> RowShape:
    """Return the shape that the choice of a tile uses; ``short`` has :meth:`ItemLengths.short`."""
    rows, total = short
    slab_bytes = min(row_bytes, WIDE_SLAB_BYTES)
    apart = whole = 0.0
    if may_reload(csr.shape[1], row_bytes, l2_bytes(csr.device)):
        apart = l2_reload_factor(csr, order, slab_bytes)
    if apart < MANY_RELOADS and row_bytes > slab_bytes:
        whole = l2_reload_factor(csr, order, row_bytes)
    return RowShape(
        rows=rows,
        mean=total / rows if rows else 0.0,
        long_share=1.0 - total / csr.nnz if csr.nnz else 0.0,
        slab_reloads=apart,
        row_reloads=whole,
        small=small,
        shared=schedule.sections[0] > 0,
        average=csr.nnz / max(csr.shape[0], 1),
    )
