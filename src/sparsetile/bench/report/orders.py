"""How full windows and tiles are before and after each row order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsetile.check.pictures import spy_mask
from sparsetile.check.tiling import TILES, TileStats, sample_rows, sharing, tile_stats
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS

__all__ = ["OrderView", "view_orders"]

_PICTURE = 420  # pixels along the longer side


@dataclass(frozen=True)
class OrderView:
    """One row order of a matrix: what it costs, and what windows and tiles look like under it."""

    name: str
    seconds: float  # to find the order; includes compilation the first time on a machine
    share: float  # of the entries that were counted
    sharing: dict[int, float]  # entries per distinct (window, column), by height of the window
    tiles: tuple[TileStats, ...]
    spy: str

    def as_dict(self) -> dict[str, Any]:
        """Return the figures without the pictures."""
        return {
            "order": self.name,
            "seconds": self.seconds,
            "share": self.share,
            "nnz_per_pair": {str(window): value for window, value in self.sharing.items()},
            "tiles": [
                {
                    "format": tile.name,
                    "tiles": tile.tiles,
                    "nnz_per_tile": tile.mean_entries,
                    "fill": tile.fill,
                }
                for tile in self.tiles
            ],
        }


def view_orders(
    csr: CSR,
    names: Sequence[str],
) -> list[OrderView]:
    """Look at a matrix, on the CPU, under each of the row orders.

    Parameters
    ----------
    csr : CSR
    names : sequence of str
        Of ``sparsetile.reorder``; each is looked at once.
    """
    found = []
    for name in dict.fromkeys(names):
        begun = time.perf_counter()
        perm = REORDERERS[name](csr).perm
        seconds = time.perf_counter() - begun
        sample = sample_rows(csr, perm)
        found.append(
            OrderView(
                name,
                seconds,
                sample.share,
                sharing(sample),
                tuple(tile_stats(sample, *shape) for shape in TILES),
                spy_mask(csr, _PICTURE, flattest=0.2, perm=perm),
            )
        )
    return found
