"""``sparsetile data``: list, fetch and generate matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli import console
from sparsetile.cli.console import activity, note, print_table, print_text
from sparsetile.cli.options import Data, Json, check_output
from sparsetile.core import settings
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.data import download
from sparsetile.data.catalog import catalog
from sparsetile.data.generators import from_spec
from sparsetile.data.suites import SUITES, fetch_member, members, pattern_digest
from sparsetile.intake.files import read_matrix, write_npz
from sparsetile_command.fetch import download_bar
from sparsetile_command.matrices import show_entries

__all__ = ["app"]

app = typer.Typer(help="List, fetch and generate matrices.", no_args_is_help=False)


@app.command("list")
def list_matrices(data: Data = None, as_json: Json = False) -> int:
    """List the matrices of a folder (the folder of downloads when --data is omitted)."""
    show_entries(catalog(data), data or settings.data_dir(), as_json, console)
    return 0


@app.command("fetch")
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="SuiteSparse Group/Name.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME", help="All matrices of a suite (core) instead."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder to download into.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="A mirror of the site.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download again.")] = False,
) -> int:
    """Download a matrix, or a suite, from the SuiteSparse collection; print what came where."""
    if (name is None) == (suite is None):
        raise value_error(
            "fetch", "NAME or --suite", "one of both", "neither" if name is None else "both",
            "Write `sparsetile data fetch HB/bcsstk17` or `sparsetile data fetch --suite core`",
        )  # fmt: skip
    if suite is not None:
        chosen = one_of("fetch", "--suite", suite, SUITES)
        return _fetch_suite(chosen, data or settings.data_dir(), base_url, force)
    assert name is not None
    with download_bar(name) as progress:
        path = download.fetch(
            name, base_url=base_url, directory=data, force=force, progress=progress
        )
    print_text(str(path))
    return 0


def _fetch_suite(suite: str, folder: Path, base_url: str | None, force: bool) -> int:
    """Fetch what is missing, compare every file with the suite's list, print a table."""
    rows, missing = list[list[str]](), False
    for member in members(suite):
        found = next(
            (path for end in (".npz", ".mtx", ".mtx.gz")
             if (path := folder / f"{member.name}{end}").exists()), None,
        )  # fmt: skip
        state = "there already"
        if member.collection != "-" and (found is None or force):
            note(f"sparsetile: fetching {member.collection}, {member.entries} entries")
            with download_bar(member.name) as progress:
                found = fetch_member(member, folder, base_url=base_url, progress=progress)
            state = "fetched"
        size = pattern = "-"
        if found is None:
            state, missing = "not in SuiteSparse: get it from its source", True
        else:
            size = f"{found.stat().st_size / 1e6:.1f} MB"
            digest = pattern_digest(read_matrix(found, complex_values=True))
            same = digest == member.pattern
            pattern = digest[:12] if same else f"{digest[:12]}, not {member.pattern[:12]}"
            missing |= not same
            state += "" if same else "; another pattern than the measured one"
        rows.append([member.name, str(member.entries), size, pattern, state, member.source])
    headings = ("name", "entries", "file", "pattern (SHA-256)", "", "source")
    print_table(headings, rows, right=("entries", "file"))
    return 1 if missing else 0


@app.command("generate")
def generate(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC", help="Such as 'gen:road_grid?rows=1e5' or 'reddit-like?scale=0.01'."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.npz", help="File to write.")],
) -> int:
    """Generate a matrix and write it as .npz; print the path of its file."""
    check_output("generate", "--out", out, (".npz",))
    with activity(f"generating {spec}"):
        csr = from_spec(spec)
        write_npz(out, csr)
    note(f"sparsetile: {csr.shape[0]} x {csr.shape[1]}, {csr.nnz} entries")
    print_text(str(out))
    return 0
