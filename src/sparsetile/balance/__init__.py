"""Work lists: format -> Schedule. One file a policy; each is checked by tests/contracts."""

from __future__ import annotations

from sparsetile.balance.segments import (
    SegmentSchedule,
    Units,
    concat_units,
    row_units,
    schedule_segments,
)

__all__ = ["SegmentSchedule", "Units", "concat_units", "row_units", "schedule_segments"]
