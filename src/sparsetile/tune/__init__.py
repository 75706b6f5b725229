"""Roofline floor, cost models and the measured choice of a system."""

from __future__ import annotations

from sparsetile.tune.choose import measure, measure_systems, predict_systems
from sparsetile.tune.roofline import H200, Floor, Machine, floor_seconds, machine

__all__ = [
    "H200",
    "Floor",
    "Machine",
    "floor_seconds",
    "machine",
    "measure",
    "measure_systems",
    "predict_systems",
]
