"""``rsh``: see system.py."""

from __future__ import annotations

from sparsetile.systems.registry import register
from sparsetile.systems.rsh.system import RSHSystem

__all__ = ["RSHSystem"]

register(RSHSystem())
