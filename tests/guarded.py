"""Tensors that end where memory ends: whoever reads past the last element ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

__all__ = ["guarded"]


def guarded(values: Tensor) -> Tensor:
    """Return a copy in the host's memory, before a page that nobody may read."""
    size = values.numel() * values.element_size()
    before = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, before + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=values.dtype, offset=before - size, count=values.numel())
    page = ctypes.c_void_p(copy.data_ptr() + size)
    assert ctypes.CDLL(None).mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.view(values.shape).copy_(values)
