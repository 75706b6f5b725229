"""What every schedule must do: hold each entry of each unit in exactly one item."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsetile.formats import Units

__all__ = ["check_cover"]


def held_once(top: int, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How often each of ``top`` list elements is in one of the ranges."""
    steps = np.zeros(top + 1, dtype=int)
    np.add.at(steps, begin, 1)
    np.add.at(steps, end, -1)
    return np.cumsum(steps)[:-1]


def check_cover(units: Units, pieces: Tensor) -> None:
    """Each element of each unit's list is in one piece, and a piece is inside its unit's list."""
    assert pieces.dtype is torch.int64 and pieces.shape[1:] == (4,)
    kind, label, begin, end = pieces.numpy().T
    kinds, first = units.bundled.numpy().astype(int), units.begin.numpy()
    last = first + units.length.numpy()
    names, known = 2 * label + kind, 2 * units.label.numpy() + kinds
    order = np.argsort(known)
    assert np.array_equal(np.unique(names), known[order]), "units without entries are written, too"
    at = order[np.searchsorted(known[order], names)]
    assert ((first[at] <= begin) & (begin <= end) & (end <= last[at])).all()
    many = np.bincount(at, minlength=units.count)[at] > 1
    assert (begin < end)[many].all(), "no unit is listed once more without entries"
    top = int(last.max()) if last.size else 0
    for bundled in (0, 1):
        found = held_once(top, begin[kind == bundled], end[kind == bundled])
        expected = held_once(top, first[kinds == bundled], last[kinds == bundled])
        assert expected.max(initial=0) <= 1 and np.array_equal(found, expected)
