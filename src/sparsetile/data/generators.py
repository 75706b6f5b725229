"""Generated matrices: every generator, the registry, and spec strings of the command line.

A spec names a generator and its parameters in one word, as a URL does:
``gen:power_law?rows=10000&nnz=200000&seed=3``. Stand-ins take ``scale`` and ``seed``:
``gen:reddit-like?scale=0.01``.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_plus

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.data.graphs import molecules, road_grid
from sparsetile.data.matrices import (
    banded,
    fem_blocks,
    one_dense_column,
    one_dense_row,
    pruned_weights,
    random,
)
from sparsetile.data.powerlaw import power_law
from sparsetile.data.standins import STAND_INS, StandIn, stand_in
from sparsetile.intake.csr import CSR

__all__ = [
    "GENERATORS", "SPEC_PREFIX", "STAND_INS", "StandIn", "banded", "fem_blocks", "from_spec",
    "generate", "molecules", "one_dense_column", "one_dense_row", "parse_spec", "power_law",
    "pruned_weights", "random", "road_grid", "stand_in",
]  # fmt: skip

SPEC_PREFIX = "gen:"
_EXAMPLE = "Write it as gen:power_law?rows=10000&nnz=200000&seed=3"
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")

GENERATORS: dict[str, Callable[..., CSR]] = {
    function.__name__: function
    for function in (
        power_law, road_grid, molecules, fem_blocks, banded, random, one_dense_row,
        one_dense_column, pruned_weights,
    )
}  # fmt: skip


def generate(name: str, **params: Any) -> CSR:
    """Call the generator ``name`` with keyword arguments; unknown or missing ones raise an error.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.generate("banded", rows=100, bandwidth=3)
    >>> A.shape, A.nnz
    ((100, 100), 688)
    """
    function = GENERATORS[one_of("generate", "name", name, GENERATORS)]
    accepted = list(inspect.signature(function).parameters)
    for given in params:
        if given not in accepted:
            raise value_error(
                "generate", f"parameter of {name}", f"one of {accepted}", repr(given),
                "Check its spelling",
            )  # fmt: skip
    missing = _missing(function, params)
    if missing:
        raise type_error(
            "generate", "params", f"complete for {name}", f"no {missing}", "Give these as well"
        )
    return function(**params)


def _missing(function: Callable[..., CSR], params: Mapping[str, Any]) -> list[str]:
    """Parameters without a default that were not given."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.name not in params
    ]


def from_spec(text: str) -> CSR:
    """Generate the matrix that a spec such as ``gen:banded?rows=100&bandwidth=3`` describes.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.from_spec("gen:banded?rows=100&bandwidth=3")
    >>> A.shape, A.nnz
    ((100, 100), 688)
    """
    name, params = parse_spec(text)
    if name in STAND_INS:
        return stand_in(name, **params)
    return generate(name, **params)


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into the generator's (or stand-in's) name and its typed parameters.

    ``gen:`` may be omitted. Whole numbers may be written as 1e6 or 1_000_000.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> generators.parse_spec("gen:banded?rows=1e3&bandwidth=3")
    ('banded', {'rows': 1000, 'bandwidth': 3})
    """
    name, _, query = text.removeprefix(SPEC_PREFIX).partition("?")
    known = [*GENERATORS, *STAND_INS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        remedy = f"Did you mean {' or '.join(near)}" if near else _EXAMPLE
        raise value_error("from_spec", "generator", f"one of {known}", repr(name), remedy)
    function: Callable[..., CSR] = stand_in if name in STAND_INS else GENERATORS[name]
    hints = typing.get_type_hints(function)
    accepted = [key for key in inspect.signature(function).parameters if key in hints]
    if name in STAND_INS:
        accepted.remove("name")

    params: dict[str, Any] = {}
    for part in query.split("&") if query else []:
        key, equals, value = part.partition("=")
        key, value = unquote_plus(key), unquote_plus(value)
        if not equals:
            raise value_error("from_spec", "parameter", "key=value", repr(part), _EXAMPLE)
        if key not in accepted:
            raise value_error(
                "from_spec", f"parameter of {name}", f"one of {accepted}", repr(key), _EXAMPLE
            )
        if key in params:
            raise value_error("from_spec", key, "given once", "two values", "Remove one of them")
        params[key] = _typed(key, value, hints[key])
    missing = [key for key in _missing(function, params) if key in accepted]
    if missing:
        remedy = f"Add {'&'.join(f'{key}=...' for key in missing)}"
        raise value_error("from_spec", f"{name}'s parameters", "complete", f"no {missing}", remedy)
    return name, params


def _typed(key: str, value: str, hint: Any) -> Any:
    """Read ``value`` as the type that the generator's signature asks for."""
    if isinstance(hint, types.UnionType):  # only ``X | None`` occurs; omit for None
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if hint is str:
        return value
    if hint is bool:
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise value_error("from_spec", key, "true or false", repr(value), f"Write {key}=true")
    expected = "a whole number" if hint is int else "a number"
    try:
        number: int | float = float(value) if hint is float else _whole(value)
    except ValueError:
        raise value_error("from_spec", key, expected, repr(value), _EXAMPLE) from None
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # so that 1e6 is as good as 1000000
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)
