"""Condensed tiles with bitmaps, packed by ``pack_cells`` if A is on a GPU.

BitTCF, WCSR and BMat are packed alike: windows of rows, a window's distinct columns cut into tiles,
a bit for each cell with an entry, packed values in the order of their cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.kernels.cells import PACK_CELLS, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels
from sparsetile.reorder.permutation import positions

__all__ = ["CellShape", "PackedCells", "SortedPairs", "packed_on_device", "sorted_on_device"]

# Keys below this are sorted as 32-bit numbers, which takes half as long.
NARROW_KEYS = 2**31


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
        Whether to return the cell of each entry.
    """

    height: int
    pad: int
    group: int = 1
    fragments: bool = False
    repeat: bool = True
    places: bool = False


@dataclass(frozen=True, eq=False)
class PackedCells:
    """The result of a packer.

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
        Number of distinct keys up to and including each one.
    """

    keys: Tensor
    entry: Tensor
    pair: Tensor


def packed_on_device(csr: CSR, order: Tensor | None, shape: CellShape) -> PackedCells | None:
    """Return A's tiles by kernels; None if A has no entry or its device is not supported.

    The host waits once, for the number of tiles.

    Parameters
    ----------
    csr : CSR
        Fewer than 2^31 entries.
    order : Tensor [M] or None
        Order of the rows; windows are cut from it.
    shape : CellShape
    """
    if not (csr.nnz and built_by_kernels(csr.device)):
        return None
    with building_on(csr.device) as index:
        return _Packing(csr, order, shape, index).run()


def sorted_on_device(csr: CSR, order: Tensor | None, height: int) -> SortedPairs | None:
    """Return the entries of windows of ``height`` rows, sorted by column; the host does not wait.

    None if A has no entry or its device is not supported.
    """
    if not (csr.nnz and built_by_kernels(csr.device)):
        return None
    with building_on(csr.device) as index:
        return _Packing(csr, order, CellShape(height, 1), index).sort()


class _Packing(StagedKernel):
    """One matrix."""

    def __init__(self, csr: CSR, order: Tensor | None, shape: CellShape, index: int) -> None:
        rows, cols = csr.shape
        self._nnz, self._windows, self._shape = csr.nnz, -(-rows // shape.height), shape
        self._wide = self._windows * cols >= NARROW_KEYS
        super().__init__(
            PACK_CELLS,
            csr.device,
            index,
            count=csr.nnz,
            wide=self._wide,
            rows=rows,
            cols=cols,
            height=shape.height,
            pad=shape.pad,
            group=shape.group,
            fragments=shape.fragments,
            repeat=shape.repeat,
        )
        starts, place_of = csr.indptr, None
        if order is not None:
            order = order.to(torch.int64)
            starts, place_of = torch.zeros_like(starts), positions(order)
            torch.cumsum(csr.row_lengths()[order], 0, out=starts[1:])
        self.give("indptr", csr.indptr.contiguous())
        self.give("columns", csr.indices.contiguous())
        self.give("starts", starts.contiguous())
        if place_of is not None:
            self.give("positions", place_of)

    def sort(self) -> SortedPairs:
        """Sort keys, and count distinct ones."""
        name, nnz = "wide_keys" if self._wide else "keys", self._nnz
        self.new("place", nnz)
        keys = self.new(name, nnz, dtype=torch.int64 if self._wide else torch.int32)
        self.launch(Stage.KEYS, nnz)
        keys, entry = torch.sort(keys)
        self.give(name, keys)
        self.give("entry", entry)
        self.new("pair", nnz)
        self.launch(Stage.HEADS, nnz)
        return SortedPairs(keys, entry, self.sums("pair"))

    def run(self) -> PackedCells:
        """Pack tiles."""
        shape, nnz = self._shape, self._nnz
        pair = self.sort().pair
        self.new("window_ptr", self._windows + 1)
        self.launch(Stage.TILES, self._windows)
        window_ptr = self.sums("window_ptr")
        tiles, distinct = torch.cat([window_ptr[-1:], pair[-1:]]).tolist()
        words = tiles * shape.height * shape.pad // 64
        columns = self.new("tile_columns", tiles * shape.pad)
        bits = self.give("words", torch.zeros(words, dtype=torch.int64, device=pair.device))
        self.new("cells", nnz, dtype=torch.int64)
        self.launch(Stage.BITS, nnz)
        self.new("word_ptr", words + 1)
        self.launch(Stage.COUNTS, words)
        word_ptr = self.sums("word_ptr")
        entries = self.new("entries", nnz)
        places = self.new("places", nnz, dtype=torch.int64) if shape.places else None
        self.launch(Stage.ENTRIES, nnz)
        return PackedCells(window_ptr, columns, bits, word_ptr, entries, places, int(distinct))
