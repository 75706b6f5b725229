"""Memory of results on the CPU, used again: page faults can cost more than a product."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["HUGE_BYTES", "empty_output"]

# NumPy requests huge pages from this size on.
HUGE_BYTES = 1 << 22
_ALIGNMENT = 64
# Freed results kept for products of the same size: how many, and the bytes of the largest.
_KEPT, KEPT_BYTES = 2, 1 << 28

_kept: deque[np.ndarray[Any, Any]] = deque(maxlen=_KEPT)  # drops the oldest


def empty_output(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor for a product, contiguous, on a 64-byte boundary.

    Large ones come from NumPy, which requests huge pages, unlike torch. The last ones are kept for
    the next product of the same size: page faults can cost more than the product.
    """
    size = rows * columns * dtype.itemsize
    if size < HUGE_BYTES:
        return torch.empty((rows, columns), dtype=dtype)
    return torch.from_numpy(_memory(size)).view(dtype).view(rows, columns)


def _memory(size: int) -> np.ndarray[Any, Any]:
    """Return unused bytes; they are kept for the next caller when they are freed."""
    memory = _kept_memory(size)
    if memory is None:
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        memory = raw[start : start + size]
    lent = memory[:]  # a separate object, which the tensor references
    weakref.finalize(lent, _take_back, memory).atexit = False
    return lent


def _kept_memory(size: int) -> np.ndarray[Any, Any] | None:
    for _ in range(len(_kept)):
        try:
            memory = _kept.popleft()  # atomic, so only one thread gets each
        except IndexError:  # another thread was faster
            return None
        if memory.size == size:
            return memory
        _kept.append(memory)
    return None


def _take_back(memory: np.ndarray[Any, Any]) -> None:
    if memory.size <= KEPT_BYTES:
        _kept.append(memory)
