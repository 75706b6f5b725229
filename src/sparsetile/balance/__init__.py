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
from sparsetile.balance.windows import WindowSchedule, WindowShares, schedule_windows, share_windows

__all__ = [
    "SegmentSchedule",
    "Units",
    "WindowSchedule",
    "WindowShares",
    "concat_units",
    "row_units",
    "schedule_segments",
    "schedule_windows",
    "share_windows",
    "spread",
]
