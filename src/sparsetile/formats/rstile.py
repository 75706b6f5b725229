"""RS-Tile: condensed 8x8 tiles of windows that begin at any row, plus residual rows.

RSH-SpMM, section 3.2. The tile part is BitTCF (formats/bittcf.py) of the rows in windows, plus the
first row of each window. Names are the paper's:

    row_window_id[w]      position of window w's first row in the plan's order    [windows]
    row_window_offset[w]  first tile of window w                                  [windows + 1]
    bitmap[t]             bit 8r + c: the tile's row r has an entry in column c   [tiles]
    col_id[8t + c]        column of A behind tile column c                        [8 tiles]
    value_offset[t]       first value of tile t in the packed values              [tiles + 1]

Residual rows have no row pointers: each entry has its row and column.

    residual_row_id[e], residual_col_id[e]     row and column of residual entry e, by rows

The last tile of a window is filled with dummy columns: its last column again, with zero bits. Rows
without entries outside of windows are not stored; the multiplying code writes them. ``partition``
(formats/window_split.py) lists the rows of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.formats.base import Format, Variants
from sparsetile.formats.bittcf import WINDOW_ROWS, BitTCF
from sparsetile.formats.cells import checked_values, gather_values
from sparsetile.formats.units import Units
from sparsetile.formats.window_split import (
    Partition,
    RowCosts,
    count_columns,
    split_by_cost,
    split_by_threshold,
)
from sparsetile.intake.csr import CSR

__all__ = ["RSTile"]

# Costs of float32 at N = 128, for callers without a machine's own (engines/tiles/hybrid_cost.py).
_COSTS = RowCosts(tile=8 * 628.0, window=600.0, entry=85.0, new=360.0, row=100.0)


@dataclass(frozen=True, eq=False)
class RSTile(Format):
    """See the module's docstring for the arrays."""

    name = "rstile"
    variants: ClassVar[Variants] = {
        "cheapest split": {},
        "all tiles": {"max_entries": 0},
        "thresholds": {"max_entries": 6, "max_new": 3},
        "windows of sixteen rows": {"height": 16},
    }
    index_arrays = (
        "row_window_id", "row_window_offset", "bitmap", "col_id", "value_offset",
        "residual_row_id", "residual_col_id",
    )  # fmt: skip
    value_maps = ("tile_entries", "residual_entries")

    row_window_id: Tensor
    row_window_offset: Tensor
    bitmap: Tensor
    col_id: Tensor
    value_offset: Tensor
    residual_row_id: Tensor
    residual_col_id: Tensor
    # tile_entries, residual_entries: int64: canonical entry number of each value of the tile part
    # and of the residual part.
    tile_entries: Tensor
    residual_entries: Tensor
    order: Tensor | None  # int64 [M]: row of A at each position; None: the given order
    partition: Partition
    shape: tuple[int, int]

    @classmethod
    def pack(
        cls,
        csr: CSR,
        order: Tensor | None = None,
        *,
        max_entries: int | None = None,
        max_new: int = 3,
        height: int = 8,
    ) -> Self:
        """CSR of fewer than 2^31 entries -> RS-Tile of windows of ``height`` rows, 8 or 16.

        ``max_entries`` and ``max_new`` are the thresholds of the paper's rule; the split of least
        cost when the first is None.
        """
        counts = count_columns(csr, order, height)
        if max_entries is None:
            split = split_by_cost(counts, _COSTS)
        else:
            split = split_by_threshold(counts, max_entries, max_new)
        return cls.pack_split(csr, order, split)

    @classmethod
    def pack_split(cls, csr: CSR, order: Tensor | None, split: Partition) -> Self:
        """CSR -> RS-Tile of a given partition."""

        def rows_at(places: Tensor) -> Tensor:
            return places if order is None else order[places]

        tiled, entries = csr.select_rows(rows_at(split.tiled))
        stack = split.height // WINDOW_ROWS
        tiles = BitTCF.pack(tiled, stack=stack, even=stack == 2)
        residual = rows_at(split.residual)
        rest, rest_entries = csr.select_rows(residual)
        return cls(
            split.windows.to(torch.int32), tiles.row_window_offset, tiles.tc_local_bit,
            tiles.sparse_a_to_b, tiles.tc_offset, residual[rest.row_ids()].to(torch.int32),
            rest.indices, entries[tiles.entries.to(torch.int64)], rest_entries, order, split,
            csr.shape,
        )  # fmt: skip

    @property
    def tiles(self) -> BitTCF:
        """The tile part: BitTCF of the rows in windows, entries as those of A."""
        return BitTCF(
            self.row_window_offset, self.value_offset, self.col_id, self.bitmap, self.tile_entries,
            None, (self.partition.tiled.numel(), self.shape[1]),
            self.partition.height // WINDOW_ROWS, self.partition.height > WINDOW_ROWS,
        )  # fmt: skip

    @property
    def tile_share(self) -> float:
        """Share of the entries in tiles."""
        total = self.tile_entries.numel() + self.residual_entries.numel()
        return self.tile_entries.numel() / max(total, 1)

    @property
    def tile_rows(self) -> Tensor:
        """Rows of A inside windows, window after window, int64."""
        return self._rows_at(self.partition.tiled)

    @property
    def residual_rows(self) -> Tensor:
        """Rows of A outside windows, including those without entries, int64."""
        return self._rows_at(self.partition.residual)

    def _rows_at(self, places: Tensor) -> Tensor:
        return places if self.order is None else self.order[places]

    def units(self) -> Units:
        """Windows; a unit's list is its tiles. Residual rows are the CUDA cores' units."""
        return Units.from_offsets(self.row_window_offset)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> values of tiles in bit order, then those of residual rows."""
        entries = torch.cat([self.tile_entries, self.residual_entries])
        values = checked_values(values, entries.numel(), dtype, entries.device)
        return gather_values(values, entries)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every packed value in order."""
        local, column, _ = self.tiles.decode()
        window, inside = local // self.partition.height, local % self.partition.height
        row = self._rows_at(self.row_window_id.to(torch.int64)[window] + inside)
        row = torch.cat([row, self.residual_row_id.to(torch.int64)])
        column = torch.cat([column, self.residual_col_id.to(torch.int64)])
        return row, column, torch.arange(row.numel(), device=row.device)
