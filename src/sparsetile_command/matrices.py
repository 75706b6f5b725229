"""``sparsetile data list`` without importing torch: the matrix files of a folder, by name.

Only headers are read: the array headers inside an ``.npz``, the first lines of an ``.mtx``.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from sparsetile_command.archive import NpzArrays

__all__ = [
    "Entry", "list_quickly", "listed", "matrix_files", "show_entries", "stem", "without_package",
]  # fmt: skip

_SUFFIXES = (".npz", ".mtx", ".mtx.gz")
_LINE_LIMIT = 4096
_COMMENT_LINES = 10_000
# What numpy, zipfile, gzip and zlib raise on a damaged file; the last two on exotic zip features.
_DAMAGE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, RuntimeError)


@dataclass(frozen=True)
class Entry:
    """A matrix file in a folder; ``problem`` says why its header could not be read."""

    name: str
    path: Path
    rows: int
    cols: int
    nnz: int  # entries that the file stores: a symmetric .mtx stores one half
    problem: str = ""


def listed(folder: Path) -> list[Entry]:
    """List the matrices of a folder and its folders, sorted by name.

    An ``.npz`` without a matrix is omitted; a damaged one is listed with its ``problem``.
    """
    entries = []
    for name, path in matrix_files(folder).items():
        try:
            size = _npz_size(path) if path.suffix == ".npz" else _market_size(path)
            problem = ""
        except _DAMAGE as error:
            size, problem = (0, 0, 0), " ".join(str(error).split()) or type(error).__name__
        if size is not None:
            entries.append(Entry(name, path, *size, problem))
    return entries


def stem(name: str) -> str:
    """Return a file's name without the suffix of its kind."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def matrix_files(folder: Path) -> dict[str, Path]:
    """Name -> path of the matrix files, sorted; of equal names .npz wins: it reads faster."""
    found: dict[str, Path] = {}
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    for path in sorted(paths, key=lambda path: (path.name.lower(), str(path))):
        inside = path.relative_to(folder)
        # Downloads in progress live in hidden folders.
        if path.name.endswith(_SUFFIXES) and not any(part[0] == "." for part in inside.parts):
            name = stem(inside.as_posix())
            if name not in found or path.suffix == ".npz":
                found[name] = path
    return dict(sorted(found.items(), key=lambda item: (item[0].lower(), item[0])))


def _npz_size(path: Path) -> tuple[int, int, int] | None:
    """Return (rows, columns, entries) from the array headers, or None if it is not a matrix."""
    with NpzArrays(path) as archive:
        # In scipy's block format "indices" counts blocks, so the values are what to count.
        counted = "data" if "data" in archive.names else "indices"
        if not {"shape", counted} <= archive.names or not archive.names & {"indices", "row"}:
            return None
        header = archive.header("shape")
        if header.count != 2 or header.dtype.kind not in "iu":
            raise ValueError("its shape is not a pair of whole numbers")
        rows, cols = archive.read("shape").reshape(-1).tolist()
        return int(rows), int(cols), archive.header(counted).count


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _market_size(path: Path) -> tuple[int, int, int]:
    """Return (rows, columns, stored entries) from a Matrix Market header."""
    with _open(path) as stream:
        if not stream.readline(_LINE_LIMIT).startswith(b"%%MatrixMarket"):
            raise ValueError("it does not begin with %%MatrixMarket")
        for _ in range(_COMMENT_LINES):
            line = stream.readline(_LINE_LIMIT)
            if line.strip() and not line.startswith(b"%"):
                break
        numbers = line.split()
        if len(numbers) != 3:
            raise ValueError("it has no line 'ROWS COLUMNS ENTRIES'")
        rows, cols, entries = (int(number) for number in numbers)
    return rows, cols, entries


def show_entries(entries: Sequence[Entry], folder: Path, as_json: bool, console: Any) -> None:
    """Write a list of matrices by the functions of ``sparsetile.cli.console``."""
    if as_json:
        console.print_json(
            [
                {
                    "name": entry.name, "path": str(entry.path), "rows": entry.rows,
                    "columns": entry.cols, "entries": entry.nnz, "problem": entry.problem or None,
                }
                for entry in entries
            ]
        )  # fmt: skip
    elif not entries:
        console.note(f"sparsetile: no matrices in {folder}")
    else:
        console.print_table(
            ("name", "rows", "columns", "entries", ""),
            [
                [entry.name, "-", "-", "-", f"unreadable: {entry.problem}"]
                if entry.problem
                else [entry.name, str(entry.rows), str(entry.cols), str(entry.nnz), ""]
                for entry in entries
            ],
            right=("rows", "columns", "entries"),
        )


def list_quickly(words: Sequence[str]) -> bool:
    """List the matrices of a folder if these words ask for it; return whether they did.

    Words and folders that are wrong are left to the command line, whose errors they get.
    """
    if [*words[:2]] != ["data", "list"]:
        return False
    rest, folder, as_json = [*words[2:]], None, False
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word == "--data" and rest:
            folder = rest.pop(0)
        elif word.startswith("--data="):
            folder = word.removeprefix("--data=")
        else:
            return False
    if folder is not None and not os.path.isdir(folder):
        return False
    place = without_package("core/settings.py").data_dir() if folder is None else Path(folder)
    console = without_package("cli/console.py")
    with console.usable_streams():
        show_entries(listed(place), place, as_json, console)
    return True


def without_package(file: str) -> Any:
    """Load a module of the package without the package, which imports torch."""
    package = importlib.util.find_spec("sparsetile")
    assert package is not None and package.origin is not None
    name = f"sparsetile_command._{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(package.origin).parent / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
