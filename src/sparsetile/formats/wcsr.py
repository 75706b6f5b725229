"""WCSR: windows of rows whose distinct columns are condensed into tiles.

AsyncSparse, section II-C, for irregular sparsity. Within a window of ``height`` rows (in the plan's
order) columns without an entry are dropped; the others, ascending, are cut into tiles of ``pad``
columns. Names are the paper's, offsets are in tiles:

    window_row_ptr[w]           first tile of window w                      [windows + 1]
    window_col_idx[pad t + c]   column of A (row of B) behind tile column c [tiles * pad]

Slots past a window's last column repeat that column (the paper stores -1): a kernel that gathers
their rows of B reads what it has read already, and asks nothing. Windows without entries have no
tiles. The paper has windows of 64 rows and pads to 8.

A is packed in one of two ways, whichever has fewer bytes (``smaller``):

    dense     values [tiles, height, pad], zeros where there is no entry
    bitmap    bitmaps [tiles, height * pad / 64] of uint64, bit pad r + c of a tile: its row r has
              an entry in column c; values [nnz] in tile and bit order; tile_value_ptr[t]: the first
              of tile t, so that an entry's place is that plus the set bits below its own

A dense tile is contiguous and K-major (row-major), in the order of the bits: one copy of whole
16-byte pieces brings it, in the layout that WGMMA reads. Its zeros are not entries: bits decide
where B is not finite, so that the bitmap stays beside dense tiles too, read in that case only.

With 16 rows and a pad of 8 the bitmap form is BitTCF of ``stack`` 2, array by array.

Built with tensor operations on A's own device: condensed windows (formats/condense.py), then one
sort of places; no loop over windows and no atomics. On a GPU a few launches do the same
(formats/device_cells.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.formats.base import Format, Variants
from sparsetile.formats.cells import (
    WORD_BITS,
    checked_values,
    gather_values,
    pack_bits,
    scatter_cells,
    set_places,
)
from sparsetile.formats.condense import condense
from sparsetile.formats.device_cells import CellShape, packed_on_device
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR

__all__ = ["PADS", "VALUE_FORMS", "WCSR", "WINDOW_HEIGHTS"]

WINDOW_HEIGHTS = (16, 32, 64, 128)
PADS = (8, 16)
VALUE_FORMS = ("dense", "bitmap")
MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class WCSR(Format):
    """See the module's text for the arrays.

    Attributes
    ----------
    window_row_ptr, window_col_idx, tile_value_ptr : Tensor of int32
        Offsets of ``window_row_ptr`` are in tiles.
    bitmaps : Tensor of int64 [tiles, height * pad / 64]
        Bits of uint64: torch has no unsigned shifts.
    places : Tensor of int64 [nnz]
        Place of each canonical entry in the flattened dense tiles.
    entries : Tensor of int32 [nnz]
        Canonical entry number of each value of the bitmap form.
    distinct : int
        (window, column) pairs: slots that are not padding.
    order : Tensor of int32 [M] or None
        Row of A at each position; window w holds the positions from w * height on. None: the given
        order.
    shape : tuple of int
        (M, K) of A.
    height, pad : int
        Rows and columns of a tile.
    variant : str
        What ``pack_values`` makes, ``dense`` or ``bitmap``.
    """

    name = "wcsr"
    variants: ClassVar[Variants] = {
        "16x8 bitmap": {"height": 16, "variant": "bitmap"},
        "32x8 dense": {"height": 32},
        "64x16 bitmap": {"pad": 16, "variant": "bitmap"},
        "128x16 dense": {"height": 128, "pad": 16},
    }
    index_arrays = ("window_row_ptr", "window_col_idx")
    value_maps = ("places", "entries")

    window_row_ptr: Tensor
    window_col_idx: Tensor
    tile_value_ptr: Tensor
    bitmaps: Tensor
    places: Tensor
    entries: Tensor
    distinct: int
    order: Tensor | None
    shape: tuple[int, int]
    height: int
    pad: int
    variant: str = "dense"

    @classmethod
    def pack(
        cls,
        csr: CSR,
        order: Tensor | None = None,
        *,
        height: int = 64,
        pad: int = 8,
        variant: str = "dense",
    ) -> Self:
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
        variant : str
            What ``pack_values`` makes: ``dense`` tiles, or values in the order of the ``bitmap``.

        Raises
        ------
        ValueError
            An option is none of these, or A has too many entries.
        """
        _check(csr, height, pad, variant)
        device, words = csr.device, height * pad // WORD_BITS
        made = packed_on_device(csr, order, CellShape(height, pad, places=True))
        if made is not None:
            assert made.places is not None  # as asked for
            return cls(
                made.window_ptr,
                made.columns,
                made.word_ptr[::words].contiguous(),
                made.words.reshape(-1, words),
                made.places,
                made.entries,
                made.distinct,
                None if order is None else order.to(torch.int32),
                csr.shape,
                height,
                pad,
                variant,
            )
        found = condense(csr, order, height, pad)
        tiles = found.columns.numel() // pad
        places = torch.empty(csr.nnz, dtype=torch.int64, device=device)
        places[found.entry] = (found.slot // pad * height + found.row) * pad + found.slot % pad
        in_order, entries = torch.sort(places)
        bitmaps = pack_bits(in_order, tiles * height * pad)
        tile_starts = torch.arange(tiles + 1, device=device) * (height * pad)
        return cls(
            found.window_ptr.to(torch.int32),
            found.columns.to(torch.int32),
            torch.searchsorted(in_order, tile_starts).to(torch.int32),
            bitmaps.reshape(tiles, words),
            places,
            entries.to(torch.int32),
            found.distinct,
            None if order is None else order.to(torch.int32),
            csr.shape,
            height,
            pad,
            variant,
        )

    @property
    def window_count(self) -> int:
        return self.window_row_ptr.numel() - 1

    @property
    def tile_count(self) -> int:
        return self.window_col_idx.numel() // self.pad

    @property
    def cell_count(self) -> int:
        return self.tile_count * self.height * self.pad

    @property
    def entries_per_pair(self) -> float:
        """Entries per (window, column) pair, of ``height``: how often a row of B is used."""
        return self.entries.numel() / max(self.distinct, 1)

    @property
    def padding_share(self) -> float:
        """Share of the column slots that only repeat a column."""
        slots = self.window_col_idx.numel()
        return (slots - self.distinct) / max(slots, 1)

    @property
    def fill(self) -> float:
        """Entries per stored cell."""
        return self.entries.numel() / max(self.cell_count, 1)

    def packed_bytes(self, variant: str, dtype: torch.dtype) -> int:
        """Bytes of A's packed values, beside ``bytes``, which are offsets and column ids.

        dense: ``height * pad`` values a tile. bitmap: a value an entry, ``height * pad / 8`` bytes
        of bits a tile and 4 * (tiles + 1) of offsets.
        """
        one_of("packed_bytes", "variant", variant, VALUE_FORMS)
        if variant == "dense":
            return self.cell_count * dtype.itemsize
        offsets = self.tile_value_ptr.numel() * self.tile_value_ptr.element_size()
        return self.entries.numel() * dtype.itemsize + self.cell_count // 8 + offsets

    def smaller(self, dtype: torch.dtype) -> str:
        """Return the variant with fewer bytes; dense, which needs no decoding, where equal."""
        dense, bitmap = (self.packed_bytes(variant, dtype) for variant in VALUE_FORMS)
        return "bitmap" if bitmap < dense else "dense"

    def tiles_per_window(self) -> Tensor:
        """Tiles of each window, int32 [windows]."""
        return self.window_row_ptr[1:] - self.window_row_ptr[:-1]

    def units(self) -> Units:
        """Windows; a unit's list is its tiles."""
        return Units.from_offsets(self.window_row_ptr)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> [tiles, height, pad] (dense) or [nnz] in bit order (bitmap)."""
        values = checked_values(values, self.entries.numel(), dtype, self.entries.device)
        if self.variant == "bitmap":
            return gather_values(values, self.entries)
        packed = scatter_cells(values, self.places, self.cell_count)
        return packed.reshape(self.tile_count, self.height, self.pad)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every entry in tile and bit order.

        From column ids and bits alone. ``place`` is that in the flattened dense tiles, or the
        entry's number in bit order, by ``variant``.
        """
        place = set_places(self.bitmaps)
        tile = place // (self.height * self.pad)
        window = torch.repeat_interleave(
            torch.arange(self.window_count, device=place.device), self.tiles_per_window()
        )
        position = window[tile] * self.height + place // self.pad % self.height
        row = position if self.order is None else self.order.to(torch.int64)[position]
        column = self.window_col_idx[tile * self.pad + place % self.pad]
        if self.variant == "bitmap":
            place = torch.arange(place.numel(), device=place.device)
        return row, column.to(torch.int64), place


def _check(csr: CSR, height: int, pad: int, variant: str) -> None:
    one_of("WCSR.pack", "variant", variant, VALUE_FORMS)
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
