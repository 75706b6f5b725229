"""``csr``: CUDA cores on rows and bundles of rows. The yardstick of the other systems.

Parts: row pointers and column ids as given, row bundles where four neighbouring rows share enough
columns (formats/bundles.py), and segment schedules (balance/segments.py). Deterministic, exact
FP32 arithmetic, any shape, every dtype. What was measured is in docs/csr.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import (
    SegmentSchedule,
    Units,
    concat_units,
    row_units,
    schedule_segments,
    spread,
)
from sparsetile.formats import RowBundles, pack_bundles, pack_rows
from sparsetile.formats.bundles import MAX_COLUMNS
from sparsetile.intake.csr import CSR
from sparsetile.kernels.csr import (
    BUNDLE_DTYPES,
    ELEMENTS,
    SPREAD,
    WIDE_SLAB_BYTES,
    RowShape,
)
from sparsetile.systems.base import Laps, Request, Stage, System, make_recipe
from sparsetile.systems.csr.runner import CSRRunner

__all__ = ["CSRSystem"]

# A window of four rows is bundled from this many entries per distinct column on.
MIN_SHARING = 1.3
# When bundles are used at all: they hold most of the entries, save about half of the reads of B,
# and are long enough to keep a group busy. Else the plain kernel, with its smaller register
# count, is faster (docs/csr.md).
MIN_BUNDLED_SHARE = 0.6
MIN_MEAN_SHARING = {4: 1.9, 2: 2.4}  # by bytes of an element
MIN_MEAN_LENGTH = 38
# Very long rows are bound by L2 where B does not fit the SMs' own caches; there less sharing
# pays too, in float32. (list elements in all, distinct columns a bundle, sharing, rows of B,
# bytes of a row of B)
LONG_ELEMENTS, LONG_LENGTH, LONG_SHARING, LONG_COLUMNS, LONG_BYTES = 2**17, 256, 1.4, 2048, 256

# How long items are. Rows up to UNCUT entries are not cut where no row is longer (UNCUT_NARROW in
# products whose rows of B are narrow: there a tree costs as much as hundreds of entries). Where
# nearly all entries lie in long rows, each of the GPU's warps gets one item, or long ones.
SHORT_SEGMENT, LONGEST_SEGMENT = 128, 2048
MANY, MANY_NARROW = 1_000_000, 400_000  # entries from which on items are twice as long
UNCUT, UNCUT_NARROW, NARROW_BYTES = 256, 512, 256
LONG_UNIT, LONG_UNITS_SHARE = 256, 0.8
BUSY_WARPS = 3_700


def segment_length(units: Units, row_bytes: int) -> int:
    """Return the entries (or list elements) of the longest item, for rows of B of that many bytes.

    Long enough that starting an item and joining pieces are a small share of its work, short
    enough that the longest is done before the rest is. Where no row is very long, none is cut:
    the first cut row costs a second wait for memory, whatever its length. (docs/csr.md)
    """
    length = units.length
    if not length.numel():
        return SHORT_SEGMENT
    narrow = row_bytes <= NARROW_BYTES
    if int(length.max()) <= (UNCUT_NARROW if narrow else UNCUT):
        return UNCUT_NARROW
    total = int(length.sum())
    if int(length[length > LONG_UNIT].sum()) >= LONG_UNITS_SHARE * total:
        fair = 2 ** round(math.log2(total / BUSY_WARPS))
        return min(max(fair, SHORT_SEGMENT), LONGEST_SEGMENT)
    return 2 * SHORT_SEGMENT if total >= (MANY_NARROW if narrow else MANY) else SHORT_SEGMENT


def _bundle_units(bundles: RowBundles) -> Units:
    device = bundles.indptr.device
    return Units(
        torch.arange(bundles.bundle_count, device=device),
        bundles.indptr[:-1],
        bundles.indptr[1:] - bundles.indptr[:-1],
        torch.ones(bundles.bundle_count, dtype=torch.bool, device=device),
    )


def _mixed(request: Request, bundles: RowBundles) -> SegmentSchedule:
    """Return the schedule of bundles and of the rows that are in none."""
    units = concat_units(_bundle_units(bundles), row_units(request.csr, bundles.loose))
    length = segment_length(units, request.n * request.dtype.itemsize)
    return schedule_segments(units, length)


def _sizes(schedule: SegmentSchedule) -> dict[str, Any]:
    return {
        "sections": list(schedule.sections),
        "slots": schedule.slot_count,
        "nodes": schedule.node_count,
    }


def _shape(csr: CSR, schedule: SegmentSchedule, order: Tensor | None, row_bytes: int) -> RowShape:
    """Return what the choice of a tile looks at."""
    short = schedule.items[sum(schedule.sections[:2]) :]
    lengths = (short[:, 2] - short[:, 1]).double()
    rows, total = lengths.numel(), float(lengths.sum())
    slab_bytes = min(row_bytes, WIDE_SLAB_BYTES)
    apart = spread(csr, order, slab_bytes)
    whole = 0.0 if apart >= SPREAD or row_bytes <= slab_bytes else spread(csr, order, row_bytes)
    return RowShape(
        rows=rows,
        mean=total / rows if rows else 0.0,
        long_share=1.0 - total / csr.nnz if csr.nnz else 0.0,
        spread=apart,
        whole=whole,
    )


def _lists(schedule: SegmentSchedule) -> tuple[Tensor, Tensor, Tensor]:
    return schedule.items, schedule.parent_of_slot, schedule.nodes


class CSRSystem(System):
    """CUDA cores, deterministic, every shape and dtype."""

    name = "csr"
    summary = "CUDA cores on rows and bundles of rows, sums in a fixed order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True

    def further_reasons(self, request: Request) -> list[str]:
        if request.csr.nnz >= 2**31:
            return [f"holds under 2^31 entries, A has {request.csr.nnz}"]
        return []

    def build(self, request: Request) -> Stage:
        csr, order = request.csr, request.permutation.perm
        laps = Laps(request)
        rows = pack_rows(csr)
        laps("format")
        row_bytes = request.n * request.dtype.itemsize
        units = row_units(csr, order)
        length = segment_length(units, row_bytes)
        plain = schedule_segments(units, length)
        shape = _shape(csr, plain, order, row_bytes)
        laps("schedule")
        bundles = self._bundles(request)
        laps("format")
        mixed = None if bundles is None else _mixed(request, bundles)
        recipe = make_recipe(
            self.name,
            csr,
            plain=_sizes(plain),
            mixed=None if mixed is None else _sizes(mixed),
            elements=0 if bundles is None else bundles.element_count,
            shape=dataclasses.asdict(shape),
        )
        parts: tuple[Tensor, ...] = (rows.indptr, rows.columns, *_lists(plain))
        choices = {"format": f"rows, {rows.format_bytes} bytes"}
        schedule = plain
        if bundles is not None and mixed is not None:
            schedule = mixed
            parts += (
                bundles.tagged, bundles.rows, bundles.entries, bundles.slots, *_lists(mixed)
            )  # fmt: skip
            sharing = bundles.entries.numel() / bundles.distinct
            choices["bundles"] = (
                f"{bundles.bundle_count} bundles of four rows hold {bundles.entries.numel()} of "
                f"{csr.nnz} entries, {sharing:.2f} per row of B read, {bundles.format_bytes} bytes"
            )
        ends = schedule.items[:, 2] - schedule.items[:, 1]
        longest = int(ends.max()) if ends.numel() else 0
        choices["schedule"] = (
            f"{schedule.item_count} items of at most {longest} entries, "
            f"{schedule.slot_count} partial sums"
        )
        laps("schedule")
        return Stage(self.name, parts, recipe, choices, laps.seconds)

    def _bundles(self, request: Request) -> RowBundles | None:
        """Return the bundles of rows where they pay."""
        csr = request.csr
        if request.dtype not in BUNDLE_DTYPES or csr.shape[1] > MAX_COLUMNS or not csr.nnz:
            return None
        bundles = pack_bundles(csr, request.permutation.perm, MIN_SHARING)
        entries, elements = bundles.entries.numel(), bundles.distinct
        count = bundles.bundle_count
        long_rows = (
            elements >= LONG_ELEMENTS
            and elements >= LONG_LENGTH * count
            and csr.shape[1] >= LONG_COLUMNS
            and request.dtype is torch.float32
            and request.n * request.dtype.itemsize >= LONG_BYTES
        )
        sharing = LONG_SHARING if long_rows else MIN_MEAN_SHARING[request.dtype.itemsize]
        if (
            entries < MIN_BUNDLED_SHARE * csr.nnz
            or entries < sharing * elements
            or elements < MIN_MEAN_LENGTH * count
        ):
            return None
        return bundles

    def make_runner(self, meta: Mapping[str, Any]) -> CSRRunner:
        return CSRRunner(meta)
