"""``cpu``: see system.py."""

from __future__ import annotations

from sparsetile.systems.cpu.system import CPUSystem
from sparsetile.systems.registry import register

__all__ = ["CPUSystem"]

register(CPUSystem())
