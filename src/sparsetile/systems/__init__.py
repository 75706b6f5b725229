"""Systems: which parts each joins, what it can do, and why not when it cannot."""

from __future__ import annotations

from sparsetile.systems.base import Epilogue, Request, Runner, Stage, System
from sparsetile.systems.registry import SYSTEMS, candidates, runner

__all__ = [
    "SYSTEMS",
    "Epilogue",
    "Request",
    "Runner",
    "Stage",
    "System",
    "candidates",
    "runner",
]
