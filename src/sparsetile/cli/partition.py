"""``sparsetile partition``: write a matrix as files of rows, one per rank, for sparsetile.dist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.console import note, print_json, print_table, progress_bar
from sparsetile.cli.options import Data, Json, Matrix, Width
from sparsetile.core.errors import value_error

__all__ = ["partition"]


def partition(
    matrix: Matrix,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the parts.")],
    parts: Annotated[
        int, typer.Option("--parts", min=1, metavar="P", help="Parts; at least one per rank.")
    ] = 8,
    n: Width = 128,
    how: Annotated[
        str,
        typer.Option(
            "--partition",
            metavar="NAME",
            help="auto (equal predicted time), even, or a row order such as affinity.",
        ),
    ] = "auto",
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Split a matrix into files for `sparsetile.dist.plan`; a repeated command continues."""
    from sparsetile.data.catalog import find, load
    from sparsetile.dist.folder import write_folder

    if out.exists() and not out.is_dir():
        raise value_error(
            "partition", "--out", "a folder", f"the file {str(out)!r}", "Name another"
        )
    path = find(matrix, data)
    # A file is read part by part if its format allows it.
    source = load(matrix, data_dir=data) if path is None else path
    with progress_bar(f"writing {parts} parts", parts) as advance:
        folder = write_folder(source, parts, out, partition=how, n=n, advance=advance)
    rows = folder.partition.rows
    found = [
        {
            "part": part, "file": entry["name"], "rows": rows[part + 1] - rows[part],
            "entries": entry["nnz"], "sha256": entry["sha256"],
        }
        for part, entry in enumerate(folder.files)
    ]  # fmt: skip
    if as_json:
        print_json(
            {
                "matrix": matrix, "shape": list(folder.shape), "nnz": folder.nnz,
                "partition": folder.partition.name, "parts": found,
            }
        )  # fmt: skip
    else:
        columns = ["part", "file", "rows", "entries", "sha256"]
        cells = [[str(part[name])[:16] for name in columns] for part in found]
        print_table(columns, cells, right=["part", "rows", "entries"])
    note(f"sparsetile: {folder.nnz} entries in {parts} parts in {out}")
    return 0
