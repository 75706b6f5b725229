"""Stable order of entries by (row, column), the costly step of canonicalisation.

On a GPU, and for small inputs, a sort of 64-bit keys. On the CPU two counting passes (scipy's
conversion between compressed formats) take a third of a sort's time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["sort_entries"]

# Below this many entries importing scipy costs more than it saves.
COUNTING_FROM = 2**17


def sort_entries(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (keys, order): ``order`` sorts the entries, ``keys`` are row * K + column, sorted.

    ``rows`` and ``columns`` are int64 and in range, so that keys stay below 2^62. Entries at the
    same place keep their order.
    """
    keys = rows * shape[1] + columns
    entries = keys.numel()
    # Counting passes walk over every row and column, so a mostly empty matrix is sorted instead.
    if keys.device.type == "cpu" and entries >= COUNTING_FROM and max(shape) <= 4 * entries:
        by_column = _counting_order(columns.numpy(), shape[1])
        order = torch.from_numpy(by_column[_counting_order(rows.numpy()[by_column], shape[0])])
        order = order.to(torch.int64)
        return keys.index_select(0, order), order
    return torch.sort(keys, stable=True)


def _counting_order(keys: np.ndarray, size: int) -> np.ndarray:
    """Return the stable order of whole numbers below ``size`` in one pass over them."""
    from scipy.sparse import csr_array

    # Entry k alone in row k, at column keys[k]: by columns, the row numbers are the order.
    count = keys.size
    index = np.int32 if max(count, size) < 2**31 else np.int64
    lone = (np.zeros(count, np.int8), keys.astype(index), np.arange(count + 1, dtype=index))
    return csr_array(lone, shape=(count, size)).tocsc().indices
