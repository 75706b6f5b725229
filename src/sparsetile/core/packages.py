"""Packages whose modules register their content: importing all of them fills the registry."""

from __future__ import annotations

import importlib
import pkgutil

__all__ = ["import_modules"]


def import_modules(package: str) -> None:
    """Import every module directly inside ``package``, which is being or has been imported."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
