"""Seeded sampling and assembly that the generators share; NumPy only, no loop over entries.

A set of matrix cells is kept as one sorted int64 array of keys ``row * cols + column`` until the
last step: sorting, deduplicating and merging such arrays is what NumPy does fastest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.core.checks import dimension
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import CSR

__all__ = [
    "Keys", "csr_from_keys", "distinct", "distinct_integers", "fraction", "merge_disjoint",
    "missing_from", "positive", "real", "seeded", "symmetric_keys", "without",
]  # fmt: skip

Keys = NDArray[np.int64]

# Beyond this share of the range, listing what is free beats drawing until enough is found.
_DENSE_SHARE = 0.5


def seeded(function: str, seed: object) -> np.random.Generator:
    """Return the generator of ``seed``, a whole number from 0 up."""
    return np.random.default_rng(dimension(function, "seed", seed))


def real(function: str, argument: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a finite float in [low, high], or raise one clear error."""
    expected = (
        f"a number of at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    )
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, np.number)):
        raise type_error(function, argument, expected, repr(value), "Give a plain number")
    number = float(value)
    if not low <= number <= high or math.isinf(number):  # NaN fails the comparison
        raise value_error(function, argument, expected, value, "Give a number in that range")
    return number


def fraction(function: str, argument: str, value: object) -> float:
    """Return ``value`` as a float in [0, 1], or raise."""
    return real(function, argument, value, 0.0, 1.0)


def positive(function: str, argument: str, value: object) -> int:
    """Return ``value`` as a whole number from 1 up, or raise."""
    number = dimension(function, argument, value)
    if number == 0:
        raise value_error(function, argument, "at least 1", 0, "Give a positive whole number")
    return number


def distinct_integers(rng: np.random.Generator, total: int, count: int) -> Keys:
    """Draw ``count`` different integers of [0, total), every such set equally likely; sorted.

    Memory follows ``count``, not ``total``, unless ``count`` is a good part of ``total``.
    """
    if count > total * _DENSE_SHARE:
        taken = np.ones(total, dtype=bool)
        taken[distinct_integers(rng, total, total - count)] = False
        return np.flatnonzero(taken)
    found: Keys = np.empty(0, dtype=np.int64)
    while found.size < count:
        need = count - found.size
        # At most half the range is taken, so a little over twice the need nearly always ends it.
        draws = int(need / (1.0 - (found.size + need / 2) / total) * 1.02) + 16
        drawn = distinct(rng.integers(0, total, size=draws))
        found = merge_disjoint(found, missing_from(found, drawn))
    return without(found, found.size - count, rng)


def distinct(keys: Keys) -> Keys:
    """Sort ``keys`` in place and return them without duplicates.

    Sorting takes a tenth of the time of ``np.unique``, which hashes.
    """
    keys.sort()
    if keys.size == 0:
        return keys
    first = np.empty(keys.size, dtype=bool)
    first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return keys[first]


def without(keys: Keys, excess: int, rng: np.random.Generator) -> Keys:
    """Return ``keys`` less ``excess`` of them chosen at random; order is kept."""
    if excess == 0:
        return keys
    keep = np.ones(keys.size, dtype=bool)
    keep[rng.choice(keys.size, excess, replace=False, shuffle=False)] = False
    return keys[keep]


def missing_from(have: Keys, candidates: Keys) -> Keys:
    """Return the candidates that ``have`` lacks; both sorted, each without duplicates."""
    if have.size == 0 or candidates.size == 0:
        return candidates
    place = np.minimum(np.searchsorted(have, candidates), have.size - 1)
    return candidates[have[place] != candidates]


def merge_disjoint(first: Keys, second: Keys) -> Keys:
    """Merge two sorted arrays that share no element."""
    if first.size == 0 or second.size == 0:
        return second if first.size == 0 else first
    merged = np.concatenate([first, second])
    merged.sort()
    return merged


def symmetric_keys(upper: Keys, rows: int, *, diagonal: bool = False) -> Keys:
    """Return the keys of a symmetric pattern from those above its diagonal, sorted."""
    row = upper // max(rows, 1)  # NumPy divides by one number far faster than divmod does
    column = upper - row * rows
    parts = [upper, column * rows + row]
    if diagonal:
        parts.append(np.arange(rows, dtype=np.int64) * (rows + 1))
    keys = np.concatenate(parts)
    keys.sort()
    return keys


def csr_from_keys(
    keys: Keys, shape: tuple[int, int], *, weighted: bool, rng: np.random.Generator
) -> CSR:
    """Turn sorted distinct keys into the canonical CSR; values are standard normal if weighted."""
    rows, cols = shape
    row_starts = np.arange(rows + 1, dtype=np.int64) * cols
    indptr = np.searchsorted(keys, row_starts).astype(np.int64)
    # Subtracting the row's first key is several times faster than a 64-bit remainder.
    indices = (keys - np.repeat(row_starts[:-1], np.diff(indptr))).astype(np.int32)
    values = None
    if weighted:
        values = torch.from_numpy(rng.standard_normal(keys.size, dtype=np.float32))
    pattern = torch.from_numpy(indptr), torch.from_numpy(indices)
    return CSR(*pattern, values, shape, checked=True)
