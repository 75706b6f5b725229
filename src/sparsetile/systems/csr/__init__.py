"""``csr``: see system.py."""

from __future__ import annotations

from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.registry import register

__all__ = ["CSRSystem"]

register(CSRSystem())
