"""``sparsetile tiles``: how full BitTCF's tiles are, and what formats take, by row order."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsetile.cli.console import note, print_json, print_table, print_text
from sparsetile.cli.options import Data, Json, Matrices, check_output, write_output

__all__ = ["tiles"]

_ORDERS = "identity,rcm,rabbit,louvain,lsh,affinity"
_LOG = logging.getLogger("sparsetile")


def _print(records: Sequence[dict[str, Any]]) -> None:
    from sparsetile.bench.tiles import STORAGES, WINDOWS, saved_percent

    counted = [record for record in records if record["status"] == "ok"]
    windows = [f"{window}-row pairs" for window in WINDOWS]
    numbers = ("found in", "8x8 tiles", "nonzeros a tile", *windows)
    print_table(
        ("matrix", "order", *numbers),
        [
            [
                record["matrix"],
                record["order"],
                f"{record['seconds']:.3f} s",
                str(record["tiles"]["8x8"]),
                f"{record['nnz_per_tile']:.2f}",
                *(str(record["pairs"][str(window)]) for window in WINDOWS),
            ]
            for record in counted
        ],
        right=numbers,
    )
    print_text("")
    print_table(
        ("bytes", "order", *STORAGES),
        [
            [
                record["matrix"],
                record["order"],
                str(record["bytes"]["BitTCF"]),
                *(
                    f"{record['bytes'][name]} ({saved_percent(record, name):+.1f} %)"
                    for name in STORAGES
                    if name != "BitTCF"
                ),
            ]
            for record in counted
        ],
        right=tuple(STORAGES),
    )
    print_text("in brackets: how much less BitTCF takes")


def _command(
    matrices: Sequence[str],
    orders: Sequence[str],
    data: Path | None,
    out: Path | None,
    markdown: Path,
) -> str:
    """The command as the page shows it: without folders of this machine; --data is DIR."""
    names = [Path(name).name if Path(name).is_absolute() else name for name in matrices]
    words = ["sparsetile", "tiles", *names, "--orders", ",".join(orders)]
    if data is not None:
        words += ["--data", "DIR"]
    for option, path in (("--out", out), ("--markdown", markdown)):
        if path is not None:
            words += [option, path.name if path.is_absolute() else path.as_posix()]
    return shlex.join(words)


def tiles(
    matrices: Matrices,
    data: Data = None,
    orders: Annotated[
        str, typer.Option("--orders", metavar="NAMES", help="Row orders, comma-separated.")
    ] = _ORDERS,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.jsonl", help="Records; what it holds is not counted again."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as a page.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Count also what --out holds.")] = False,
    as_json: Json = False,
) -> int:
    """Count BitTCF's tiles, shared columns and the bytes of formats under row orders."""
    # Here and not above: they bring numba, which is slow to import.
    from sparsetile.bench.report.tiles import render_tiles
    from sparsetile.bench.tiles import measure_tiles

    check_output("tiles", "--out", out)
    check_output("tiles", "--markdown", markdown)
    names = [name for name in orders.split(",") if name]
    records = measure_tiles(matrices, names, data=data, out=out, again=again, say=_LOG.info)
    if as_json:
        print_json(records)
    else:
        _print(records)
    for record in records:
        if record["status"] != "ok":
            note(f"sparsetile: {record['matrix']}, {record['order']}: {record['reason']}")
    if markdown is not None:
        text = render_tiles(records, _command(matrices, names, data, out, markdown))
        write_output(markdown, text)
        note(f"sparsetile: wrote {markdown}")
    return 0
