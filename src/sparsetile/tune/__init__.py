"""Roofline floor; the choice of a system and of a row order, by model or by measurement."""

from __future__ import annotations

from sparsetile.tune.account import Account, choose_quickly, schedule_account
from sparsetile.tune.choose import (
    EXPECTED_RUNS,
    KEPT_RUNS,
    MEASURE_SECONDS,
    Choice,
    choose_system,
    measure_systems,
    predict_systems,
)
from sparsetile.tune.floor import Floor, floor_seconds
from sparsetile.tune.kept import kept_timings
from sparsetile.tune.models import source_of
from sparsetile.tune.orders import choose_order

__all__ = [
    "EXPECTED_RUNS", "KEPT_RUNS", "MEASURE_SECONDS", "Account", "Choice", "Floor", "choose_order",
    "choose_quickly", "choose_system", "floor_seconds", "kept_timings", "measure_systems",
    "predict_systems", "schedule_account", "source_of",
]  # fmt: skip
