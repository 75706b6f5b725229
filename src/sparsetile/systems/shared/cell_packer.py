"""Launches of ``pack_cells``: condensed tiles of a matrix on a GPU (formats/device_cells.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.formats.device_cells import (
    CellKernels,
    CellShape,
    PackedCells,
    SortedPairs,
)
from sparsetile.intake.csr import CSR
from sparsetile.kernels.cells import PACK_CELLS, Stage
from sparsetile.reorder.permutation import positions
from sparsetile.systems.shared.staged import StagedKernel, building_on

__all__ = ["CELL_KERNELS", "pack_cells", "sort_pairs"]

# Keys below this are sorted as 32-bit numbers, which takes half as long.
NARROW_KEYS = 2**31


def pack_cells(csr: CSR, order: Tensor | None, shape: CellShape) -> PackedCells:
    """Pack a matrix that has entries; the host waits once, for the number of tiles.

    Parameters
    ----------
    csr : CSR
        Fewer than 2^31 entries.
    order : Tensor [M] or None
        Order of the rows; windows are cut from it.
    shape : CellShape
    """
    with building_on(csr.device) as index:
        return _Packing(csr, order, shape, index).run()


def sort_pairs(csr: CSR, order: Tensor | None, height: int) -> SortedPairs:
    """Sort the entries of windows of ``height`` rows by column; the host does not wait."""
    with building_on(csr.device) as index:
        return _Packing(csr, order, CellShape(height, 1), index).sort()


CELL_KERNELS = CellKernels(pack_cells, sort_pairs)


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
