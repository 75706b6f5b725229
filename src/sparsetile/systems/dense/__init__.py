"""``dense``: see system.py."""

from __future__ import annotations

from sparsetile.systems.dense.system import DenseSystem
from sparsetile.systems.registry import register

__all__ = ["DenseSystem"]

register(DenseSystem())
