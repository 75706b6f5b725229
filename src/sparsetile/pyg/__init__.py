"""PyG's layers on sparsetile's products: one call, nothing else changes in a program.

>>> import sparsetile.pyg
>>> sparsetile.pyg.patch()

PyG is imported by :func:`patch`, not by this package.
"""

from __future__ import annotations

from sparsetile.pyg.patching import is_patched, patch, unpatch

__all__ = ["is_patched", "patch", "unpatch"]
