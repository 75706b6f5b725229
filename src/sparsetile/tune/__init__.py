"""Roofline floor, and the choice of a system by model or by measurement."""

from __future__ import annotations

from sparsetile.tune.choose import measure_systems, predict_systems
from sparsetile.tune.floor import Floor, floor_seconds

__all__ = ["Floor", "floor_seconds", "measure_systems", "predict_systems"]
