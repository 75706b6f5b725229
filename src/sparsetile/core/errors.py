"""Exceptions and the one sentence pattern every error follows.

``<function>: <argument> must be <expected>, got <actual>. <what to do>.``
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "DataError",
    "PlanFileError",
    "UnsupportedError",
    "describe",
    "type_error",
    "value_error",
]


class UnsupportedError(NotImplementedError):
    """No system can do what was asked; the text lists every system with its reason."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; carries the compiler's log and the path of the source."""

    def __init__(self, text: str, *, log: str = "", source_path: str = "") -> None:
        super().__init__(text)
        self.log = log
        self.source_path = source_path


class DataError(ValueError):
    """A file or download does not hold the matrix it should."""


class PlanFileError(ValueError):
    """A plan file is damaged, truncated, of another version, or not a plan file."""


def describe(function: str, argument: str, expected: str, actual: object, remedy: str) -> str:
    """Return the error sentence; ``remedy`` is a full sentence without its full stop."""
    return f"{function}: {argument} must be {expected}, got {actual}. {remedy}."


def value_error(
    function: str, argument: str, expected: str, actual: object, remedy: str
) -> ValueError:
    """Build (not raise) a ValueError in that pattern: wrong shape, range or content."""
    return ValueError(describe(function, argument, expected, actual, remedy))


def type_error(
    function: str, argument: str, expected: str, actual: object, remedy: str
) -> TypeError:
    """Build (not raise) a TypeError in that pattern: wrong type or dtype."""
    return TypeError(describe(function, argument, expected, actual, remedy))
