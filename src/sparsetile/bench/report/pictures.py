"""Pictures of a matrix: where its nonzeros lie, and how full each format's tiles are.

A picture is an alpha mask (PNG) that the page paints in its own ink, so it follows the theme.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsetile.intake.csr import CSR

__all__ = ["FORMATS", "TileStats", "png_mask", "spy", "tile_stats"]

# Tile of each format: (name, rows of a window, columns of a tile, condensed or not).
FORMATS: tuple[tuple[str, int, int, bool], ...] = (
    ("BMat 16×8", 16, 8, True),
    ("RS-Tile, BitTCF 8×8", 8, 8, True),
    ("WCSR 64×8", 64, 8, True),
    ("BCSR 64×64", 64, 64, False),
)
# Entries looked at: whole windows from the start of a larger matrix stand for the rest.
_MAX_ENTRIES = 3_000_000


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


def spy(csr: CSR, size: int = 160) -> str:
    """Return the mask of where the entries lie, at most ``size`` pixels a side."""
    rows, cols = csr.shape
    if rows == 0 or cols == 0:
        return png_mask(np.zeros((1, 1)))
    scale = max(rows, cols) / size
    height = max(1, min(size, round(rows / scale), rows))
    width = max(1, min(size, round(cols / scale), cols))
    y = csr.row_ids().numpy() * height // rows
    x = csr.indices.numpy().astype(np.int64) * width // cols
    counts = np.bincount(y * width + x, minlength=height * width).astype(np.float64)
    return png_mask(_ink(counts.reshape(height, width)))


@dataclass(frozen=True)
class TileStats:
    """How a format tiles a matrix."""

    name: str
    tiles: int
    mean_entries: float
    fill: float  # share of tile cells that hold an entry
    picture: str  # windows from top to bottom, tiles from left to right, ink = fill
    partial: bool


def _head(csr: CSR, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Rows and columns of the first whole windows with at most _MAX_ENTRIES entries."""
    indptr = csr.indptr.numpy()
    rows = csr.shape[0]
    if csr.nnz > _MAX_ENTRIES:
        last = int(np.searchsorted(indptr, _MAX_ENTRIES, side="right")) - 1
        rows = max(window, last // window * window)
    end = int(indptr[min(rows, csr.shape[0])])
    lengths = np.diff(indptr[: min(rows, csr.shape[0]) + 1])
    return (
        np.repeat(np.arange(lengths.size), lengths),
        csr.indices.numpy()[:end].astype(np.int64),
        end,
    )


def tile_stats(csr: CSR, name: str, window: int, width: int, condensed: bool) -> TileStats:
    """Tile a matrix as a format would and say how full the tiles are."""
    rows, cols, end = _head(csr, window)
    if end == 0:
        return TileStats(name, 0, 0.0, 0.0, png_mask(np.zeros((1, 1))), False)
    owner = rows // window
    if condensed:
        distinct, place = np.unique(owner * csr.shape[1] + cols, return_inverse=True)
        window_of = distinct // csr.shape[1]
        first = np.searchsorted(window_of, np.arange(window_of[-1] + 1))
        slot = (np.arange(distinct.size) - first[window_of])[place] // width
    else:
        block = owner * (csr.shape[1] // width + 1) + cols // width
        distinct, place = np.unique(block, return_inverse=True)
        window_of = distinct // (csr.shape[1] // width + 1)
        first = np.searchsorted(window_of, np.arange(window_of[-1] + 1))
        slot = (np.arange(distinct.size) - first[window_of])[place]
    span = int(slot.max()) + 1
    keys, counts = np.unique(owner * span + slot, return_counts=True)
    fill = counts / (window * width)
    return TileStats(
        name,
        int(keys.size),
        float(counts.mean()),
        float(fill.mean()),
        _tile_picture(keys // span, keys % span, fill),
        end < csr.nnz,
    )


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
