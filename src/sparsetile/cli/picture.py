"""A picture of a matrix: where its entries lie, how long its rows are, how windows share columns.

Entries are counted into the cells of a grid before anything is drawn, so a matrix of millions of
rows shows its true density instead of overlapping dots.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsetile.bench.report.pictures import density_grid
from sparsetile.core.errors import value_error
from sparsetile.intake.csr import CSR

__all__ = ["IMAGE_SUFFIXES", "check_image_path", "check_page_path", "draw"]

IMAGE_SUFFIXES = (".png", ".pdf", ".svg")
_GRID = 400  # cells along the longer side of the matrix
_FLATTEST = 0.25  # a longer matrix is drawn as if this were its shape, so that it stays visible
_BLUE, _GRAY, _INK = "#2f6db3", "#c9d3de", "#26323d"
# Light to dark, and dark enough at the light end to be seen on white.
_RAMP = ("#a8d5e8", "#5fa8d3", "#2f6db3", "#27408b", "#1b1147")


def check_image_path(function: str, path: Path) -> None:
    """Refuse a path that no picture can be written to, before any work is done."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise value_error(
            function, "--png", f"a file named {' or '.join(IMAGE_SUFFIXES)}", repr(str(path)),
            "Change its name",
        )  # fmt: skip
    _check_folder(function, "--png", path)


def check_page_path(function: str, path: Path) -> None:
    """Refuse a path that no page can be written to, before any work is done."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise value_error(
            function, "--html", "a file named .html", repr(str(path)), "Change its name"
        )
    _check_folder(function, "--html", path)


def _check_folder(function: str, option: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise value_error(
            function, option, "in a folder that exists", repr(str(path)), "Make the folder first"
        )


def _cell_sizes(size: int, cells: int) -> list[int]:
    """Rows (or columns) that ``density_grid`` counts into each cell."""
    edges = [-(-cell * size // cells) for cell in range(cells + 1)]
    return [high - low for low, high in pairwise(edges)]


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _spy(figure: Any, axes: Any, csr: CSR) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import NullFormatter

    grid = density_grid(csr, _GRID, flattest=_FLATTEST).numpy()
    rows, columns = csr.shape
    # Entries per position of a cell: the same colour means the same density in every picture.
    area = np.outer(_cell_sizes(rows, grid.shape[0]), _cell_sizes(columns, grid.shape[1]))
    shown = np.ma.masked_equal(grid / np.maximum(area, 1), 0)
    # Whole decades from the thinnest to the fullest cell, one at least.
    high = math.ceil(math.log10(float(shown.max()))) if csr.nnz else 0
    low = min(math.floor(math.log10(float(shown.min()))) if csr.nnz else -1, high - 1)
    image = axes.imshow(
        shown,
        norm=LogNorm(vmin=10.0**low, vmax=10.0**high),
        cmap=LinearSegmentedColormap.from_list("density", _RAMP),
        interpolation="nearest",
        extent=(0, max(columns, 1), max(rows, 1), 0),
        aspect="auto",
    )
    axes.set_facecolor("white")
    shape = max(rows, 1) / max(columns, 1)
    axes.set_box_aspect(min(max(shape, _FLATTEST), 1 / _FLATTEST))
    axes.set_title("entries", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    axes.xaxis.set_major_locator(_locator())
    axes.yaxis.set_major_locator(_locator())
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    for spine in axes.spines.values():
        spine.set_color(_GRAY)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=45, pad=0.02)
    bar.set_label("share of positions that hold an entry (log)", fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.ax.xaxis.set_minor_formatter(NullFormatter())


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, integer=True)


def _plain_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRAY)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)


def _row_lengths(axes: Any, found: dict[str, Any]) -> None:
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


def _sharing(axes: Any, found: dict[str, Any]) -> None:
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


def _halves(figure: Any, rows: int = 1, columns: int = 1) -> Any:
    """Split a figure in two, the first part a little larger."""
    return figure.subfigures(
        rows,
        columns,
        height_ratios=(1.15, 1) if rows == 2 else None,
        width_ratios=(1.15, 1) if columns == 2 else None,
    )


def draw(csr: CSR, found: dict[str, Any], name: str, path: str | os.PathLike[str]) -> None:
    """Draw a matrix to a file.

    Parameters
    ----------
    csr : CSR
    found : dict
        What :func:`sparsetile.cli.profile.profile` says of it.
    name : str
        For the heading.
    path : path-like
        ``.png``, ``.pdf`` or ``.svg``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    rows, columns = csr.shape
    if columns > 2 * rows:  # a wide matrix takes the whole width, the charts go below it
        spy, charts = _halves(figure, rows=2)
        lengths, sharing = charts.subplots(1, 2)
    else:
        spy, charts = _halves(figure, columns=2)
        lengths, sharing = charts.subplots(2, 1, height_ratios=(1.5, 1))
    _spy(spy, spy.subplots(), csr)
    _row_lengths(lengths, found)
    _sharing(sharing, found)
    figure.suptitle(
        f"{name}: {rows:,} x {columns:,}, {csr.nnz:,} entries, density {found['density']:.2g}",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    figure.savefig(path)
