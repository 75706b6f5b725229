"""``.npz`` files: archives of arrays, whose headers are checked before any array is read.

Packed zeros take a thousandth of their size, so a small file may hold gigabytes. Headers must fit
the archive, and the arrays each other, before memory is reserved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sparsetile.core.checks import dimension
from sparsetile.core.errors import DataError, describe
from sparsetile.intake.arrays import index_tensor, values_tensor
from sparsetile.intake.canonical import Names, from_compressed
from sparsetile.intake.csr import CSR
from sparsetile.intake.foreign import from_scipy
from sparsetile_command.archive import DEFLATE_LIMIT, ArrayHeader, NpzArrays

__all__ = ["DEFLATE_LIMIT", "NpzArrays", "check_rows", "damaged", "read_npz", "reading"]

# Row pointers of this many rows take 128 MiB: below it a header may claim any number of rows.
_FREE_ROWS = 2**24
# Below this many entries there may be more than places in the matrix: duplicates are summed.
_FREE_ENTRIES = 2**24
_SHAPE_LIMIT = 64  # numbers of the array ``shape``: more are no matrix, and are not printed


def damaged(function: str, file: Path, expected: str, actual: object) -> DataError:
    """Build the error of a file with unexpected content."""
    remedy = "The file is damaged, truncated or of another kind: fetch or write it again"
    return DataError(describe(function, file.name, expected, actual, remedy))


@contextmanager
def reading(function: str, file: Path, expected: str) -> Iterator[None]:
    """Turn any exception of a library on a damaged file into one DataError."""
    try:
        yield
    except (DataError, PermissionError):
        raise
    except Exception as error:  # numpy alone raises a dozen kinds, even tokenize's
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise damaged(function, file, expected, f"an error in reading it: {text}") from None


def check_rows(function: str, file: Path, rows: int, room: int) -> None:
    """Reject more rows than ``room`` bytes justify: their pointers are allocated by the count."""
    if rows > max(_FREE_ROWS, 8 * room):
        raise damaged(
            function, file, "a matrix with rows that the size of the file bears out", f"{rows} rows"
        )


def read_npz(function: str, file: Path) -> CSR:
    """Read a matrix in our own layout or in scipy's."""
    with reading(function, file, "an .npz file"):
        with open(file, "rb") as stream:
            if stream.read(6) == b"\x93NUMPY":
                raise damaged(function, file, "an .npz file", "a single .npy array")
        archive = NpzArrays(file)
    with archive:
        if "format" in archive.names:
            return _read_scipy(function, file, archive)
        return _read_own(function, file, archive)


def _header(function: str, file: Path, archive: NpzArrays, name: str) -> ArrayHeader:
    with reading(function, file, "an .npz file"):
        try:
            return archive.header(name)
        except ValueError as error:
            if "magic string" in str(error):  # numpy's text for something that is not an array
                text = f"an .npz file with an array {name}"
                raise damaged(function, file, text, "other bytes") from None
            raise


def _array(function: str, file: Path, archive: NpzArrays, name: str) -> np.ndarray:
    with reading(function, file, "an .npz file"):
        return archive.read(name)


def _read_own(function: str, file: Path, archive: NpzArrays) -> CSR:
    if not {"indptr", "indices", "shape"} <= archive.names:
        text = "an .npz file with indptr, indices and shape"
        raise damaged(function, file, text, f"only {sorted(archive.names)}")
    weighted = "data" in archive.names
    names = Names(function, values="data").inside(file.name)
    shape = _shape(function, file, archive)
    indptr, indices = (_header(function, file, archive, name) for name in ("indptr", "indices"))
    index_tensor(function, names.indptr, indptr.example())
    index_tensor(function, names.indices, indices.example())
    _check_length(
        function, names.indptr, indptr, shape[0] + 1, " (rows + 1)", "Check it against shape"
    )
    if weighted:
        data = _header(function, file, archive, "data")
        values_tensor(function, names.values, data.example())
        each, remedy = (
            ", one for each entry",
            "Give one value for each index, or None for a pattern",
        )
        _check_length(function, names.values, data, indices.count, each, remedy)
    _check_entries(function, file, indices.count, shape)
    pointers = index_tensor(function, names.indptr, _array(function, file, archive, "indptr"))
    if int(pointers[-1]) != indices.count:
        expected = f"an .npz file with row pointers up to {indices.count} entries"
        raise damaged(function, file, expected, int(pointers[-1]))
    values = _array(function, file, archive, "data") if weighted else None
    return from_compressed(
        names,
        pointers,
        index_tensor(function, names.indices, _array(function, file, archive, "indices")),
        None if values is None else values_tensor(function, names.values, values),
        shape,
    )


# Arrays that scipy.sparse.save_npz writes beside ``data``, and which axis of each is as long as the
# first one of ``data``.
_BESIDE_DATA = {"indices": 0, "row": 0, "col": 0, "offsets": 0, "coords": -1}


def _read_scipy(function: str, file: Path, archive: NpzArrays) -> CSR:
    from scipy.sparse import load_npz

    expected = "a matrix written by scipy.sparse.save_npz"
    parts = ("format", "shape", "data", "indptr", *_BESIDE_DATA)
    found = {
        name: _header(function, file, archive, name) for name in parts if name in archive.names
    }
    if found["format"].count > 1:
        raise damaged(function, file, expected, f"{found['format'].count} formats")
    if "shape" in found:
        shape = _shape(function, file, archive)
        check_rows(function, file, shape[0], file.stat().st_size * DEFLATE_LIMIT)
        if "indptr" in found:
            most, pointers = max(shape) + 1, found["indptr"].count
            if pointers > most:
                raise damaged(function, file, f"{expected}: at most {most} pointers", pointers)
        if "data" in found:
            _check_entries(function, file, found["data"].count, shape)
            for name in _BESIDE_DATA.keys() & found.keys():
                axis = _BESIDE_DATA[name]
                if found[name].shape[axis:][:1] != found["data"].shape[:1]:
                    shapes = f"{found[name].shape} and {found['data'].shape}"
                    raise damaged(function, file, f"{expected}: {name} and data alike", shapes)
    with reading(function, file, expected):
        matrix = load_npz(file)
    return from_scipy(function, matrix, Names(function, values="data").inside(file.name))


def _check_length(
    function: str, name: str, found: ArrayHeader, length: int, why: str, remedy: str
) -> None:
    if found.count != length:
        expected = f"of length {length}{why}"
        raise DataError(describe(function, name, expected, f"length {found.count}", remedy))


def _check_entries(function: str, file: Path, entries: int, shape: tuple[int, int]) -> None:
    if entries > max(_FREE_ENTRIES, shape[0] * shape[1]):
        expected = f"a matrix of at most {shape[0]} x {shape[1]} entries"
        raise damaged(function, file, expected, f"{entries} entries")


def _shape(function: str, file: Path, archive: NpzArrays) -> tuple[int, int]:
    header = _header(function, file, archive, "shape")
    if header.count > _SHAPE_LIMIT or header.dtype.itemsize > 16:
        found = f"shape of {header.count} numbers"
        raise damaged(function, file, "an .npz file of a matrix", found)
    return stored_shape(function, file, _array(function, file, archive, "shape"))


def stored_shape(function: str, file: Path, numbers: np.ndarray) -> tuple[int, int]:
    """Return the shape that an array of two numbers gives."""
    shape: Sequence[object] = numbers.reshape(-1).tolist()
    if len(shape) != 2:
        raise damaged(function, file, "an .npz file of a matrix", f"shape {list(shape)}")
    rows, columns = (
        dimension(function, f"shape[{axis}] in {file.name}", size)
        for axis, size in enumerate(shape)
    )
    return rows, columns
