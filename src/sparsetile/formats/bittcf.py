"""BitTCF: windows of eight rows as condensed 8x8 tiles, one 64-bit bitmap per tile.

Acc-SpMM, section 3.3. Within a window of eight rows (in the plan's order) columns without an
entry are dropped; the others, in ascending order, are numbered 0, 1, 2, ... and cut into tiles of
eight. Names are the paper's:

    RowWindowOffset[w]  first tile of window w                              [windows + 1]
    TCOffset[t]         first value of tile t in the packed values          [tiles + 1]
    SparseAToB[8t + c]  column of A (row of B) behind tile column c         [8 tiles]
    TCLocalBit[t]       bit 8r + c: the tile's row r has an entry in column c   [tiles]

Values are in tile order and in bit order inside a tile, so an entry's place is TCOffset plus the
number of set bits below its own.

``stack`` 2 is our own: windows of sixteen rows, whose tiles are two of eight rows that share their
columns. TCOffset and TCLocalBit then have two elements per tile, 2t and 2t + 1; the rest is the
same. Rows of B that both halves need are read once (docs/explanation/notes/acc.md says when that
pays). It is also WCSR's smallest window (formats/wcsr.py).

Slots past a window's last column repeat that column with zero bits, so a kernel that loads their
rows of B reads nothing new. Windows without entries have no tiles. With ``even`` every window has
an even number of tiles, for kernels that take two at a time; the last may have only such slots.
Built by formats/condense.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import TiledWindows
from sparsetile.formats.condense import condense
from sparsetile.formats.device_cells import CellShape
from sparsetile.intake.csr import CSR, owners

__all__ = ["STACKS", "WINDOW_ROWS", "BitTCF"]

WINDOW_ROWS = 8
TILE_COLUMNS = 8
_SHIFT = 3  # log2 of both
STACKS = (1, 2)


@dataclass(frozen=True, eq=False)
class BitTCF(TiledWindows):
    """See the module's docstring for the four arrays."""

    index_arrays = ("row_window_offset", "tc_offset", "sparse_a_to_b", "tc_local_bit")

    # row_window_offset, tc_offset, sparse_a_to_b: int32.
    row_window_offset: Tensor
    tc_offset: Tensor
    sparse_a_to_b: Tensor
    tc_local_bit: Tensor  # int64: bits of a uint64: torch has no unsigned shifts
    entries: Tensor  # int32 [nnz]: canonical entry number of each packed value
    # int32 [M]: row of A at each position; window w has the positions from 8 * stack * w on. None:
    # the given order.
    order: Tensor | None
    shape: tuple[int, int]  # (M, K) of A
    stack: int = 1  # tiles of eight rows that share their columns, 1 or 2
    even: bool = False  # whether every window has an even number of tiles

    @classmethod
    def pack(
        cls, csr: CSR, order: Tensor | None = None, *, stack: int = 1, even: bool = False
    ) -> Self:
        """CSR of fewer than 2^31 entries -> BitTCF of windows of 8 · ``stack`` rows.

        ``even`` adds an empty tile to windows with an odd number of tiles.
        """
        if stack not in STACKS:
            raise value_error(
                "BitTCF.pack", "stack", f"one of {STACKS}", stack, "Choose one of these"
            )
        shape = CellShape(WINDOW_ROWS * stack, TILE_COLUMNS, group=2 if even else 1)
        made = condense(csr, order, shape)
        return cls(
            made.window_ptr, made.word_ptr, made.columns, made.words, made.entries,
            None if order is None else order.to(torch.int32), csr.shape, stack, even,
        )  # fmt: skip

    @property
    def tile_count(self) -> int:
        return self.sparse_a_to_b.numel() // TILE_COLUMNS

    @property
    def mean_tile_entries(self) -> float:
        """Mean entries per tile, of 64 (of 128 if two are stacked)."""
        return self.entries.numel() / max(self.tile_count, 1)

    def tiles_of_eight(self) -> int:
        """Tiles that windows of eight rows of the same order would have."""
        # Columns of a tile that each eight rows use: the OR of a bitmap's bytes.
        used = self.tc_local_bit
        for shift in (32, 16, 8):
            used = used | (used >> shift)
        columns = _bits_of_bytes(used.device)[used & 0xFF].reshape(-1, self.stack)
        window = owners(self.tiles_per_window(), self.tile_count)
        counts = columns.new_zeros((self.window_count, self.stack)).index_add_(0, window, columns)
        return int(((counts + TILE_COLUMNS - 1) >> _SHIFT).sum())


@functools.cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """Number of set bits of each number from 0 to 255."""
    return torch.tensor([number.bit_count() for number in range(256)], device=device)
