"""``half``: see system.py, which is imported when a plan may take the system."""

from __future__ import annotations

DEVICES = ("cuda",)
QUICK_ON = ("cuda",)
