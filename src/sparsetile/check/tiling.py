"""Statistics of a matrix's windows and tiles, for pictures and tables.

Large matrices are sampled: groups of consecutive rows, spread evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.formats.column_pairs import window_pairs
from sparsetile.intake.csr import CSR

__all__ = [
    "TILES", "WINDOWS", "Sample", "TileStats", "length_bins", "sample_rows", "sharing",
    "tile_stats",
]  # fmt: skip

# Tile of each format: (name, rows of a window, columns of a tile, condensed or not).
TILES: tuple[tuple[str, int, int, bool], ...] = (
    ("BMat 16×8", 16, 8, True),
    ("RS-Tile, BitTCF 8×8", 8, 8, True),
    ("WCSR 64×8", 64, 8, True),
    ("BCSR 64×64", 64, 64, False),
)
# Heights of the windows in which shared columns are counted; each divides the next.
WINDOWS = (4, 8, 16, 64)
# Rows per sampled group, a multiple of every window's height.
_BLOCK = max(WINDOWS)
# Entries of a sample at most.
_MAX_ENTRIES = 3_000_000
# Cells of the grid of fills, at most: windows down, tiles across.
_FILL_CELLS = (120, 160)


def length_bins(lengths: torch.Tensor) -> list[dict[str, int]]:
    """Return row counts by length: 0, 1, 2-3, 4-7, and so on, from the shortest row on."""
    longest = int(lengths.max()) if lengths.numel() else 0
    edges = [0, 1]
    while edges[-1] <= longest:
        edges.append(2 * edges[-1])
    counts = torch.bincount(
        torch.bucketize(lengths, torch.tensor(edges), right=True) - 1, minlength=len(edges) - 1
    )
    bins = [
        {"from": low, "to": high - 1, "rows": int(count)}
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    filled = [index for index, item in enumerate(bins) if item["rows"]]
    return bins[filled[0] :] if filled else []


@dataclass(frozen=True, eq=False)
class Sample:
    """Entries of groups of 64 rows, in the order of the rows: all groups, or evenly spread ones."""

    rows: NDArray[np.int64]  # position of each entry's row among the sampled ones
    cols: NDArray[np.int64]
    columns: int
    share: float  # of all entries

    @property
    def partial(self) -> bool:
        return self.share < 1.0


def sample_rows(csr: CSR, perm: torch.Tensor | None = None, most: int = _MAX_ENTRIES) -> Sample:
    """Take a matrix's entries under a row order; of a large one about ``most`` of them."""
    rows = csr.shape[0]
    order = np.arange(rows) if perm is None else perm.numpy()
    if csr.nnz > most:
        blocks = -(-rows // _BLOCK)
        wanted = max(1, min(blocks, int(blocks * most / csr.nnz)))
        first = (np.arange(wanted) * blocks // wanted) * _BLOCK
        places = (first[:, None] + np.arange(_BLOCK)).reshape(-1)
        order = order[places[places < rows]]
    part, _ = csr.with_values(None).select_rows(torch.from_numpy(order))
    share = part.nnz / csr.nnz if csr.nnz else 1.0
    return Sample(
        part.row_ids().numpy(), part.indices.numpy().astype(np.int64), csr.shape[1], share
    )


def sharing(sample: Sample) -> dict[int, float]:
    """Entries per distinct (window, column), by height of the window; 1 if nothing is shared."""
    rows, cols = torch.from_numpy(sample.rows), torch.from_numpy(sample.cols)
    return {
        window: cols.numel() / owner.numel() if owner.numel() else 0.0
        for window, owner in window_pairs(rows, cols, sample.columns, WINDOWS)
    }


@dataclass(frozen=True, eq=False)
class TileStats:
    """How a format tiles a matrix."""

    name: str  # of the format
    tiles: int  # of the whole matrix; estimated if only a sample was tiled
    mean_entries: float  # per tile
    fill: float  # share of tile cells with an entry
    # array [at most 120, at most 160], float64: windows from top to bottom, tiles from left to
    # right: mean fill of the tiles in a cell; NaN without a tile.
    fills: NDArray[np.float64]
    partial: bool  # whether only a sample was tiled


def tile_stats(sample: Sample, name: str, window: int, width: int, condensed: bool) -> TileStats:
    """Tile a matrix as a format would and say how full the tiles are."""
    if sample.cols.size == 0:
        return TileStats(name, 0, 0.0, 0.0, np.full((1, 1), np.nan), False)
    owner = sample.rows // window
    if condensed:
        distinct, place = np.unique(owner * sample.columns + sample.cols, return_inverse=True)
        slot = _slots(distinct // sample.columns)[place] // width
    else:
        across = sample.columns // width + 1
        distinct, place = np.unique(owner * across + sample.cols // width, return_inverse=True)
        slot = _slots(distinct // across)[place]
    span = int(slot.max()) + 1
    keys, counts = np.unique(owner * span + slot, return_counts=True)
    fill = counts / (window * width)
    return TileStats(
        name, round(keys.size / sample.share), float(counts.mean()), float(fill.mean()),
        _fill_grid(keys // span, keys % span, fill), sample.partial,
    )  # fmt: skip


def _slots(windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the members of each window from 0; ``windows`` is sorted."""
    first = np.searchsorted(windows, np.arange(windows[-1] + 1))
    return np.arange(windows.size) - first[windows]


def _fill_grid(
    windows: NDArray[np.int64], slots: NDArray[np.int64], fill: NDArray[np.float64]
) -> NDArray[np.float64]:
    down, across = int(windows.max()) + 1, int(slots.max()) + 1
    height, width = min(_FILL_CELLS[0], down), min(_FILL_CELLS[1], across)
    at = windows * height // down * width + slots * width // across
    total = np.bincount(at, weights=fill, minlength=height * width)
    number = np.bincount(at, minlength=height * width)
    mean = np.where(number > 0, total / np.maximum(number, 1), np.nan)
    return mean.reshape(height, width)
