"""Pictures of a matrix: where its entries lie, and how full each format's tiles are.

Entries are counted into the cells of a grid before anything is drawn, so a matrix of millions of
rows shows its true density instead of overlapping dots. ``draw`` makes a figure with matplotlib,
which is imported there and belongs to the extra ``[report]``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.check.extras import report_package
from sparsetile.check.tiling import TILES, TileStats, sample_rows, tile_stats
from sparsetile.intake.csr import CSR

__all__ = ["density_grid", "draw"]

_GRID = 400  # cells along the longer side of the figure's density picture
_FLATTEST = 0.25  # a longer matrix is drawn as if this were its shape, so that it stays visible
_BLUE, _GRAY, _INK = "#2f6db3", "#c9d3de", "#26323d"
# Light to dark, and dark enough at the light end to be seen on white.
_RAMP = ("#a8d5e8", "#5fa8d3", "#2f6db3", "#27408b", "#1b1147")


def density_grid(csr: CSR, longest: int, *, flattest: float = 0.0) -> torch.Tensor:
    """Count the entries in each cell of a grid laid over the matrix, int64.

    The longer side has ``longest`` cells; the shorter side its share, and ``flattest`` of
    ``longest`` at least, so that it stays visible. A side never gets more cells than it has rows or
    columns.
    """
    rows, columns = csr.shape
    side = max(rows, columns, 1)

    def cells(size: int) -> int:
        share = max(round(longest * size / side), round(longest * flattest))
        return max(min(size, share), 1)

    down, across = cells(rows), cells(columns)
    band = torch.arange(rows) * down // max(rows, 1)  # of each row; spread over its entries below
    i = torch.repeat_interleave(band, csr.row_lengths(), output_size=csr.nnz)
    j = csr.indices.to(torch.int64) * across // max(columns, 1)
    return torch.bincount(i * across + j, minlength=down * across).reshape(down, across)


def _tile_shade(stats: TileStats) -> NDArray[np.float64]:
    """Fills as ink: 0 without a tile; a tile of one entry stays visible."""
    return np.where(np.isnan(stats.fills), 0.0, 0.12 + 0.88 * np.sqrt(np.nan_to_num(stats.fills)))


def _cell_sizes(size: int, cells: int) -> list[int]:
    """Rows (or columns) that ``density_grid`` counts into each cell."""
    edges = [-(-cell * size // cells) for cell in range(cells + 1)]
    return [high - low for low, high in pairwise(edges)]


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _draw_entries(figure: Any, axes: Any, csr: CSR) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import MaxNLocator, NullFormatter

    grid = density_grid(csr, _GRID, flattest=_FLATTEST).numpy()
    rows, columns = csr.shape
    # Entries per position of a cell: the same colour means the same density in every picture.
    area = np.outer(_cell_sizes(rows, grid.shape[0]), _cell_sizes(columns, grid.shape[1]))
    shown = np.ma.masked_equal(grid / np.maximum(area, 1), 0)
    # Whole decades from the thinnest to the fullest cell, one at least.
    high = math.ceil(math.log10(float(shown.max()))) if csr.nnz else 0
    low = min(math.floor(math.log10(float(shown.min()))) if csr.nnz else -1, high - 1)
    image = axes.imshow(
        shown, norm=LogNorm(vmin=10.0**low, vmax=10.0**high),
        cmap=LinearSegmentedColormap.from_list("density", _RAMP), interpolation="nearest",
        extent=(0, max(columns, 1), max(rows, 1), 0), aspect="auto",
    )  # fmt: skip
    axes.set_facecolor("white")
    shape = max(rows, 1) / max(columns, 1)
    axes.set_box_aspect(min(max(shape, _FLATTEST), 1 / _FLATTEST))
    axes.set_title("entries", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axis.set_major_formatter(lambda value, _: _short(value))
    for spine in axes.spines.values():
        spine.set_color(_GRAY)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=45, pad=0.02)
    bar.set_label("share of positions that hold an entry (log)", fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.ax.xaxis.set_minor_formatter(NullFormatter())


def _plain_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRAY)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)


def _draw_lengths(axes: Any, found: dict[str, Any]) -> None:
    bins = found["histogram"]
    labels = [str(item["from"]) for item in bins]
    counts = [item["rows"] for item in bins]
    axes.bar(range(len(bins)), counts, color=_BLUE, width=0.82)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, max([*counts, 1]) * 3)
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.grid(True, color=_GRAY, linewidth=0.5)
    crowded = sum(map(len, labels)) > 40
    axes.set_xticks(range(len(bins)), labels, rotation=45 if crowded else 0, fontsize=8.5)
    axes.set_xlabel("entries in a row: from this number to below the next")
    axes.set_ylabel("rows (log)")
    lengths = found["row_lengths"]
    spread = f"median {lengths['median']}, mean {lengths['mean']:.1f}, max {lengths['max']}"
    _plain_axes(axes, f"row lengths: {spread}")


def _draw_sharing(axes: Any, found: dict[str, Any]) -> None:
    windows = [item["window"] for item in found["windows"]]
    shares = [item["nnz_per_pair"] for item in found["windows"]]
    bars = axes.barh(range(len(windows)), shares, color=_BLUE, height=0.6)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=4, color=_INK, fontsize=9)
    axes.set_yticks(range(len(windows)), [f"{window} rows" for window in windows])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*shares, 1.0]) * 1.15)
    axes.axvline(1.0, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("entries per distinct (window, column); 1 = nothing shared")
    axes.xaxis.grid(True, color=_GRAY, linewidth=0.5)
    _plain_axes(axes, "sharing of columns inside a window")


def _draw_tiles(figure: Any, tiled: Sequence[TileStats]) -> None:
    """One panel a format: windows downwards, the tiles of each across, dark where they are full."""
    from matplotlib.colors import LinearSegmentedColormap

    ink = LinearSegmentedColormap.from_list("fill", ("white", _RAMP[1], _RAMP[-1]))
    for axes, stats in zip(figure.subplots(1, len(tiled)), tiled, strict=True):
        axes.imshow(
            _tile_shade(stats), cmap=ink, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color(_GRAY)
        axes.set_title(stats.name, loc="left", fontsize=10, color=_INK)
        text = f"{_short(stats.tiles)} tiles, {100 * stats.fill:.2g} % full"
        axes.set_xlabel(f"{text}, estimated" if stats.partial else text, fontsize=8.5)
    figure.supylabel("windows", fontsize=8.5, color=_INK)


def draw(csr: CSR, found: dict[str, Any], name: str, path: str | os.PathLike[str]) -> None:
    """Draw a matrix to a file: its entries, row lengths, shared columns and each format's tiles.

    ``found`` has its measures: ``density, histogram, row_lengths, windows``; ``name`` is for the
    heading.
    """
    agg = report_package("inspect", "matplotlib.backends.backend_agg")
    figure = report_package("inspect", "matplotlib.figure").Figure(
        figsize=(12, 8.2), dpi=150, layout="constrained", facecolor="white"
    )
    agg.FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    rows, columns = csr.shape
    above, below = figure.subfigures(2, 1, height_ratios=(6.2, 2))
    if columns > 2 * rows:  # a wide matrix takes the whole width, the charts go below it
        entries, charts = above.subfigures(2, 1, height_ratios=(1.15, 1))
        lengths, shared = charts.subplots(1, 2)
    else:
        entries, charts = above.subfigures(1, 2, width_ratios=(1.15, 1))
        lengths, shared = charts.subplots(2, 1, height_ratios=(1.5, 1))
    _draw_entries(entries, entries.subplots(), csr)
    _draw_lengths(lengths, found)
    _draw_sharing(shared, found)
    sample = sample_rows(csr)
    _draw_tiles(below, [tile_stats(sample, *shape) for shape in TILES])
    figure.suptitle(
        f"{name}: {rows:,} x {columns:,}, {csr.nnz:,} entries, density {found['density']:.2g}",
        x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.savefig(path)
