"""``half``: rows on CUDA cores through a copy of B in 16 bits."""

from __future__ import annotations

from sparsetile.systems.half.system import HalfSystem
from sparsetile.systems.registry import register

__all__ = ["HalfSystem"]

register(HalfSystem())
