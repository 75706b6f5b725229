"""The functions that :mod:`machine_code` compiles: the kernels of :mod:`loops` by one argument.

The argument is the address of 64-bit numbers: first those of ``_head``, then the kernel's own. Such
a call takes 3 us less than one with a Python object for each (a Xeon, development readings).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import compiler
from numba.core.registry import cpu_target

from sparsetile.core.numba_cache import inlined
from sparsetile.kernels.cpu import loops
from sparsetile.kernels.cpu.vector import get

__all__ = ["compile_entry"]

_INTEGER, _REAL = np.int64(0), np.float64(0)


@inlined
def _integer(packed: int, place: int) -> int:
    return get(_INTEGER, packed, place)


@inlined
def _pair(packed: int, place: int) -> tuple[int, int]:
    return _integer(packed, place), _integer(packed, place + 1)


@inlined
def _head(packed: int, offset: Any, index: Any) -> Any:
    """Return what every kernel takes: the counters' address, schedule, A, two matrices, columns."""
    schedule = _pair(packed, 1) + _pair(packed, 3)
    A = (*_pair(packed, 5), *_pair(packed, 7), offset, index)
    return (
        _integer(packed, 0),
        schedule,
        A,
        _pair(packed, 9),
        _pair(packed, 11),
        _integer(packed, 13),
    )


def _spmm_sum(offset: Any, index: Any, scalar: Any) -> Callable[[int], None]:
    element = type(scalar)

    def entry(packed: int) -> None:
        counter, schedule, A, B, C, n = _head(packed, offset, index)
        alpha, beta = element(get(_REAL, packed, 14)), element(get(_REAL, packed, 15))
        mean, fetch = _integer(packed, 16) != 0, _integer(packed, 17) != 0
        scattered, columns = _integer(packed, 18) != 0, _integer(packed, 19)
        loops.spmm_sum(counter, schedule, A, B, C, n, alpha, beta, mean, fetch, scattered, columns)

    return entry


def _spmm_extremum(offset: Any, index: Any, scalar: Any) -> Callable[[int], None]:
    def entry(packed: int) -> None:
        counter, schedule, A, B, C, n = _head(packed, offset, index)
        arg, maximum = _pair(packed, 14), _integer(packed, 16) != 0
        loops.spmm_extremum(counter, schedule, A, B, C, n, arg, maximum, scalar)

    return entry


def _spmm_won(offset: Any, index: Any, scalar: Any) -> Callable[[int], None]:
    def entry(packed: int) -> None:
        counter, schedule, A, B, C, n = _head(packed, offset, index)
        order, starts = _pair(packed, 14)
        loops.spmm_won(counter, schedule, A, B, C, n, order, starts, _pair(packed, 16), scalar)

    return entry


def _sddmm(offset: Any, index: Any, scalar: Any) -> Callable[[int], None]:
    def entry(packed: int) -> None:
        counter, schedule, A, G, B, n = _head(packed, offset, index)
        loops.sddmm(counter, schedule, A, G, B, n, _integer(packed, 14), scalar)

    return entry


_ENTRIES = {
    "spmm_sum": _spmm_sum,
    "spmm_extremum": _spmm_extremum,
    "spmm_won": _spmm_won,
    "sddmm": _sddmm,
}


def compile_entry(kernel: str, offset: str, index: str, element: str) -> tuple[str, bytes]:
    """Compile a kernel for the types of A's arrays and of B; return its symbol and object file.

    The function takes an address for a result and one for an exception, neither of which it has,
    and the address of its numbers. It needs nothing of numba: without the wrapper that Python calls
    no symbol of numba's runtime is left.
    """
    entry = _ENTRIES[kernel](*(getattr(np, name)(0) for name in (offset, index, element)))
    flags: Any = compiler.Flags()  # numba adds its fields at run time
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.release_gil = True
    made = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, entry, (types.int64,), types.void,
        flags, {},
    )  # fmt: skip
    return made.fndesc.llvm_func_name, made.library._get_compiled_object()
