"""BRP's windows as ``spmm_brp`` reads them: those whose groups pay, with all their entries.

A window that keeps its groups (formats/brp.py) owns its sixteen rows of C: what is left over there
follows row by row, as one more partial sum. CUDA cores compute the rows of all other windows from
A's own arrays. (The paper keeps every group, and lists all that is left over as residual rows.)

    rows                 rows of A in windows, sixteen each; the last window may have fewer
    other_rows           rows of A in no window, int64
    row_window_offset    first tile of each window                        [windows + 1]
    tile_columns         column of A behind each tile column              [8 tiles]
    slot_ids             8 * row + column in the tile, a byte an entry    [8 f tiles]
    window_rest          first of each window's entries outside groups    [windows + 1]
    rest_rows            their rows in the window, 0 to 15, a byte each, ascending
    rest_columns         their columns of A
    slot_entries, rest_entries   canonical entry numbers

Choices that the paper leaves open: ``tile_columns`` has one element for each tile column, not for
each entry; ``slot_ids`` has one byte for each entry (the paper's four hold no more information).

On a GPU a kernel of ``systems/brp/windows.py`` writes the same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.formats.brp import TILE_COLUMNS, WINDOW_ROWS, ColumnMajor
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR, offsets

__all__ = ["BRPWindows"]


@dataclass(frozen=True, eq=False)
class BRPWindows:
    """See the module's docstring for the arrays; int32 if nothing else is said."""

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
    def pack(
        cls,
        csr: CSR,
        order: Tensor | None,
        found: ColumnMajor,
        fixed: int,
        group: int,
        kept: Tensor,
    ) -> Self:
        """Pack the windows marked by ``kept`` (bool, one each).

        ``found`` is :func:`sort_windows` of the same matrix and order; ``fixed`` is 1 to 16.
        """
        device, rows = kept.device, csr.shape[0]
        inside = kept.repeat_interleave(WINDOW_ROWS)[:rows]
        row_at = torch.arange(rows, device=device) if order is None else order.to(torch.int64)
        groups, source = found.grouped(fixed, TILE_COLUMNS * group, kept)
        # The row is in a key's lowest bits: one byte is enough.
        local = found.keys[source].to(torch.uint8).bitwise_and_(WINDOW_ROWS - 1)
        local = local.mul_(TILE_COLUMNS).reshape(-1, TILE_COLUMNS, fixed)
        local = local.add_(torch.arange(TILE_COLUMNS, dtype=torch.uint8, device=device)[:, None])
        entry = found.entry[source]
        outside = kept.repeat_interleave(found.window_entry.diff(), output_size=csr.nnz)
        outside[source] = False
        place, columns, rest = found.by_row(torch.nonzero(outside).squeeze(1))
        number = torch.cumsum(kept, 0) - 1  # of a kept window among those kept
        rest_of = torch.bincount(number[place // WINDOW_ROWS], minlength=int(kept.sum()))
        return cls(
            row_at[inside].to(torch.int32), row_at[~inside],
            offsets(groups[kept] * group, torch.int32), csr.indices[entry[::fixed]],
            local.reshape(-1), entry.to(torch.int32), offsets(rest_of, torch.int32),
            (place % WINDOW_ROWS).to(torch.uint8), columns.to(torch.int32), rest.to(torch.int32),
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
