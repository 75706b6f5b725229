"""``wcsr``: see system.py."""

from __future__ import annotations

from sparsetile.systems.registry import register
from sparsetile.systems.wcsr.system import WCSRSystem

__all__ = ["WCSRSystem"]

register(WCSRSystem())
