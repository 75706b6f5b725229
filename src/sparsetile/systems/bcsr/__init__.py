"""``bcsr``: see system.py."""

from __future__ import annotations

from sparsetile.systems.bcsr.system import BCSRSystem
from sparsetile.systems.registry import register

__all__ = ["BCSRSystem"]

register(BCSRSystem())
