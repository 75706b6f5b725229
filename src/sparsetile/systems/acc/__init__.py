"""``acc``: see system.py."""

from __future__ import annotations

from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.registry import register

__all__ = ["AccSystem"]

register(AccSystem())
