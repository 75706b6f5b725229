"""BMat: windows of sixteen rows as condensed 16x8 tiles, 128 bits a tile in MMA register order.

Voltrix-SpMM, section 3.1.1. Within a window of sixteen rows (in the plan's order) columns without
an entry are dropped; the others, ascending, are cut into tiles of eight:

    window_tile_ptr[w]   first tile of window w                               [windows + 1]
    window_value_ptr[w]  first packed value of window w                       [windows + 1]
    columns[8t + c]      column of A (row of B) behind tile column c, or -1   [8 tiles]
    bitmaps[t, i]        word i of tile t, 32 bits                            [tiles, 4]

A word is one operand register of ``mma.m16n8k8``, a bit is a lane: bit 4g + t of word i is the
element that lane 4g + t holds in register i, which is row g + 8 (i % 2) and column t + 4 (i // 2).
So one 16-byte load brings a tile, and a lane finds its four elements at its own bit. m16n8k16
(16-bit types) takes two tiles. Any mapping of k to columns is valid: k = 2t, 2t + 1 are columns
t, t + 4 of the first tile and k = 2t + 8, 2t + 9 those of the second. The format is then the same
for every type, and windows have an even number of tiles.

Values are in tile order, word by word and bit by bit, so the number of set bits before an element
gives its value's place. No offsets of tiles are stored: a kernel counts on from its window's first
value. A pattern has no values.

Windows may have ``stack`` times sixteen rows. A tile then has ``stack`` parts of sixteen rows that
share its eight columns: ``bitmaps[stack * t + s]`` are the words of part s, and values go part by
part. A row of B is then read once for all parts.

Slots past a window's last column are -1 (no row of B is read for them) and have no bits. Windows
without entries have no tiles. Built by formats/condense.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import TiledWindows
from sparsetile.formats.cells import WORD_BITS, set_places
from sparsetile.formats.condense import condense
from sparsetile.formats.device_cells import CellShape
from sparsetile.intake.csr import CSR

__all__ = ["CELLS", "TILE_COLUMNS", "WINDOW_ROWS", "BMat", "fragment_cells"]

WINDOW_ROWS, TILE_COLUMNS = 16, 8
CELLS = WINDOW_ROWS * TILE_COLUMNS
WORDS = CELLS // 32
MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class BMat(TiledWindows):
    """See the module's docstring for the arrays."""

    index_arrays = ("window_tile_ptr", "window_value_ptr", "columns", "bitmaps")

    # window_tile_ptr, window_value_ptr, columns: int32.
    window_tile_ptr: Tensor
    window_value_ptr: Tensor
    columns: Tensor
    bitmaps: Tensor  # int32 [tiles, 4]: bits of uint32: torch has no unsigned shifts
    entries: Tensor  # int32 [nnz]: canonical entry number of each packed value
    # int32 [M]: row of A at each position; window w has the positions from 16 w on. None: the given
    # order.
    order: Tensor | None
    shape: tuple[int, int]  # (M, K) of A
    stack: int = 1  # parts of sixteen rows per window

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, stack: int = 1) -> Self:
        """CSR of fewer than 2^31 entries -> BMat of windows of 16 · ``stack`` rows."""
        if csr.nnz > MAX_ENTRIES:
            raise value_error(
                "BMat.pack", "csr", "a matrix of fewer than 2^31 entries", csr.nnz,
                "Cut A into parts by rows",
            )  # fmt: skip
        shape = CellShape(stack * WINDOW_ROWS, TILE_COLUMNS, group=2, fragments=True, repeat=False)
        made = condense(csr, order, shape)
        packed = cls(
            made.window_ptr,
            made.word_ptr[made.window_ptr.to(torch.int64) * (stack * CELLS // WORD_BITS)],
            made.columns,
            # Little-endian words of 64 bits are pairs of words of 32.
            made.words.view(torch.int32).reshape(-1, WORDS),
            made.entries,
            None if order is None else order.to(torch.int32),
            csr.shape,
            stack,
        )
        # Known already, so never counted again.
        packed.__dict__.update(word_ptr=made.word_ptr, distinct=made.distinct)
        return packed

    @property
    def tile_count(self) -> int:
        return self.columns.numel() // TILE_COLUMNS

    @cached_property
    def word_ptr(self) -> Tensor:
        """First packed value of each 64 bits of the bitmaps, int32 [words + 1]."""
        cells = set_places(self.bitmaps.view(torch.int64))
        starts = torch.arange(self.bitmaps.numel() // 2 + 1, device=cells.device) * WORD_BITS
        return torch.searchsorted(cells, starts).to(torch.int32)

    @cached_property
    def distinct(self) -> int:
        """(window, column) pairs: rows of B that a product reads."""
        return int((self.columns >= 0).sum())

    @property
    def entries_per_pair(self) -> float:
        """Uses of each row of B that is read."""
        return self.entries.numel() / max(self.distinct, 1)

    def first_values(self, tile: Tensor) -> Tensor:
        """Return the number of the first packed value of each of these tiles, int64."""
        word = tile.to(torch.int64) * (self.stack * CELLS // WORD_BITS)
        return self.word_ptr[word].to(torch.int64)


def fragment_cells(bitmaps: Tensor, itemsize: int, stack: int = 1) -> Tensor:
    """Return the place of each packed value of even tiles among dense operands, int64 [nnz].

    Dense operands take 128 cells per tile and part, zeros included: 16 bytes per lane, its four
    registers. In 16 bits two tiles share 512 bytes; parts of a pair of tiles follow each other.
    """
    cell = set_places(bitmaps.reshape(-1).view(torch.int64))
    part, word, lane = cell // CELLS, cell // 32 % WORDS, cell % 32
    if itemsize == 4:
        return part * CELLS + lane * 4 + word
    tile, part = part // stack, part % stack
    register = word % 2 + tile % 2 * 2
    return (tile // 2 * stack + part) * (2 * CELLS) + lane * 8 + register * 2 + word // 2
