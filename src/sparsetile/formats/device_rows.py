"""Rows counted and listed by kernels where A lies on a device that has them.

A schedule of rows is dozens of tensor operations on lists as long as A has rows, and a GPU takes
longer to be told of one than to do it. A later package may offer functions that do it in a few
launches, by type of device (``offer_row_kernels``); formats and schedules ask here first, and use
tensor operations where nothing is offered. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

if TYPE_CHECKING:
    from sparsetile.formats.units import RowUnits, Tally

__all__ = [
    "ArrangedUnits",
    "HeadShape",
    "PackedBundles",
    "RowCounts",
    "RowKernels",
    "UnitLimits",
    "arranged_on_device",
    "bundled_on_device",
    "counted_on_device",
    "heads_on_device",
    "kernels_on",
    "offer_row_kernels",
]

# Units and entries that kernels number by 32 bits, and rows and entries together of which running
# sums of bundles stay below that.
MOST, MOST_BUNDLED = 2**31, 2**29


@dataclass(frozen=True)
class RowCounts:
    """What the host wants to know of rows, for which it waits once.

    Attributes
    ----------
    tally : Tally
    shared : (int, int, int) or None
        Windows of four rows that share columns, their entries and their distinct columns; None
        where they were not asked for.
    """

    tally: Tally
    shared: tuple[int, int, int] | None


@dataclass(frozen=True)
class UnitLimits:
    """Lengths over which units are cut, have a warp, and have a thread block (None: none has)."""

    longest: int
    wide: int
    shared: int | None


class ArrangedUnits(Protocol):
    """Units by class: to be cut, shared, wide bundles, wide rows, bundles, rows.

    Attributes
    ----------
    counts : sequence of int
        Units of each class.
    cut : Tensor of int32 [cut units, 4]
        ``label, begin, length, whether a bundle``, on the host.
    """

    counts: Sequence[int]
    cut: Tensor

    def items(self, pieces: tuple[int, int, int]) -> Tensor:
        """Return the items of a schedule on the device, int32 [items, 4].

        ``pieces`` are those of cut units in the sections of shared rows, of wide bundles and of
        wide rows: uninitialised items, which come before the section's whole units.
        """


@dataclass(frozen=True)
class HeadShape:
    """Items of each section; threads of a thread block, and lanes that a short item has."""

    sections: tuple[int, int, int, int, int]
    block: int
    lanes: int


@dataclass(frozen=True, eq=False)
class PackedBundles:
    """Arrays of ``RowBundles`` (formats/bundles.py), by the same names."""

    tagged: Tensor
    indptr: Tensor
    rows: Tensor
    loose: Tensor
    entries: Tensor
    slots: Tensor


@dataclass(frozen=True)
class RowKernels:
    """What a type of device offers.

    Attributes
    ----------
    count : callable
        (rows, columns of A's entries or None, least sharing of a window) -> counts. Windows are
        counted where columns are given.
    arrange : callable
        (rows, limits, units of each class or None where the host does not know) -> lists.
    heads : callable
        (items, columns of A's entries, shape) -> column of each thread's first entry.
    bundle : callable
        (matrix, row order or None, least sharing of a window, windows that share so much, their
        entries) -> bundles.
    """

    count: Callable[[RowUnits, Tensor | None, float], RowCounts]
    arrange: Callable[[RowUnits, UnitLimits, Sequence[int] | None], ArrangedUnits]
    heads: Callable[[Tensor, Tensor, HeadShape], Tensor]
    bundle: Callable[[CSR, Tensor | None, float, int, int], PackedBundles]


_KERNELS: dict[str, RowKernels] = {}


def offer_row_kernels(device_type: str, kernels: RowKernels | None) -> None:
    """Let ``kernels`` list rows on devices of a type; None takes the offer back."""
    if kernels is None:
        _KERNELS.pop(device_type, None)
    else:
        _KERNELS[device_type] = kernels


def kernels_on(device: torch.device) -> bool:
    """Whether a device has kernels."""
    return device.type in _KERNELS


def counted_on_device(
    units: RowUnits, columns: Tensor | None = None, min_sharing: float = 1.0
) -> RowCounts | None:
    """Return counts by the kernels of the units' device; None where there are none, or no unit."""
    kernels = _KERNELS.get(units.device.type)
    if kernels is None or not 0 < units.count < MOST:
        return None
    if columns is not None and not 0 < columns.numel() < MOST:
        return None
    return kernels.count(units, columns, min_sharing)


def arranged_on_device(
    units: RowUnits, limits: UnitLimits, counts: Sequence[int] | None
) -> ArrangedUnits | None:
    """Return lists by the kernels of the units' device; None where there are none, or no unit.

    The caller has seen that every range ends below 2^31.
    """
    kernels = _KERNELS.get(units.device.type)
    if kernels is None or not 0 < units.count < MOST:
        return None
    return kernels.arrange(units, limits, counts)


def heads_on_device(items: Tensor, columns: Tensor, shape: HeadShape) -> Tensor | None:
    """Return first columns by the kernels of the items' device; None where there are none."""
    kernels = _KERNELS.get(items.device.type)
    if kernels is None or not items.shape[0]:
        return None
    return kernels.heads(items, columns, shape)


def bundled_on_device(
    csr: CSR, order: Tensor | None, min_sharing: float, count: int, held: int
) -> PackedBundles | None:
    """Return bundles by the kernels of A's device; None where there are none, or no entry.

    ``count`` and ``held`` are the windows that share so much and their entries.
    """
    kernels = _KERNELS.get(csr.device.type)
    if kernels is None or not csr.nnz or csr.nnz + csr.shape[0] >= MOST_BUNDLED:
        return None
    return kernels.bundle(csr, order, min_sharing, count, held)
