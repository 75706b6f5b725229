"""WCSR: windows of rows whose distinct columns are condensed into tiles, one bit per cell.

AsyncSparse, section II-C, for irregular sparsity. Within a window of ``height`` rows (in the plan's
order) columns without an entry are dropped; the others, ascending, are cut into tiles of ``pad``
columns. Names are the paper's, offsets are in tiles:

    window_row_ptr[w]           first tile of window w                      [windows + 1]
    window_col_idx[pad t + c]   column of A (row of B) behind tile column c [tiles * pad]
    bitmaps[t]                  bit pad r + c of uint64 words: row r has an entry in column c

Values are in tile and bit order, so an entry's place is the number of set bits before its own. The
paper stores dense tiles, whose zeros meet Inf and NaN of B.

Slots past a window's last column repeat that column (the paper stores -1): a kernel that gathers
their rows of B reads nothing new and needs no test. Windows without entries have no tiles. The
paper has windows of 64 rows and pads to 8. With 16 rows and a pad of 8 the arrays are those of
BitTCF of ``stack`` 2. Built by formats/condense.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import Format, Variants
from sparsetile.formats.cells import WORD_BITS, checked_values, gather_values, set_places
from sparsetile.formats.condense import condense
from sparsetile.formats.device_cells import CellShape
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR

__all__ = ["PADS", "WCSR", "WINDOW_HEIGHTS"]

WINDOW_HEIGHTS = (16, 32, 64, 128)
PADS = (8, 16)
MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class WCSR(Format):
    """See the module's docstring for the arrays.

    Attributes
    ----------
    window_row_ptr, window_col_idx : Tensor of int32
    bitmaps : Tensor of int64 [tiles, height * pad / 64]
        Bits of uint64: torch has no unsigned shifts.
    places : Tensor of int64 [nnz]
        Cell of each canonical entry: tiles one after the other, row-major.
    entries : Tensor of int32 [nnz]
        Canonical entry number of each packed value.
    distinct : int
        (window, column) pairs: slots that are not padding.
    order : Tensor of int32 [M] or None
        Row of A at each position; window w has the positions from w * height on. None: the given
        order.
    shape : tuple of int
        (M, K) of A.
    height, pad : int
        Rows and columns of a tile.
    """

    name = "wcsr"
    variants: ClassVar[Variants] = {
        "16x8": {"height": 16},
        "32x8": {"height": 32},
        "64x16": {"pad": 16},
        "128x16": {"height": 128, "pad": 16},
    }
    index_arrays = ("window_row_ptr", "window_col_idx")
    value_maps = ("places", "entries")

    window_row_ptr: Tensor
    window_col_idx: Tensor
    bitmaps: Tensor
    places: Tensor
    entries: Tensor
    distinct: int
    order: Tensor | None
    shape: tuple[int, int]
    height: int
    pad: int

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, height: int = 64, pad: int = 8) -> Self:
        """CSR -> WCSR.

        Parameters
        ----------
        csr : CSR
            Fewer than 2^31 entries.
        order : Tensor [M], optional
            Order of the rows; windows are cut from it. Row order when None.
        height : int
            Rows of a window: 16, 32, 64 or 128.
        pad : int
            Columns of a tile, 8 or 16; each window has a multiple of it.

        Raises
        ------
        ValueError
            An option is none of these, or A has too many entries.
        """
        _check(csr, height, pad)
        made = condense(csr, order, CellShape(height, pad, places=True))
        assert made.places is not None  # requested above
        return cls(
            made.window_ptr,
            made.columns,
            made.words.reshape(-1, height * pad // WORD_BITS),
            made.places,
            made.entries,
            made.distinct,
            None if order is None else order.to(torch.int32),
            csr.shape,
            height,
            pad,
        )

    @property
    def window_count(self) -> int:
        return self.window_row_ptr.numel() - 1

    @property
    def tile_count(self) -> int:
        return self.window_col_idx.numel() // self.pad

    @property
    def entries_per_pair(self) -> float:
        """Entries per (window, column) pair, at most ``height``: uses of each row of B."""
        return self.entries.numel() / max(self.distinct, 1)

    def tiles_per_window(self) -> Tensor:
        """Tiles of each window, int32 [windows]."""
        return self.window_row_ptr.diff()

    def units(self) -> Units:
        """Windows; a unit's list is its tiles."""
        return Units.from_offsets(self.window_row_ptr)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> packed values [nnz], in tile and bit order."""
        values = checked_values(values, self.entries.numel(), dtype, self.entries.device)
        return gather_values(values, self.entries)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every packed value in order, only from ids and bits."""
        cell = set_places(self.bitmaps)
        tile = cell // (self.height * self.pad)
        window = torch.repeat_interleave(
            torch.arange(self.window_count, device=cell.device), self.tiles_per_window()
        )
        position = window[tile] * self.height + cell // self.pad % self.height
        row = position if self.order is None else self.order.to(torch.int64)[position]
        column = self.window_col_idx[tile * self.pad + cell % self.pad]
        return row, column.to(torch.int64), torch.arange(cell.numel(), device=cell.device)


def _check(csr: CSR, height: int, pad: int) -> None:
    if height not in WINDOW_HEIGHTS:
        raise value_error(
            "WCSR.pack", "height", f"one of {WINDOW_HEIGHTS}", height,
            "Choose a height from that list",
        )  # fmt: skip
    if pad not in PADS:
        raise value_error("WCSR.pack", "pad", f"one of {PADS}", pad, "Choose a pad from that list")
    if csr.nnz > MAX_ENTRIES:
        raise value_error(
            "WCSR.pack", "csr", "a matrix of fewer than 2^31 entries", csr.nnz,
            "Cut A into parts by rows",
        )  # fmt: skip
