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
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import TiledWindows
from sparsetile.formats.cells import WORD_BITS
from sparsetile.formats.condense import condense
from sparsetile.formats.device_cells import CellShape
from sparsetile.intake.csr import CSR

__all__ = ["PADS", "WCSR", "WINDOW_HEIGHTS"]

WINDOW_HEIGHTS = (16, 32, 64, 128)
PADS = (8, 16)
MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class WCSR(TiledWindows):
    """See the module's docstring for the arrays."""

    index_arrays = ("window_row_ptr", "window_col_idx")

    # window_row_ptr, window_col_idx: int32.
    window_row_ptr: Tensor
    window_col_idx: Tensor
    # int64 [tiles, height * pad / 64]: bits of uint64: torch has no unsigned shifts.
    bitmaps: Tensor
    # int64 [nnz]: cell of each canonical entry: tiles one after the other, row-major.
    places: Tensor
    entries: Tensor  # int32 [nnz]: canonical entry number of each packed value
    distinct: int  # (window, column) pairs: slots that are not padding
    # int32 [M]: row of A at each position; window w has the positions from w * height on. None: the
    # given order.
    order: Tensor | None
    shape: tuple[int, int]  # (M, K) of A
    # height, pad: rows and columns of a tile.
    height: int
    pad: int

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, height: int = 64, pad: int = 8) -> Self:
        """CSR -> WCSR of windows of ``height`` rows (16, 32, 64 or 128), tiles of ``pad`` columns
        (8, 16).
        """
        _check(csr, height, pad)
        made = condense(csr, order, CellShape(height, pad, places=True))
        assert made.places is not None  # requested above
        return cls(
            made.window_ptr, made.columns, made.words.reshape(-1, height * pad // WORD_BITS),
            made.places, made.entries, made.distinct,
            None if order is None else order.to(torch.int32), csr.shape, height, pad,
        )  # fmt: skip

    @property
    def tile_count(self) -> int:
        return self.window_col_idx.numel() // self.pad

    @property
    def entries_per_pair(self) -> float:
        """Entries per (window, column) pair, at most ``height``: uses of each row of B."""
        return self.entries.numel() / max(self.distinct, 1)


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
