"""BitTCF: windows of eight rows as condensed 8x8 tiles, one 64-bit bitmap a tile.

Acc-SpMM, section 3.3. Within a window of eight rows (in the plan's order) columns without an
entry are dropped; the others, in ascending order, are numbered 0, 1, 2, ... and cut into tiles of
eight. Names are the paper's:

    RowWindowOffset[w]  first tile of window w                              [windows + 1]
    TCOffset[t]         first value of tile t in the packed values          [tiles + 1]
    SparseAToB[8t + c]  column of A (row of B) behind tile column c         [8 tiles]
    TCLocalBit[t]       bit 8r + c: the tile's row r has an entry in column c   [tiles]

Values lie in tile order and in bit order inside a tile, so that an entry's place is TCOffset plus
the number of set bits below its own.

``stack`` 2 is our own: windows of sixteen rows, whose tiles are two of eight rows that share their
columns. TCOffset and TCLocalBit then have two elements a tile, 2t and 2t + 1, all else is the same;
rows of B that both halves need are read once (docs/explanation/notes/acc.md says when that pays).
It is WCSR's smallest window too (formats/wcsr.py).

Slots past a window's last column repeat that column: a kernel that reads their rows of B reads what
it has read already, and their bits are zero. Windows without entries have no tiles. With ``even``
every window has an even number of tiles, for kernels that take two at a time: the last may be such
slots alone.

Built with tensor operations on A's own device: one sort of (window, column) keys, then gathers;
no loop over windows and no atomics. On a GPU a few launches do the same (formats/device_cells.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import Format, Variants
from sparsetile.formats.cells import checked_values, gather_values
from sparsetile.formats.device_cells import CellShape, packed_on_device
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = ["STACKS", "WINDOW_ROWS", "BitTCF"]

WINDOW_ROWS = 8
TILE_COLUMNS = 8
_SHIFT = 3  # log2 of both
STACKS = (1, 2)


@dataclass(frozen=True, eq=False)
class BitTCF(Format):
    """See the module's text for the four arrays.

    Attributes
    ----------
    row_window_offset, tc_offset, sparse_a_to_b : Tensor of int32
    tc_local_bit : Tensor of int64
        Bits of a uint64: torch has no unsigned shifts.
    entries : Tensor of int32 [nnz]
        Canonical entry number of each packed value.
    order : Tensor of int32 [M] or None
        Row of A at each position; window w holds the positions from 8 * stack * w on. None: the
        given order.
    shape : tuple of int
        (M, K) of A.
    stack : int
        Tiles of eight rows that share their columns, 1 or 2.
    even : bool
        Whether every window has an even number of tiles.
    """

    name = "bittcf"
    variants: ClassVar[Variants] = {
        "stack 1": {},
        "stack 2": {"stack": 2},
        "even": {"stack": 2, "even": True},
    }
    index_arrays = ("row_window_offset", "tc_offset", "sparse_a_to_b", "tc_local_bit")
    value_maps = ("entries",)

    row_window_offset: Tensor
    tc_offset: Tensor
    sparse_a_to_b: Tensor
    tc_local_bit: Tensor
    entries: Tensor
    order: Tensor | None
    shape: tuple[int, int]
    stack: int = 1
    even: bool = False

    @classmethod
    def pack(
        cls, csr: CSR, order: Tensor | None = None, *, stack: int = 1, even: bool = False
    ) -> Self:
        """CSR -> BitTCF.

        Parameters
        ----------
        csr : CSR
            Fewer than 2^31 entries.
        order : Tensor [M], optional
            Order of the rows; windows are cut from it. Row order when None.
        stack : int
            1: windows of eight rows. 2: of sixteen.
        even : bool
            Give windows with an odd number of tiles one more, without entries.

        Raises
        ------
        ValueError
            ``stack`` is neither.
        """
        if stack not in STACKS:
            raise value_error(
                "BitTCF.pack", "stack", f"one of {STACKS}", stack, "Choose one of these"
            )
        device, (rows, cols) = csr.device, csr.shape
        window_rows = WINDOW_ROWS * stack
        shape = CellShape(window_rows, TILE_COLUMNS, group=2 if even else 1)
        made = packed_on_device(csr, order, shape)
        if made is not None:
            return cls(
                made.window_ptr,
                made.word_ptr,
                made.columns,
                made.words,
                made.entries,
                None if order is None else order.to(torch.int32),
                csr.shape,
                stack,
                even,
            )
        windows = -(-rows // window_rows)
        place = csr.row_ids()
        if order is not None:
            place = positions(order)[place]
        # One sort brings equal (window, column) pairs together, pairs of a window into order, and
        # windows after each other. Which entry of a pair comes first does not matter: bits decide.
        keys, entry = torch.sort(place // window_rows * cols + csr.indices)
        is_first = torch.ones(csr.nnz, dtype=torch.bool, device=device)
        torch.ne(keys[1:], keys[:-1], out=is_first[1:])
        pair = torch.cumsum(is_first, 0) - 1  # of each sorted entry
        pair_entry = torch.nonzero(is_first).squeeze(1)  # first sorted entry of each pair
        pair_keys = keys[pair_entry]
        bounds = torch.arange(windows + 1, device=device) * cols
        window_pair = torch.searchsorted(pair_keys, bounds)  # first pair of each window
        pairs = window_pair[1:] - window_pair[:-1]
        tiles_of = (pairs + TILE_COLUMNS - 1) >> _SHIFT
        window_tile = _offsets(tiles_of + (tiles_of & 1) if even else tiles_of)
        tiles = int(window_tile[-1])
        tile_window = torch.repeat_interleave(
            torch.arange(windows, device=device),
            window_tile[1:] - window_tile[:-1],
            output_size=tiles,
        )
        # First pair of each tile, and the last pair of its window.
        tile_number = torch.arange(tiles, device=device) - window_tile[tile_window]
        tile_pair = window_pair[tile_window] + tile_number * TILE_COLUMNS
        last_pair = window_pair[tile_window + 1] - 1
        slot_pair = tile_pair.unsqueeze(1) + torch.arange(TILE_COLUMNS, device=device)
        slot_pair = torch.minimum(slot_pair, last_pair.unsqueeze(1))
        columns = pair_keys[slot_pair] - (tile_window * cols).unsqueeze(1)
        # A tile that only fills a window up begins where the next window does.
        first_pair = torch.cat([torch.minimum(tile_pair, last_pair + 1), window_pair[-1:]])
        first_entry = torch.cat([pair_entry, entry.new_full((1,), csr.nnz)])[first_pair]
        # Tile and bit of each sorted entry.
        window = keys // max(cols, 1)
        number = pair - window_pair[window]  # of the entry's column in its window
        tile = window_tile[window] + (number >> _SHIFT)
        row = place[entry] % window_rows
        bit = (row << _SHIFT) | (number & (TILE_COLUMNS - 1))
        bitmaps = _bitmaps(bit, first_entry, stack).reshape(-1)
        part = tile * stack + (row >> _SHIFT)  # of each sorted entry: which bitmap
        part_entry = first_entry  # first packed value of each bitmap
        if stack > 1:
            part_entry = _offsets(_popcount(bitmaps))
        below = bitmaps[part] & ~(torch.full_like(bit, -1) << (bit & 63))
        entries = torch.empty(csr.nnz, dtype=torch.int32, device=device)
        entries[part_entry[part] + _popcount(below)] = entry.to(torch.int32)
        return cls(
            window_tile.to(torch.int32),
            part_entry.to(torch.int32),
            columns.reshape(-1).to(torch.int32),
            bitmaps,
            entries,
            None if order is None else order.to(torch.int32),
            csr.shape,
            stack,
            even,
        )

    @property
    def window_count(self) -> int:
        return self.row_window_offset.numel() - 1

    @property
    def tile_count(self) -> int:
        return self.sparse_a_to_b.numel() // TILE_COLUMNS

    @property
    def mean_tile_entries(self) -> float:
        """Entries a tile holds on average, of 64 (of 128 where two are stacked)."""
        return self.entries.numel() / max(self.tile_count, 1)

    def tiles_per_window(self) -> Tensor:
        """Tiles of each window, int32 [windows]."""
        return self.row_window_offset[1:] - self.row_window_offset[:-1]

    def tiles_of_eight(self) -> int:
        """Tiles that windows of eight rows of the same order would have."""
        # Which of a tile's eight columns each eight rows use: the OR of a bitmap's bytes.
        used = self.tc_local_bit
        for shift in (32, 16, 8):
            used = used | (used >> shift)
        columns = _bits_of_bytes(used.device)[used & 0xFF].reshape(-1, self.stack)
        window = torch.repeat_interleave(
            torch.arange(self.window_count, device=used.device), self.tiles_per_window(),
            output_size=self.tile_count,
        )  # fmt: skip
        counts = columns.new_zeros((self.window_count, self.stack)).index_add_(0, window, columns)
        return int(((counts + TILE_COLUMNS - 1) >> _SHIFT).sum())

    def units(self) -> Units:
        """Windows; a unit's list is its tiles."""
        return Units.from_offsets(self.row_window_offset)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> packed values [nnz], in tile and bit order."""
        values = checked_values(values, self.entries.numel(), dtype, self.entries.device)
        return gather_values(values, self.entries)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every packed value in order, from bits alone."""
        device = self.tc_local_bit.device
        window = torch.repeat_interleave(
            torch.arange(self.window_count, device=device), self.tiles_per_window()
        )
        bits = torch.arange(WINDOW_ROWS * TILE_COLUMNS, device=device)
        held = (self.tc_local_bit.unsqueeze(1) >> bits) & 1
        part, bit = torch.nonzero(held, as_tuple=True)
        tile = part // self.stack
        row_in_window = part % self.stack * WINDOW_ROWS + (bit >> _SHIFT)
        position = window[tile] * WINDOW_ROWS * self.stack + row_in_window
        row = position if self.order is None else self.order.to(torch.int64)[position]
        column = self.sparse_a_to_b[tile * TILE_COLUMNS + (bit & (TILE_COLUMNS - 1))]
        return row, column.to(torch.int64), torch.arange(row.numel(), device=device)


def _popcount(words: Tensor) -> Tensor:
    """Set bits of each non-negative int64."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    words = words + (words >> 8)
    words = words + (words >> 16)
    return (words + (words >> 32)) & 0x7F


@functools.cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """How many bits each number from 0 to 255 has set."""
    return torch.tensor([number.bit_count() for number in range(256)], device=device)


def _offsets(counts: Tensor) -> Tensor:
    """Counts [n] -> where each begins, and the end of the last: [n + 1]."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def _bitmaps(bit: Tensor, first_entry: Tensor, stack: int) -> Tensor:
    """OR of 1 << bit over each tile's entries, 64 bits a word: [tiles, stack].

    Tile t holds entries first_entry[t] to [t + 1]. Each bit occurs once a tile, so that OR is a
    sum, and a sum is a difference of running sums. Halves of a word are summed apart: 2^31 terms
    below 2^32 do not overflow.
    """
    halves = []
    for half in range(2 * stack):
        place = bit - 32 * half
        inside = (place >= 0) & (place < 32)
        terms = torch.where(inside, torch.ones_like(bit) << place.clamp(0, 31), 0)
        running = _offsets(terms)
        halves.append(running[first_entry[1:]] - running[first_entry[:-1]])
    return torch.stack([halves[2 * s] | (halves[2 * s + 1] << 32) for s in range(stack)], 1)
