"""Pictures of a matrix: where its nonzeros lie, and how full each format's tiles are.

Entries are counted into the cells of a grid before anything is drawn, so a matrix of millions of
rows shows its true density instead of overlapping dots. A picture is an alpha mask (PNG) that the
page paints in its own ink, so it follows the theme.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.formats.pairs import window_pairs
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = [
    "FORMATS",
    "WINDOWS",
    "Sample",
    "TileStats",
    "density_grid",
    "length_bins",
    "png_mask",
    "sample_pairs",
    "sample_rows",
    "sharing",
    "spy",
    "take_rows",
    "tile_stats",
]

# Tile of each format: (name, rows of a window, columns of a tile, condensed or not).
FORMATS: tuple[tuple[str, int, int, bool], ...] = (
    ("BMat 16×8", 16, 8, True),
    ("RS-Tile, BitTCF 8×8", 8, 8, True),
    ("WCSR 64×8", 64, 8, True),
    ("BCSR 64×64", 64, 64, False),
)
# Heights of the windows in which shared columns are counted; each divides the next.
WINDOWS = (4, 8, 16, 64)
# Rows are sampled in blocks of this many, which holds a whole number of every window.
_BLOCK = max(WINDOWS)
# Entries looked at: blocks spread evenly over a larger matrix stand for the rest.
_MAX_ENTRIES = 3_000_000


def density_grid(
    csr: CSR, longest: int, *, flattest: float = 0.0, perm: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the entries in each cell of a grid laid over the matrix.

    Parameters
    ----------
    csr : CSR
    longest : int
        Cells along the longer side; the shorter side gets its share. A side never gets more cells
        than it has rows or columns.
    flattest : float
        The shorter side gets this share of ``longest`` at least, so that it stays visible.
    perm : Tensor [M], optional
        Row order: ``perm[i]`` is the row drawn at position i.

    Returns
    -------
    Tensor [grid rows, grid columns], int64
        Sums to nnz.
    """
    rows, columns = csr.shape
    side = max(rows, columns, 1)

    def cells(size: int) -> int:
        share = max(round(longest * size / side), round(longest * flattest))
        return max(min(size, share), 1)

    down, across = cells(rows), cells(columns)
    place = torch.arange(rows) if perm is None else positions(perm)
    band = place * down // max(rows, 1)  # of each row; spread over its entries below
    i = torch.repeat_interleave(band, csr.row_lengths(), output_size=csr.nnz)
    j = csr.indices.to(torch.int64) * across // max(columns, 1)
    return torch.bincount(i * across + j, minlength=down * across).reshape(down, across)


def length_bins(lengths: torch.Tensor) -> list[dict[str, int]]:
    """Return row counts by length: 0, 1, 2-3, 4-7, and so on; bins below the shortest row left out.

    Parameters
    ----------
    lengths : Tensor [M], int64
    """
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


def png_mask(shade: NDArray[np.float64]) -> str:
    """Return a data URI of a PNG whose opacity is ``shade`` (0 to 1)."""
    alpha = np.clip(shade * 255, 0, 255).astype(np.uint8)
    height, width = alpha.shape
    pixels = np.zeros((height, 1 + 2 * width), dtype=np.uint8)  # filter byte, then grey, alpha
    pixels[:, 2::2] = alpha

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels.tobytes(), 9))
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")).decode()
    return f"data:image/png;base64,{encoded}"


def _ink(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts to opacity: logarithmic, and a single entry stays visible."""
    top = counts.max() if counts.size else 0.0
    if top == 0:
        return counts
    shade = 0.25 + 0.75 * np.log1p(counts) / np.log1p(top)
    return np.where(counts > 0, shade, 0.0)


def spy(
    csr: CSR, size: int = 160, *, flattest: float = 0.0, perm: torch.Tensor | None = None
) -> str:
    """Return the mask of where the entries lie, at most ``size`` pixels a side."""
    if 0 in csr.shape:
        return png_mask(np.zeros((1, 1)))
    grid = density_grid(csr, size, flattest=flattest, perm=perm)
    return png_mask(_ink(grid.numpy().astype(np.float64)))


@dataclass(frozen=True, eq=False)
class Sample:
    """Entries of whole blocks of 64 rows, in the order of the rows: all, or evenly spread ones."""

    rows: NDArray[np.int64]  # position of each entry's row among the sampled ones
    cols: NDArray[np.int64]
    columns: int
    share: float  # of all entries

    @property
    def partial(self) -> bool:
        return self.share < 1.0


def take_rows(csr: CSR, order: NDArray[np.int64]) -> Sample:
    """Take the entries of the rows named in ``order``, in that order."""
    indptr = csr.indptr.numpy()
    lengths = np.diff(indptr)[order]
    total = int(lengths.sum())
    starts = indptr[order] - (np.cumsum(lengths) - lengths)
    entries = np.repeat(starts, lengths) + np.arange(total)
    return Sample(
        np.repeat(np.arange(order.size), lengths),
        csr.indices.numpy()[entries].astype(np.int64),
        csr.shape[1],
        total / csr.nnz if csr.nnz else 1.0,
    )


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
    return take_rows(csr, order)


def sample_pairs(
    sample: Sample, windows: Sequence[int] = WINDOWS
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each height of ``windows`` with the window of every distinct (window, column) pair."""
    rows, cols = torch.from_numpy(sample.rows), torch.from_numpy(sample.cols)
    for window, owner in window_pairs(rows, cols, sample.columns, windows):
        yield window, owner.numpy()


def sharing(sample: Sample) -> dict[int, float]:
    """Entries per distinct (window, column), by height of the window; 1 where nothing is shared."""
    return {
        window: sample.cols.size / owner.size if owner.size else 0.0
        for window, owner in sample_pairs(sample)
    }


@dataclass(frozen=True)
class TileStats:
    """How a format tiles a matrix."""

    name: str
    tiles: int  # of the whole matrix; estimated where only a sample was tiled
    mean_entries: float
    fill: float  # share of tile cells that hold an entry
    picture: str  # windows from top to bottom, tiles from left to right, ink = fill
    partial: bool


def tile_stats(sample: Sample, name: str, window: int, width: int, condensed: bool) -> TileStats:
    """Tile a matrix as a format would and say how full the tiles are."""
    if sample.cols.size == 0:
        return TileStats(name, 0, 0.0, 0.0, png_mask(np.zeros((1, 1))), False)
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
        name,
        round(keys.size / sample.share),
        float(counts.mean()),
        float(fill.mean()),
        _tile_picture(keys // span, keys % span, fill),
        sample.partial,
    )


def _slots(windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the members of each window from 0; ``windows`` is sorted."""
    first = np.searchsorted(windows, np.arange(windows[-1] + 1))
    return np.arange(windows.size) - first[windows]


def _tile_picture(
    windows: NDArray[np.int64], slots: NDArray[np.int64], fill: NDArray[np.float64]
) -> str:
    """Mean fill of the tiles that fall on a pixel; at most 120 by 160."""
    height = min(120, int(windows.max()) + 1)
    width = min(160, int(slots.max()) + 1)
    y = windows * height // (int(windows.max()) + 1)
    x = slots * width // (int(slots.max()) + 1)
    at = y * width + x
    total = np.bincount(at, weights=fill, minlength=height * width)
    number = np.bincount(at, minlength=height * width)
    mean = np.where(number > 0, total / np.maximum(number, 1), 0.0)
    shade = np.where(number > 0, 0.12 + 0.88 * np.sqrt(mean), 0.0)
    return png_mask(shade.reshape(height, width))
