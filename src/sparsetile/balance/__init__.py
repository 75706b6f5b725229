"""Work lists: units of a format -> schedule, one policy a file."""

from __future__ import annotations

from sparsetile.balance.base import Schedule
from sparsetile.balance.cobalance import CoBalanced
from sparsetile.balance.cost_model import CostModel, fit_cost_model
from sparsetile.balance.l2_reloads import l2_reload_factor
from sparsetile.balance.longest_first import LongestFirst
from sparsetile.balance.row_chunks import RowChunks
from sparsetile.balance.segments import SegmentSchedule
from sparsetile.balance.window_shares import WindowShares
from sparsetile.balance.windows import WindowSchedule
from sparsetile.formats.units import Units, row_units

__all__ = [
    "CoBalanced", "CostModel", "LongestFirst", "RowChunks", "Schedule",
    "SegmentSchedule", "Units", "WindowSchedule", "WindowShares", "fit_cost_model",
    "l2_reload_factor", "row_units",
]  # fmt: skip
