"""The generators by name, and the one way to call them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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
from sparsetile.intake.csr import CSR

__all__ = ["GENERATORS", "generate"]

GENERATORS: dict[str, Callable[..., CSR]] = {
    function.__name__: function
    for function in (
        power_law,
        road_grid,
        molecules,
        fem_blocks,
        banded,
        random,
        one_dense_row,
        one_dense_column,
        pruned_weights,
    )
}


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
    signature = inspect.signature(function)
    for given in params:
        if given not in signature.parameters:
            raise value_error(
                "generate",
                f"parameter of {name}",
                f"one of {list(signature.parameters)}",
                repr(given),
                "Check its spelling",
            )
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.name not in params
    ]
    if missing:
        raise type_error(
            "generate", "params", f"complete for {name}", f"no {missing}", "Give these as well"
        )
    return function(**params)
