"""Packages whose modules register their content: importing all of them fills the registry."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from sparsetile.core.errors import value_error

__all__ = ["import_modules", "register"]


def import_modules(package: str) -> None:
    """Import every module directly inside ``package``, which is being or has been imported."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def register(cls: Any, registry: dict[str, Any], kind: str) -> None:
    """Add a class that sets a ``name`` of its own to a registry."""
    if "name" not in vars(cls):
        return
    if cls.name in registry:
        known = f"{registry[cls.name].__name__} has it"
        raise value_error(kind, "name", "new", repr(cls.name), known)
    registry[cls.name] = cls
