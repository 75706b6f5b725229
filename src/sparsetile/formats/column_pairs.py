"""Distinct (window of rows, column) pairs: the rows of B that a kernel on windows must read.

Shared by the floor, the choice of a system, the figures and the tables of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsetile.formats.device_cells import sorted_on_device
from sparsetile.formats.row_parts import counted_in_parts, row_parts
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = ["distinct_pairs", "window_pairs"]


def _distinct(keys: Tensor) -> Tensor:
    """Sorted keys without repeats."""
    if keys.device.type != "cpu":
        return torch.unique(keys)
    # Sorted by NumPy: torch.unique and np.unique are many times slower on these keys.
    ordered = torch.from_numpy(np.sort(keys.numpy()))
    first = torch.ones(ordered.numel(), dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def window_pairs(
    rows: Tensor, cols: Tensor, columns: int, windows: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each height of ``windows`` with the window of every distinct (window, column) pair.

    ``rows`` (int64, in the order in which they are visited) and ``cols`` are those of the entries.
    ``windows`` ascend, and each divides the next. Windows of pairs are int64, ascending.
    """
    columns = max(columns, 1)
    for window in windows:
        # Pairs of a window come from those of the windows inside it: fewer at each step.
        keys = _distinct(rows // window * columns + cols)
        owner = keys // columns
        yield window, owner
        rows, cols = owner * window, keys - owner * columns


def distinct_pairs(csr: CSR, window: int, perm: Tensor | None = None) -> int:
    """Count the distinct (window of ``window`` rows in the order ``perm``, column) pairs."""
    if csr.nnz == 0 or window == 1:
        return csr.nnz
    if counted_in_parts(csr, window):
        return sum(_count(part, window, None) for _, part in row_parts(csr, perm, window))
    return _count(csr, window, perm)


def _count(csr: CSR, window: int, perm: Tensor | None) -> int:
    if csr.nnz == 0:
        return 0
    found = sorted_on_device(csr, perm, window)
    if found is not None:
        return int(found.pair[-1])
    rows = csr.row_ids()
    if perm is not None:
        rows = positions(perm)[rows]
    ((_, owner),) = window_pairs(rows, csr.indices, csr.shape[1], (window,))
    return owner.numel()
