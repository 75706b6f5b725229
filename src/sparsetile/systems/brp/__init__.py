"""``brp``: see system.py."""

from __future__ import annotations

from sparsetile.systems.brp.system import BRPSystem
from sparsetile.systems.registry import register

__all__ = ["BRPSystem"]

register(BRPSystem())
