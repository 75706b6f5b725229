"""One matrix -> one self-contained HTML page: where its entries lie, rows, tiles, row orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsetile.bench.report.charts import microseconds
from sparsetile.bench.report.matrix_charts import length_histogram, order_bars
from sparsetile.bench.report.orders import OrderView
from sparsetile.bench.report.render import render
from sparsetile.bench.report.svg import Raw
from sparsetile.check.tiling import TILES, WINDOWS

__all__ = ["render_matrix_page"]


def render_matrix_page(name: str, found: Mapping[str, Any], views: Sequence[OrderView]) -> str:
    """Return the page as text.

    Parameters
    ----------
    name : str
        For the heading.
    found : dict
        Measures of the matrix: ``shape, nnz, density, values, empty_rows, empty_columns,
        row_lengths, histogram, symmetric_pattern, bandwidth``.
    views : sequence of OrderView
        The matrix under each row order; the first is what the others are compared with.
    """
    labels = [view.name for view in views]
    return render(
        "matrix.html",
        function="inspect",
        filters={"micro": microseconds},
        title=name,
        found=found,
        views=views,
        first=views[0],
        best=max(views, key=lambda view: view.sharing[8]),
        partial=any(view.share < 1 for view in views),
        windows=WINDOWS,
        lengths=Raw(length_histogram(found["histogram"])),
        shared=Raw(
            order_bars(
                [(f"{window} rows", [v.sharing[window] for v in views]) for window in WINDOWS],
                labels,
                "Nonzeros per distinct column of a window, by row order",
                "nonzeros per distinct (window, column)",
            )
        ),
        filled=Raw(
            order_bars(
                [
                    (shape[0].rpartition(" ")[2], [100 * v.tiles[place].fill for v in views])
                    for place, shape in enumerate(TILES)
                ],
                labels,
                "Share of tile cells that hold a nonzero, by row order",
                "tile cells that hold a nonzero, %",
            )
        ),
        formats=[shape[0] for shape in TILES],
    )
