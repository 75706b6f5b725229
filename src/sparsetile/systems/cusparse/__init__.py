"""``cusparse``: see system.py."""

from __future__ import annotations

from sparsetile.systems.cusparse.system import CuSparseSystem
from sparsetile.systems.registry import register

__all__ = ["CuSparseSystem"]

register(CuSparseSystem())
