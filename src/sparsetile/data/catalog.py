"""Matrices by name: the files of a data folder, and one loader for paths, specs and names.

Listing reads only headers: the array headers inside an ``.npz``, the first lines of an ``.mtx``.
"""

from __future__ import annotations

import difflib
import gzip
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from sparsetile.core import settings
from sparsetile.core.errors import type_error, value_error
from sparsetile.data.generators import SPEC_PREFIX, STAND_INS, from_spec
from sparsetile.intake.csr import CSR
from sparsetile.intake.files import read_matrix
from sparsetile.intake.npz import NpzArrays

__all__ = ["Entry", "catalog", "find", "load"]

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


def catalog(directory: str | os.PathLike[str] | None = None) -> list[Entry]:
    """List the matrices of a folder (that of downloads by default) and its folders, sorted by name.

    An ``.npz`` without a matrix is omitted; a damaged one is listed with its ``problem``.
    """
    folder = _folder("catalog", directory)
    entries = []
    for name, path in _files(folder).items():
        try:
            size = _npz_size(path) if path.suffix == ".npz" else _market_size(path)
            problem = ""
        except _DAMAGE as error:
            size, problem = (0, 0, 0), " ".join(str(error).split()) or type(error).__name__
        if size is not None:
            entries.append(Entry(name, path, *size, problem))
    return entries


def find(
    matrix: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Return the file that a path or a name stands for; None for a spec or a stand-in.

    As :func:`load` takes it; an unknown one is refused with the same words.
    """
    if not isinstance(matrix, (str, os.PathLike)):
        raise type_error(
            "load", "matrix", "a path, a spec or a name", type(matrix).__name__, "Give a string"
        )
    text = str(os.fspath(matrix))
    if os.path.isfile(text):  # unlike Path.is_file, it takes a long spec for an absent file
        return Path(text)
    if text.startswith(SPEC_PREFIX) or text.partition("?")[0] in STAND_INS:
        return None
    folder = _folder("load", data_dir, "data_dir")
    files = _files(folder)
    path = files.get(_stem(text))
    if path is None:  # HB/bcsstk17 may be called bcsstk17 while no other group has one
        same = [file for name, file in files.items() if name.rpartition("/")[2] == _stem(text)]
        path = same[0] if len(same) == 1 else None
    if path is not None:
        return path
    near = difflib.get_close_matches(_stem(text), [*files, *STAND_INS], n=3, cutoff=0.5)
    hint = "`sparsetile data list` shows the names"
    remedy = f"Did you mean {' or '.join(near)}" if near else hint
    expected = f"a file, a gen: spec, a stand-in or a name in {folder}"
    raise value_error("load", "matrix", expected, repr(text), remedy)


def load(matrix: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None) -> CSR:
    """Return the matrix that a path, a spec or a name stands for.

    Tried in this order: an existing file; a spec such as ``gen:banded?rows=9&bandwidth=1``; a
    stand-in such as ``reddit-like`` or ``reddit-like?scale=0.1``; a name in ``data_dir``, by
    default the folder of downloads.
    """
    path = find(matrix, data_dir)
    return from_spec(str(matrix)) if path is None else read_matrix(path)


def _folder(
    function: str, directory: str | os.PathLike[str] | None, argument: str = "directory"
) -> Path:
    if directory is None:
        return settings.data_dir()  # empty until the first download: not an error
    folder = Path(directory)
    if not folder.is_dir():
        raise value_error(function, argument, "a folder", repr(str(folder)), "Check the path")
    return folder


def _stem(name: str) -> str:
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _files(folder: Path) -> dict[str, Path]:
    """Name -> path of the matrix files, sorted; of equal names .npz wins: it reads faster."""
    found: dict[str, Path] = {}
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    for path in sorted(paths, key=lambda path: (path.name.lower(), str(path))):
        inside = path.relative_to(folder)
        # Downloads in progress live in hidden folders.
        if path.name.endswith(_SUFFIXES) and not any(part[0] == "." for part in inside.parts):
            name = _stem(inside.as_posix())
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
