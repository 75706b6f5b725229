"""Systems: the parts of each, what it supports, why not if it does not, and its cost.

One folder per system, imported on first use (registry.py).
"""

from __future__ import annotations

from sparsetile.systems.registry import SYSTEMS, candidates, runner

__all__ = ["SYSTEMS", "candidates", "runner"]
