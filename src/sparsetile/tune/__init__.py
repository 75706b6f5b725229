"""Roofline floor, cost models and the measured choice of a system."""

from __future__ import annotations

from sparsetile.tune.choose import measure, measure_systems, predict_systems
from sparsetile.tune.floor import Floor, floor_seconds

__all__ = [
    "Floor",
    "floor_seconds",
    "measure",
    "measure_systems",
    "predict_systems",
]
