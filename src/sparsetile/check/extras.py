"""Packages of the extra ``[report]``: pictures need them, products do not."""

from __future__ import annotations

import importlib
from types import ModuleType

from sparsetile.core.errors import describe

__all__ = ["MissingPackageError", "report_package"]


class MissingPackageError(ModuleNotFoundError):
    """A package of an extra is not installed; the text names the extra."""


def report_package(function: str, name: str) -> ModuleType:
    """Import a module of the extra ``[report]``, or raise an error that names the extra."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # the package is installed, but one of its dependencies is missing
        raise MissingPackageError(
            describe(
                function, package, "installed", "no such package",
                "Run pip install 'sparsetile[report]'",
            ),
            name=package,
        ) from None  # fmt: skip
