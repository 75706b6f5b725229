"""Matrices by name: the files of a data folder, and one loader for paths, specs and names."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from sparsetile.core import settings
from sparsetile.core.errors import type_error, value_error
from sparsetile.data.generators import SPEC_PREFIX, STAND_INS, from_spec
from sparsetile.intake.csr import CSR
from sparsetile.intake.files import read_matrix
from sparsetile_command.matrices import Entry, listed, matrix_files, stem

__all__ = ["Entry", "catalog", "find", "load"]


def catalog(directory: str | os.PathLike[str] | None = None) -> list[Entry]:
    """List the matrices of a folder (that of downloads by default) and its folders, sorted by name.

    An ``.npz`` without a matrix is omitted; a damaged one is listed with its ``problem``.
    """
    return listed(_folder("catalog", directory))


def find(
    matrix: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Return the file that a path or a name stands for; None for a spec or a stand-in.

    As :func:`load` takes it; an unknown one raises the same error.
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
    files = matrix_files(folder)
    path = files.get(stem(text))
    if path is None:  # HB/bcsstk17 may be called bcsstk17 while no other group has one
        same = [file for name, file in files.items() if name.rpartition("/")[2] == stem(text)]
        path = same[0] if len(same) == 1 else None
    if path is not None:
        return path
    near = difflib.get_close_matches(stem(text), [*files, *STAND_INS], n=3, cutoff=0.5)
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
