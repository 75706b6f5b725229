"""Work lists: format -> Schedule. One file a policy; each is checked by tests/contracts."""

from __future__ import annotations

from sparsetile.balance.locality import spread
from sparsetile.balance.segments import (
    SegmentSchedule,
    Units,
    concat_units,
    row_units,
    schedule_segments,
)
from sparsetile.balance.windows import WindowSchedule, cut_windows, schedule_windows

__all__ = [
    "SegmentSchedule",
    "Units",
    "WindowSchedule",
    "concat_units",
    "cut_windows",
    "row_units",
    "schedule_segments",
    "schedule_windows",
    "spread",
]
