"""RS-Tile: condensed 8x8 tiles of windows that begin at any row, and the rows beside them.

RSH-SpMM, section 3.2. The tile part is BitTCF (formats/bittcf.py) of the rows in windows, one
window after the other. The last tile of a window is filled with dummy columns: its last column
again, with zero bits. The paper lists row and column of each residual entry; our kernel reads
residual rows from A's own arrays, so only their numbers are listed, those of rows without entries
among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sparsetile.formats.bittcf import WINDOW_ROWS, BitTCF
from sparsetile.formats.window_split import Partition
from sparsetile.intake.csr import CSR

__all__ = ["RSTile"]


@dataclass(frozen=True, eq=False)
class RSTile:
    """A matrix in a split of its rows (formats/window_split.py)."""

    tiles: BitTCF  # of the rows in windows; entries are numbered as in A, int64
    # tile_rows, residual_rows: int64: rows of A inside windows, window after window, and outside.
    tile_rows: Tensor
    residual_rows: Tensor
    nnz: int

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None, split: Partition) -> Self:
        """CSR of fewer than 2^31 entries -> RS-Tile; rows in ``order``, the given one when None."""

        def rows_at(places: Tensor) -> Tensor:
            return places if order is None else order[places]

        tile_rows, stack = rows_at(split.tiled), split.height // WINDOW_ROWS
        tiled, entries = csr.select_rows(tile_rows)
        tiles = BitTCF.pack(tiled, stack=stack, even=stack == 2)
        tiles = replace(tiles, entries=entries[tiles.entries.to(torch.int64)])
        return cls(tiles, tile_rows, rows_at(split.residual), csr.nnz)

    @property
    def tile_share(self) -> float:
        """Share of the entries in tiles."""
        return self.tiles.entries.numel() / max(self.nnz, 1)
