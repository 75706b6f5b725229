"""Run PyG's own layers on sparsetile with one call; the rest of the program stays the same.

>>> import sparsetile.pyg
>>> sparsetile.pyg.patch()

:func:`patch` imports PyG; this package does not.
"""

from __future__ import annotations

from sparsetile.pyg.patching import is_patched, patch, unpatch
from sparsetile.pyg.reporting import Report, Row, report

__all__ = ["Report", "Row", "is_patched", "patch", "report", "unpatch"]
