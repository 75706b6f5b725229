"""Work lists of rows on CUDA cores: all rows of A, or those that a hybrid system leaves to them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from sparsetile.balance import SegmentSchedule, l2_reload_factor
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR
from sparsetile.kernels.csr import SPREAD, WIDE_SLAB_BYTES, RowShape

__all__ = ["row_shape", "schedule_sizes", "segment_length"]

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
    the first cut row costs a second wait for memory, whatever its length.
    (docs/explanation/notes/csr.md)
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


def schedule_sizes(schedule: SegmentSchedule) -> dict[str, Any]:
    """Return what a runner has to know of a schedule beside its tensors."""
    return {
        "sections": list(schedule.sections),
        "slots": schedule.slot_count,
        "nodes": schedule.node_count,
    }


def row_shape(
    csr: CSR, schedule: SegmentSchedule, order: Tensor | None, row_bytes: int
) -> RowShape:
    """Return what the choice of a tile looks at."""
    short = schedule.items[sum(schedule.sections[:2]) :]
    lengths = (short[:, 2] - short[:, 1]).double()
    rows, total = lengths.numel(), float(lengths.sum())
    slab_bytes = min(row_bytes, WIDE_SLAB_BYTES)
    apart = l2_reload_factor(csr, order, slab_bytes)
    whole = 0.0
    if apart < SPREAD and row_bytes > slab_bytes:
        whole = l2_reload_factor(csr, order, row_bytes)
    return RowShape(
        rows=rows,
        mean=total / rows if rows else 0.0,
        long_share=1.0 - total / csr.nnz if csr.nnz else 0.0,
        spread=apart,
        whole=whole,
    )
