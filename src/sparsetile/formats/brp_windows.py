"""BRP's windows as ``spmm_brp`` reads them: those whose groups pay, with all their entries.

A window that keeps its groups owns its sixteen rows of C: it also has the entries outside its
groups, row by row, as one more partial sum. CUDA cores compute the rows of all other windows.

    rows                 rows of A in windows, sixteen each; the last window may have fewer
    other_rows           rows of A in no window, int64
    row_window_offset    first tile of each window                        [windows + 1]
    tile_columns         column of A behind each tile column              [8 tiles]
    slot_ids             8 * row + column in the tile, a byte an entry    [8 f tiles]
    window_rest          first of each window's entries outside groups    [windows + 1]
    rest_rows            their rows in the window, 0 to 15, a byte each, ascending
    rest_columns         their columns of A
    slot_entries, rest_entries   canonical entry numbers

On a GPU a kernel of ``systems/brp/windows.py`` writes the same arrays, without BRP's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.formats.brp import BRP, TILE_COLUMNS, WINDOW_ROWS
from sparsetile.formats.units import Units
from sparsetile.intake.csr import offsets
from sparsetile.reorder.permutation import positions

__all__ = ["BRPWindows"]


@dataclass(frozen=True, eq=False)
class BRPWindows:
    """See the module's docstring for the arrays."""

    rows: Tensor
    other_rows: Tensor
    row_window_offset: Tensor
    tile_columns: Tensor
    slot_ids: Tensor
    slot_entries: Tensor
    window_rest: Tensor
    rest_rows: Tensor
    rest_columns: Tensor
    rest_entries: Tensor

    @classmethod
    def of(cls, packed: BRP, kept: Tensor) -> Self:
        """Take the windows marked by ``kept`` (bool, one each)."""
        device, windows = kept.device, int(kept.sum())
        order = packed.order
        place = torch.arange(packed.shape[0], device=device)
        inside = kept.repeat_interleave(WINDOW_ROWS)[: packed.shape[0]]
        row_at = place if order is None else order.to(torch.int64)
        number = torch.cumsum(kept, 0) - 1  # of a kept window among those kept
        of_group = packed.group_window_id.to(torch.int64)
        mine = kept[of_group]
        groups = torch.bincount(number[of_group[mine]], minlength=windows)
        group_entries = packed.entries[: packed.local_id.numel()].reshape(-1, packed.group_entries)
        columns = packed.old_col_id.reshape(-1, TILE_COLUMNS * packed.group)
        # Residual rows come in the order of their positions.
        rest_place = packed.res_rows_id.to(torch.int64)
        if order is not None:
            rest_place = positions(order.to(torch.int64))[rest_place]
        rest_mine = inside[rest_place]
        lengths = (packed.res_row_offset[1:] - packed.res_row_offset[:-1]).to(torch.int64)
        entry_mine = torch.repeat_interleave(rest_mine, lengths)
        rest_at = torch.repeat_interleave(rest_place[rest_mine], lengths[rest_mine])
        return cls(
            row_at[inside].to(torch.int32), row_at[~inside],
            offsets(groups * packed.group, torch.int32), columns[mine].reshape(-1),
            packed.local_id.reshape(-1, packed.group_entries)[mine].reshape(-1),
            group_entries[mine].reshape(-1),
            offsets(torch.bincount(number[rest_at // WINDOW_ROWS], minlength=windows), torch.int32),
            (rest_at % WINDOW_ROWS).to(torch.uint8), packed.res_col_id[entry_mine],
            packed.entries[packed.local_id.numel() :][entry_mine],
        )  # fmt: skip

    @property
    def window_count(self) -> int:
        return self.row_window_offset.numel() - 1

    @property
    def tile_count(self) -> int:
        return self.tile_columns.numel() // TILE_COLUMNS

    def units(self) -> Units:
        """Windows; a unit's list is its tiles."""
        return Units.from_offsets(self.row_window_offset.to(torch.int64))

    def tensors(self) -> dict[str, Tensor]:
        """The kernel's arrays, by name."""
        return {
            "row_window_offset": self.row_window_offset,
            "tile_columns": self.tile_columns,
            "slot_ids": self.slot_ids,
            "slot_entries": self.slot_entries,
            "window_rest": self.window_rest,
            "rest_rows": self.rest_rows,
            "rest_columns": self.rest_columns,
            "rest_entries": self.rest_entries,
        }
