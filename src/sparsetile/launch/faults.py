"""What products from arrays found wrong, told later: nobody waits for the GPU to check indices.

Kernels that read callers' row pointers and columns write the first wrong one into host memory, a
block per device. The next call of sparsetile that looks there raises it; ``synchronize()`` waits
and looks. Results between are not to be trusted.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from sparsetile.core.errors import value_error
from sparsetile.jit.workspace import renew_scratch

__all__ = ["faults_address", "forget_when_wrong", "raise_faults", "synchronize"]

# Words of direct.cuh: what is wrong, where, the number there, the limit.
_WORDS = 4
_BAD_COLUMN, _BAD_EDGE = 1, 3

_lock = threading.Lock()
# Called before an error is raised: what was made of wrong indices must not be used again.
_forget: list[Callable[[], object]] = []
_memory: dict[int, torch.Tensor] = {}
# The same memory as ctypes reads it: a tenth of the time of a tensor.
_words: list[ctypes.Array[ctypes.c_int64]] = []


def faults_address(device: int) -> int:
    """Return the address of a device's words."""
    found = _memory.get(device)
    if found is None:
        with _lock, torch.inference_mode(False):
            if device not in _memory:
                made = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=True)
                _words.append((ctypes.c_int64 * _WORDS).from_address(made.data_ptr()))
                _memory[device] = made
            found = _memory[device]
    return found.data_ptr()


def forget_when_wrong(forget: Callable[[], object]) -> None:
    """Call a function before an error is raised, to forget what was made of callers' indices."""
    _forget.append(forget)


def raise_faults() -> None:
    """Raise what kernels that have ended found wrong, once."""
    for words in _words:
        if words[0]:
            _raise(words)


def _raise(words: ctypes.Array[ctypes.c_int64]) -> None:
    torch.cuda.synchronize()  # whoever wrote the first word may not have written the others
    with _lock:
        what, where, number, limit = words
        words[:] = [0] * _WORDS
    if not what:
        return  # another thread raised it
    renew_scratch()
    for forget in _forget:
        forget()
    then = "Results since then are wrong: correct A and multiply again"
    if what == _BAD_COLUMN:
        raise value_error(
            "spmm", "column indices", f"from 0 to {limit - 1} (rows of B - 1)",
            f"{number} at entry {where} in an earlier product", then,
        )  # fmt: skip
    if what == _BAD_EDGE:
        raise value_error(
            "graph layers", "edge_index", f"from 0 to {limit - 1} (nodes - 1)",
            f"{number} at edge {where} in an earlier call",
            "Results since then are wrong: correct the edges and call again",
        )  # fmt: skip
    raise value_error(
        "spmm", "row pointers", "ascending from 0 to the number of entries",
        f"{number} at row {where}, which should be {limit} or more, in an earlier product"
        if where
        else f"{number} at row 0 in an earlier product",
        then,
    )  # fmt: skip


def synchronize(device: torch.device | int | str | None = None) -> None:
    """Wait for a GPU, and raise what products from arrays found wrong in their indices.

    ``sparsetile.spmm`` and ``sparsetile.functional`` do not wait for the GPU to check indices. A
    wrong one is raised by the first later call of either, once the GPU has found it, or here.

    Parameters
    ----------
    device : torch.device, int or str, optional
        As for ``torch.cuda.synchronize``. Nothing is waited for without a GPU.

    Raises
    ------
    ValueError
        A column is outside of B, or row pointers do not ascend.

    Examples
    --------
    >>> import sparsetile as st
    >>> st.synchronize() is None  # nothing was wrong
    True
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
        raise_faults()
