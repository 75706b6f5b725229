"""The ``sparsetile`` command: thin commands over the library, one file each.

Data goes to stdout, everything else to stderr. Exit code 0 is success, 1 a check that failed,
2 bad usage.
"""

from __future__ import annotations

from sparsetile.cli.app import main

__all__ = ["main"]
