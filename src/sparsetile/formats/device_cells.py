"""Condensed tiles with bitmaps, packed by kernels where A lies on a device that has them.

BitTCF, WCSR and BMat pack alike: windows of rows, a window's distinct columns cut into tiles, a
bit for each cell that holds an entry, packed values in the order of their cells. With tensor
operations that is a hundred small ones, which take a GPU longer to be told of than to do. A later
package may offer functions that do it in a few launches, by type of device (``offer_kernels``);
formats ask here first, and use tensor operations where nothing is offered. Both give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = [
    "CellKernels",
    "CellShape",
    "PackedCells",
    "SortedPairs",
    "offer_kernels",
    "packed_on_device",
    "sorted_on_device",
]


@dataclass(frozen=True)
class CellShape:
    """How windows are cut into tiles, and cells numbered.

    Attributes
    ----------
    height, pad : int
        Rows of a window, and columns of a tile.
    group : int
        A window's tiles are a multiple of this.
    fragments : bool
        Whether cells are in the order of an MMA's lanes (formats/bmat.py), sixteen rows and eight
        columns at a time; row by row otherwise.
    repeat : bool
        Whether slots past a window's last column repeat it; -1 otherwise.
    places : bool
        Whether the cell of each entry is wanted.
    """

    height: int
    pad: int
    group: int = 1
    fragments: bool = False
    repeat: bool = True
    places: bool = False


@dataclass(frozen=True, eq=False)
class PackedCells:
    """What a packer returns.

    Attributes
    ----------
    window_ptr : Tensor of int32 [windows + 1]
        First tile of each window.
    columns : Tensor of int32 [tiles * pad]
        Column of A behind each column of a tile.
    words : Tensor of int64 [tiles * height * pad / 64]
        A bit for each cell.
    word_ptr : Tensor of int32 [words + 1]
        First packed value of each word.
    entries : Tensor of int32 [nnz]
        Canonical entry of each packed value.
    places : Tensor of int64 [nnz] or None
        Cell of each canonical entry.
    distinct : int
        (window, column) pairs.
    """

    window_ptr: Tensor
    columns: Tensor
    words: Tensor
    word_ptr: Tensor
    entries: Tensor
    places: Tensor | None
    distinct: int


@dataclass(frozen=True, eq=False)
class SortedPairs:
    """Entries by window of rows and column.

    Attributes
    ----------
    keys : Tensor of int32 or int64 [nnz]
        ``window * columns + column``, ascending.
    entry : Tensor of int64 [nnz]
        Canonical entry of each key; those of equal keys in any order.
    pair : Tensor of int32 [nnz]
        Distinct keys up to each one, itself included.
    """

    keys: Tensor
    entry: Tensor
    pair: Tensor


@dataclass(frozen=True)
class CellKernels:
    """What a type of device offers: tiles, and sorted pairs of windows of so many rows.

    Attributes
    ----------
    pack : callable
        (matrix, row order or None, shape) -> tiles.
    sort : callable
        (matrix, row order or None, rows of a window) -> pairs.
    """

    pack: Callable[[CSR, Tensor | None, CellShape], PackedCells]
    sort: Callable[[CSR, Tensor | None, int], SortedPairs]


_KERNELS: dict[str, CellKernels] = {}


def offer_kernels(device_type: str, kernels: CellKernels | None) -> None:
    """Let ``kernels`` pack matrices on devices of a type; None takes the offer back."""
    if kernels is None:
        _KERNELS.pop(device_type, None)
    else:
        _KERNELS[device_type] = kernels


def packed_on_device(csr: CSR, order: Tensor | None, shape: CellShape) -> PackedCells | None:
    """Return A's tiles by the kernels of its device; None where there are none, or no entry."""
    kernels = _KERNELS.get(csr.device.type)
    return kernels.pack(csr, order, shape) if kernels is not None and csr.nnz else None


def sorted_on_device(csr: CSR, order: Tensor | None, height: int) -> SortedPairs | None:
    """Return A's pairs by the kernels of its device; None where there are none, or no entry."""
    kernels = _KERNELS.get(csr.device.type)
    return kernels.sort(csr, order, height) if kernels is not None and csr.nnz else None
