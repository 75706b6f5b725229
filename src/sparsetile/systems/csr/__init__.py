"""``csr``: see system.py, which is imported when a plan may take the system."""

from __future__ import annotations

DEVICES = ("cuda",)
EXACT_ON = ("cuda",)
QUICK_ON = ("cuda",)
