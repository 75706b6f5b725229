"""Argument checks shared by the public functions; each raises one clear error or returns."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sparsetile.core.errors import type_error, value_error

__all__ = [
    "MAX_DIM", "REDUCES", "dimension", "matrix_shape", "one_of", "real_number", "reduce_name",
]  # fmt: skip

# Column ids are stored as int32, so no dimension may reach 2^31.
MAX_DIM = 2**31 - 1

REDUCES = ("sum", "mean", "max", "min")
_REDUCE_ALIASES = {"add": "sum", "amax": "max", "amin": "min"}


def dimension(function: str, argument: str, value: object) -> int:
    """Return ``value`` as an int in [0, 2^31), refusing NaN, fractions, bools and text."""
    remedy = "Give a whole number from 0 to 2147483647"
    if isinstance(value, (bool, str)):
        raise type_error(function, argument, "a whole number", repr(value), remedy)
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise value_error(function, argument, "a whole number", value, remedy)
        value = int(value)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise type_error(
            function, argument, "a whole number", type(value).__name__, remedy
        ) from None
    if not 0 <= number <= MAX_DIM:
        raise value_error(function, argument, "between 0 and 2147483647", number, remedy)
    return number


def real_number(function: str, argument: str, value: Any) -> float:
    """Return ``value`` as a float; reject text, None, complex numbers and tracked tensors."""
    if type(value) is float:
        return value
    if getattr(value, "requires_grad", False):
        raise type_error(
            function, argument, "a number without a gradient", "a tensor that requires grad",
            "Multiply the result by it instead",
        )  # fmt: skip
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise type_error(function, argument, "a number", repr(value), "Pass a float")


def matrix_shape(function: str, shape: object) -> tuple[int, int]:
    """Return ``shape`` as (rows, columns) or raise."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise type_error(
            function, "shape", "a pair (rows, columns)", repr(shape), "Pass shape=(M, K)"
        )
    pair: Sequence[object] = list(shape)
    if len(pair) != 2:
        raise value_error(
            function, "shape", "a pair (rows, columns)", f"{len(pair)} numbers", "Pass (M, K)"
        )
    return dimension(function, "shape[0]", pair[0]), dimension(function, "shape[1]", pair[1])


def one_of(function: str, argument: str, value: object, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is among ``allowed``, else raise naming all of them."""
    names = list(allowed)
    if not isinstance(value, str):
        raise type_error(function, argument, "a name", type(value).__name__, f"Use one of {names}")
    if value not in names:
        raise value_error(
            function, argument, f"one of {names}", repr(value), "Choose a name from that list"
        )
    return value


def reduce_name(function: str, value: object) -> str:
    """Return the canonical reduction name; ``add``, ``amax``, ``amin`` are accepted too."""
    if isinstance(value, str):
        value = _REDUCE_ALIASES.get(value, value)
    return one_of(function, "reduce", value, REDUCES)
