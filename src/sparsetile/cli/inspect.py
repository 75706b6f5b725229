"""``sparsetile inspect``: what a matrix looks like, in a table and in a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsetile.cli.console import activity, note, print_json, print_table, print_text, printable
from sparsetile.cli.options import Data, Json, Matrix, check_output, load_matrix

__all__ = ["inspect"]

_BAR = 40
_IMAGES = (".png", ".pdf", ".svg")


def _print(name: str, found: dict[str, Any]) -> None:
    lengths, bandwidth = found["row_lengths"], found["bandwidth"]
    quantiles = ", ".join(f"{key} {value}" for key, value in lengths.items() if key != "mean")
    rows = [
        ["shape", f"{found['shape'][0]} x {found['shape'][1]}"], ["entries", str(found["nnz"])],
        ["density", f"{found['density']:.3g}"], ["values", found["values"]],
        ["empty rows", str(found["empty_rows"])], ["empty columns", str(found["empty_columns"])],
        ["row lengths", f"mean {lengths['mean']:.2f}, {quantiles}"],
        ["symmetric pattern", "yes" if found["symmetric_pattern"] else "no"],
        ["bandwidth", f"{bandwidth['lower']} below, {bandwidth['upper']} above the diagonal"],
    ]  # fmt: skip
    print_table((name, ""), rows)
    print_text("")
    print_table(
        ("window", "distinct pairs", "entries per pair"),
        [
            [f"{item['window']} rows", str(item["pairs"]), f"{item['nnz_per_pair']:.2f}"]
            for item in found["windows"]
        ],
        right=("distinct pairs", "entries per pair"),
    )
    if found["windows_share"] < 1:
        print_text(f"estimated from {100 * found['windows_share']:.0f} % of the entries")
    print_text("")
    most = max((item["rows"] for item in found["histogram"]), default=1) or 1
    print_table(
        ("row length", "rows", ""),
        [
            [
                str(item["from"])
                if item["from"] == item["to"]
                else f"{item['from']} to {item['to']}",
                str(item["rows"]),
                "#" * -(-_BAR * item["rows"] // most),
            ]
            for item in found["histogram"]
        ],
        right=("row length", "rows"),
    )


def _print_orders(views: Sequence[dict[str, Any]]) -> None:
    print_text("")
    windows = [f"{window} rows" for window in views[0]["nnz_per_pair"]]
    print_table(
        ("row order", *windows, "found in"),
        [
            [
                view["order"], *(f"{value:.2f}" for value in view["nnz_per_pair"].values()),
                f"{view['seconds']:.3f} s",
            ]
            for view in views
        ],
        right=(*windows, "found in"),
    )  # fmt: skip
    print_text("")
    names = [tile["format"] for tile in views[0]["tiles"]]
    print_table(
        ("nonzeros per tile", *names),
        [[v["order"], *(f"{tile['nnz_per_tile']:.2f}" for tile in v["tiles"])] for v in views],
        right=names,
    )


def inspect(
    matrix: Matrix,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw it (.png, .pdf or .svg).")
    ] = None,
    reorder: Annotated[
        list[str] | None,
        typer.Option("--reorder", metavar="NAMES", help="Row orders to compare, comma-separated."),
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Describe a matrix: rows, symmetry, bandwidth, shared columns; --png draws it."""
    # Here and not above: numba is slow to import.
    from sparsetile.check.extras import report_package
    from sparsetile.check.pictures import draw
    from sparsetile.cli.profile import compile_orders, profile, view_order
    from sparsetile.core.checks import one_of
    from sparsetile.reorder import REORDERERS

    check_output("inspect", "--png", png, _IMAGES)
    if png is not None:
        report_package("inspect", "matplotlib")  # refused before any work is done
    orders = [name for text in reorder or [] for name in text.split(",") if name]
    for order in orders:
        one_of("inspect", "--reorder", order, REORDERERS)
    if orders:
        compile_orders(orders)
    with activity(f"reading {matrix}"):
        csr = load_matrix(matrix, data)
    with activity(f"measuring {matrix}"):
        found = profile(csr)
    if not as_json:  # at once: an order may take seconds to compile
        _print(matrix, found)
    if png is not None:
        title = printable(Path(matrix).stem if Path(matrix).is_file() else matrix)
        with activity(f"drawing {png}"):
            partial = png.with_name(f"{os.getpid()}.partial.{png.name}")  # its ending says how
            try:
                draw(csr, found, title, partial)
                os.replace(partial, png)
            finally:
                partial.unlink(missing_ok=True)
        note(f"sparsetile: drew {png}")
    views = []
    for order in dict.fromkeys(["identity", *orders]) if orders else ():
        # The given order comes first: others are compared with it.
        with activity(f"finding the row order {order} of {matrix}"):
            views.append(view_order(csr, order))
    if as_json:
        more = {"orders": views} if views else {}
        print_json({"matrix": matrix, **found, **more})
    elif views:
        _print_orders(views)
    return 0
