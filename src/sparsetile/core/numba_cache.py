"""numba compilation kept on disk between processes: the CPU kernels' and the row orders'.

Imports numba, which takes half a second: only modules that are themselves imported when such code
is about to run may import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["entry_point", "inlined", "inner"]

# No ZeroDivisionError paths. fastmath stays off: NaN, Inf and the order of additions count.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

inner = numba.njit(**_OPTIONS)
"""Decorator of a function that only compiled code calls."""

inlined = numba.njit(forceinline=True, **_OPTIONS)
"""The same for one that is called often with many arrays: an array is seven arguments of a call."""


def entry_point(function: Callable[..., Any], digest: str = "") -> Any:
    """Compile a function that Python calls.

    numba renews its disk cache by the time stamp of the defining file alone. Where the function's
    callees live in other files, ``digest`` of their sources, put into its name, renews it too.
    """
    if digest:
        function.__qualname__ = f"{function.__name__}_{digest}"
    try:
        kernel = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder to write to: each process compiles for itself
        return numba.njit(**_OPTIONS)(function)
    cache: Any = kernel._cache
    load_overload = cache.load_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load_overload(*arguments)
        except Exception:  # a damaged file can raise anything; it must cost a compilation only
            cache.flush()
            return None

    cache.load_overload = load_or_forget
    return kernel
