"""``dense``: see system.py, which is imported when a plan may take the system."""

from __future__ import annotations

DEVICES = ("cuda", "cpu")
QUICK_ON = ("cuda",)
