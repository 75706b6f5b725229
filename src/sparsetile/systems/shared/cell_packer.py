"""Launches of ``pack_cells``: condensed tiles of a matrix on a GPU (formats/device_cells.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.formats.device_cells import (
    CellKernels,
    CellShape,
    PackedCells,
    SortedPairs,
)
from sparsetile.intake.csr import CSR
from sparsetile.jit.loader import current_stream_handle, on_device
from sparsetile.kernels.cells import CELL_THREADS, PACK_CELLS, Stage, cells_config, cells_grid
from sparsetile.reorder.permutation import positions
from sparsetile.systems.shared.cuda_context import device_index, ensure_cuda_context

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
    index = device_index(csr.device)
    ensure_cuda_context(index)
    with on_device(index):
        return _Packing(csr, order, shape, index).run()


def sort_pairs(csr: CSR, order: Tensor | None, height: int) -> SortedPairs:
    """Sort the entries of windows of ``height`` rows by column; the host does not wait."""
    index = device_index(csr.device)
    ensure_cuda_context(index)
    with on_device(index):
        return _Packing(csr, order, CellShape(height, 1), index).sort()


CELL_KERNELS = CellKernels(pack_cells, sort_pairs)


class _Packing:
    """One matrix: what its launches share."""

    def __init__(self, csr: CSR, order: Tensor | None, shape: CellShape, index: int) -> None:
        self._shape, self._device = shape, csr.device
        self._kernel = PACK_CELLS.load(cells_config(), index)
        self._stream = current_stream_handle(index)
        self._processors = processors(csr.device)
        rows, cols = csr.shape
        self._nnz, self._windows = csr.nnz, -(-rows // shape.height)
        self._wide = self._windows * cols >= NARROW_KEYS
        starts, place_of = csr.indptr, None
        if order is not None:
            order = order.to(torch.int64)
            starts, place_of = torch.zeros_like(starts), positions(order)
            torch.cumsum(csr.row_lengths()[order], 0, out=starts[1:])
        # Held while kernels that were given their addresses may run.
        self._held: dict[str, Tensor] = {}
        self._params: dict[str, int] = {
            **dict.fromkeys((field.name for field in PACK_CELLS.params.fields), 0),
            "count": csr.nnz,
            "wide": self._wide,
            "rows": rows,
            "cols": cols,
            "height": shape.height,
            "pad": shape.pad,
            "group": shape.group,
            "fragments": shape.fragments,
            "repeat": shape.repeat,
        }
        self._give("indptr", csr.indptr.contiguous())
        self._give("columns", csr.indices.contiguous())
        self._give("starts", starts.contiguous())
        if place_of is not None:
            self._give("positions", place_of)

    def _give(self, name: str, tensor: Tensor) -> Tensor:
        """Name a tensor to the kernel."""
        self._held[name] = tensor
        self._params[name] = tensor.data_ptr()
        return tensor

    def _new(self, name: str, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self._give(name, torch.empty(size, dtype=dtype, device=self._device))

    def _launch(self, stage: Stage, work: int) -> None:
        self._params["stage"], self._params["work"] = stage, work
        grid = cells_grid(work, self._processors)
        self._kernel.launch(grid, CELL_THREADS, self._stream, self._params)

    def _sums(self, name: str) -> Tensor:
        """Replace counts by their running sums."""
        return self._give(name, torch.cumsum(self._held[name], 0, dtype=torch.int32))

    def sort(self) -> SortedPairs:
        """Sort keys, and count distinct ones."""
        name, nnz = "wide_keys" if self._wide else "keys", self._nnz
        self._new("place", nnz)
        keys = self._new(name, nnz, torch.int64 if self._wide else torch.int32)
        self._launch(Stage.KEYS, nnz)
        keys, entry = torch.sort(keys)
        self._give(name, keys)
        self._give("entry", entry)
        self._new("pair", nnz)
        self._launch(Stage.HEADS, nnz)
        return SortedPairs(keys, entry, self._sums("pair"))

    def run(self) -> PackedCells:
        """Pack tiles."""
        shape, nnz = self._shape, self._nnz
        pair = self.sort().pair
        self._new("window_ptr", self._windows + 1)
        self._launch(Stage.TILES, self._windows)
        window_ptr = self._sums("window_ptr")
        tiles, distinct = torch.cat([window_ptr[-1:], pair[-1:]]).tolist()
        words = tiles * shape.height * shape.pad // 64
        columns = self._new("tile_columns", tiles * shape.pad)
        bits = self._give("words", torch.zeros(words, dtype=torch.int64, device=self._device))
        self._new("cells", nnz, torch.int64)
        self._launch(Stage.BITS, nnz)
        self._new("word_ptr", words + 1)
        self._launch(Stage.COUNTS, words)
        word_ptr = self._sums("word_ptr")
        entries = self._new("entries", nnz)
        places = self._new("places", nnz, torch.int64) if shape.places else None
        self._launch(Stage.ENTRIES, nnz)
        return PackedCells(window_ptr, columns, bits, word_ptr, entries, places, int(distinct))
