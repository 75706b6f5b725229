"""Functions that replace others, also for TorchScript.

``torch.jit.script`` reads the source of the wrapped function, and looks names up in the globals of
the wrapper. Both must be the original's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["take_place"]


def take_place(original: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``body(original, ...)`` and passes for ``original``."""

    def call(*arguments, **named):  # type: ignore[no-untyped-def]
        return body(original, *arguments, **named)

    made = types.FunctionType(
        call.__code__, original.__globals__, original.__name__, closure=call.__closure__
    )
    return functools.update_wrapper(made, original)
