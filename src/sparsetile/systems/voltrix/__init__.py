"""``voltrix``: see system.py."""

from __future__ import annotations

from sparsetile.systems.registry import register
from sparsetile.systems.voltrix.system import VoltrixSystem

__all__ = ["VoltrixSystem"]

register(VoltrixSystem())
