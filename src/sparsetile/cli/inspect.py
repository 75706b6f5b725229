"""``sparsetile inspect``: what a matrix looks like, in a table and in a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsetile.cli.console import activity, note, print_json, print_table, print_text
from sparsetile.cli.options import Data, Json, Matrix, load_matrix
from sparsetile.cli.picture import check_image_path, draw
from sparsetile.cli.profile import profile

__all__ = ["inspect"]

_BAR = 40


def _print(name: str, found: dict[str, Any]) -> None:
    lengths, bandwidth = found["row_lengths"], found["bandwidth"]
    quantiles = ", ".join(f"{key} {value}" for key, value in lengths.items() if key != "mean")
    rows = [
        ["shape", f"{found['shape'][0]} x {found['shape'][1]}"],
        ["entries", str(found["nnz"])],
        ["density", f"{found['density']:.3g}"],
        ["values", found["values"]],
        ["empty rows", str(found["empty_rows"])],
        ["empty columns", str(found["empty_columns"])],
        ["row lengths", f"mean {lengths['mean']:.2f}, {quantiles}"],
        ["symmetric pattern", "yes" if found["symmetric_pattern"] else "no"],
        ["bandwidth", f"{bandwidth['lower']} below, {bandwidth['upper']} above the diagonal"],
    ]
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


def inspect(
    matrix: Matrix,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw it (.png, .pdf or .svg).")
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Describe a matrix: rows, symmetry, bandwidth, sharing of columns; --png draws it."""
    if png is not None:
        check_image_path("inspect", png)
    with activity(f"reading {matrix}"):
        csr = load_matrix(matrix, data)
    with activity(f"measuring {matrix}"):
        found = profile(csr)
    if as_json:
        print_json({"matrix": matrix, **found})
    else:
        _print(matrix, found)
    if png is not None:
        with activity(f"drawing {png}"):
            draw(csr, found, Path(matrix).stem if Path(matrix).is_file() else matrix, png)
        note(f"sparsetile: drew {png}")
    return 0
