"""RS-Tile: condensed 8x8 tiles of windows that begin at any row, and residual rows beside them.

RSH-SpMM, section 3.2. The tile part is BitTCF (formats/bittcf.py) of the rows in windows; a window
knows where it begins. Names are the paper's:

    row_window_id[w]      position of window w's first row in the plan's order    [windows]
    row_window_offset[w]  first tile of window w                                  [windows + 1]
    bitmap[t]             bit 8r + c: the tile's row r has an entry in column c   [tiles]
    col_id[8t + c]        column of A behind tile column c                        [8 tiles]
    value_offset[t]       first value of tile t in the packed values              [tiles + 1]

Residual rows have no row pointers: an entry's row and column lie side by side.

    residual_row_id[e], residual_col_id[e]     row and column of residual entry e, by rows

The last tile of a window is filled up with dummy columns: its last column again, with zero bits.
Rows without entries that no window covers are stored nowhere; whoever multiplies writes them.
``partition`` (formats/partition.py) says which rows are where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.checks import one_of
from sparsetile.formats.base import Format, Variants
from sparsetile.formats.bittcf import WINDOW_ROWS, BitTCF
from sparsetile.formats.cells import checked_values, gather_values
from sparsetile.formats.partition import (
    Partition,
    RowCosts,
    count_columns,
    split_by_cost,
    split_by_threshold,
)
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR

__all__ = ["RSTile"]

# Costs of float32 at N = 128, for callers without a machine's own (systems/rsh/cost.py has those).
_COSTS = RowCosts(tile=8 * 628.0, window=600.0, entry=85.0, new=360.0, row=100.0)
RULES = ("cost", "threshold")


@dataclass(frozen=True, eq=False)
class RSTile(Format):
    """See the module's text for the arrays.

    Attributes
    ----------
    tile_entries, residual_entries : Tensor of int64
        Canonical entry number of each value of the tile part and of the residual part.
    order : Tensor of int64 [M] or None
        Row of A at each position; None: the given order.
    partition : Partition
    """

    name = "rstile"
    variants: ClassVar[Variants] = {
        "cheapest split": {},
        "all tiles": {"rule": "threshold", "max_entries": 0},
        "thresholds": {"rule": "threshold", "max_entries": 6, "max_new": 3},
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
    tile_entries: Tensor
    residual_entries: Tensor
    order: Tensor | None
    partition: Partition
    shape: tuple[int, int]

    @classmethod
    def pack(
        cls,
        csr: CSR,
        order: Tensor | None = None,
        *,
        rule: str = "cost",
        max_entries: int = 4,
        max_new: int = 3,
        costs: RowCosts = _COSTS,
        height: int = 8,
    ) -> Self:
        """CSR -> RS-Tile.

        Parameters
        ----------
        csr : CSR
            Fewer than 2^31 entries.
        order : Tensor [M], optional
            Order of the rows; windows are cut from it. Row order when None.
        rule : {"cost", "threshold"}
            How rows are split.
        max_entries, max_new : int
            Thresholds of the second rule.
        costs : RowCosts
            Costs of the first.
        height : int
            Rows of a window: 8 as in the paper, or 16, two bitmaps a tile.
        """
        one_of("RSTile.pack", "rule", rule, RULES)
        counts = count_columns(csr, order, height)
        if rule == "cost":
            split = split_by_cost(counts, costs)
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
            split.windows.to(torch.int32),
            tiles.row_window_offset,
            tiles.tc_local_bit,
            tiles.sparse_a_to_b,
            tiles.tc_offset,
            residual[rest.row_ids()].to(torch.int32),
            rest.indices,
            entries[tiles.entries.to(torch.int64)],
            rest_entries,
            order,
            split,
            csr.shape,
        )

    @property
    def tiles(self) -> BitTCF:
        """The tile part: BitTCF of the rows in windows, entries as those of A."""
        return BitTCF(
            self.row_window_offset,
            self.value_offset,
            self.col_id,
            self.bitmap,
            self.tile_entries,
            None,
            (self.partition.tiled.numel(), self.shape[1]),
            self.partition.height // WINDOW_ROWS,
            self.partition.height > WINDOW_ROWS,
        )

    @property
    def tile_share(self) -> float:
        """Share of the entries that lie in tiles."""
        total = self.tile_entries.numel() + self.residual_entries.numel()
        return self.tile_entries.numel() / max(total, 1)

    @property
    def tile_rows(self) -> Tensor:
        """Rows of A inside windows, window after window, int64."""
        return self._rows_at(self.partition.tiled)

    @property
    def residual_rows(self) -> Tensor:
        """Rows of A outside windows, those without entries too, int64."""
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
