"""numba's compiled code, cached on disk between processes, for the row orders.

The CPU kernels keep theirs another way (`kernels.cpu.machine_code`).

Importing numba takes half a second: only modules that are imported right before such code runs may
import this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile

__all__ = ["entry_point", "inlined", "inner"]

# No ZeroDivisionError paths. fastmath stays off: NaN, Inf and the order of additions matter.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

inner = numba.njit(**_OPTIONS)
"""Decorator of a function that is called only by compiled code."""

inlined = numba.njit(forceinline=True, **_OPTIONS)
"""The same for a function called often with many arrays: an array is seven arguments."""


class _CheckedFiles(IndexDataCacheFile):  # type: ignore[misc]
    """numba's cache files with a checksum and the key that they were compiled for.

    numba finds code by an index that two processes may overwrite for each other, or that is newer
    than the code if a process was killed. It could then run code of other types or of an older
    source. It would also run code that was damaged on disk.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        if found is None or found[:2] != (self._source_stamp, key):
            return None
        return found[2]

    def _save_data(self, name: str, data: Any) -> None:
        body = self._dump(data)
        with self._open_for_write(self._data_path(name)) as stream:
            stream.write(hashlib.sha256(body).digest() + body)

    def _load_data(self, name: str) -> Any:
        with open(os.path.join(self._cache_path, name), "rb") as stream:
            digest, body = stream.read(32), stream.read()
        if hashlib.sha256(body).digest() != digest:
            raise ValueError(f"numba cache: {name} must be as it was written, got other bytes.")
        return pickle.loads(body)


def entry_point(function: Callable[..., Any], digest: str = "") -> Any:
    """Compile a function that Python calls.

    numba renews its disk cache only by the time stamp of the defining file. If the function's
    callees are in other files, ``digest`` of their sources, put into its name, renews it too.
    """
    if digest:
        function.__qualname__ = f"{function.__name__}_{digest}"
    try:
        kernel = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no writable folder: each process compiles for itself
        return numba.njit(**_OPTIONS)(function)
    cache: Any = kernel._cache
    cache._cache_file.__class__ = _CheckedFiles
    load_overload, save_overload = cache.load_overload, cache.save_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load_overload(*arguments)
        except Exception:  # a damaged file can raise anything; it must only cost a compilation
            with contextlib.suppress(OSError):
                cache.flush()
            return None

    def save_if_possible(*arguments: Any) -> None:
        with contextlib.suppress(Exception):  # a full disk costs the next process a compilation
            save_overload(*arguments)

    cache.load_overload, cache.save_overload = load_or_forget, save_if_possible
    return kernel
