"""Condensed tiles with bitmaps, packed by ``pack_cells`` if A is on a GPU.

BitTCF, WCSR and BMat are packed alike: windows of rows, a window's distinct columns cut into tiles,
a bit for each cell with an entry, packed values in the order of their cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR, offsets
from sparsetile.kernels.cells import PACK_CELLS, Stage
from sparsetile.launch.staged import StagedKernel, building_on, built_by_kernels
from sparsetile.reorder.permutation import positions

__all__ = ["CellShape", "PackedCells", "SortedPairs", "packed_on_device", "sorted_on_device"]

# Keys below this are sorted as 32-bit numbers, which takes half as long.
NARROW_KEYS = 2**31


@dataclass(frozen=True)
class CellShape:
    """How windows are cut into tiles, and cells numbered."""

    # height, pad: rows of a window, and columns of a tile.
    height: int
    pad: int
    group: int = 1  # a window's tiles are a multiple of this
    # Whether cells are in the order of an MMA's lanes (formats/bmat.py), sixteen rows and eight
    # columns at a time; row by row otherwise.
    fragments: bool = False
    repeat: bool = True  # whether slots past a window's last column repeat it; -1 otherwise
    places: bool = False  # whether to return the cell of each entry


@dataclass(frozen=True, eq=False)
class PackedCells:
    """The result of a packer."""

    window_ptr: Tensor  # int32 [windows + 1]: first tile of each window
    columns: Tensor  # int32 [tiles * pad]: column of A behind each column of a tile
    words: Tensor  # int64 [tiles * height * pad / 64]: a bit for each cell
    word_ptr: Tensor  # int32 [words + 1]: first packed value of each word
    entries: Tensor  # int32 [nnz]: canonical entry of each packed value
    places: Tensor | None  # int64 [nnz]: cell of each canonical entry
    distinct: int  # (window, column) pairs


@dataclass(frozen=True, eq=False)
class SortedPairs:
    """Entries by window of rows and column."""

    keys: Tensor  # int32 or int64 [nnz]: ``window * columns + column``, ascending
    entry: Tensor  # int64 [nnz]: canonical entry of each key; those of equal keys in any order
    pair: Tensor  # int32 [nnz]: number of distinct keys up to and including each one


def packed_on_device(csr: CSR, order: Tensor | None, shape: CellShape) -> PackedCells | None:
    """Return A's tiles by kernels; the host waits once, for the number of tiles.

    None if A has no entry (it has fewer than 2^31) or its device is not supported.
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
            starts, place_of = offsets(csr.row_lengths()[order]), positions(order)
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
