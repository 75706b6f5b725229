"""Matrix files: reads Matrix Market (``.mtx``, ``.mtx.gz``) and ``.npz``, writes ``.npz``.

Files are not trusted: headers are checked here against the size of the file before any memory is
reserved for them, and nothing is ever unpickled. Entries are parsed by scipy's parallel reader,
which is imported when a file needs it.
"""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from sparsetile.core.checks import MAX_DIM
from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.core.files import replacing
from sparsetile.intake.arrays import refuse_complex, scipy_index_tensor, values_tensor
from sparsetile.intake.canonical import Names, from_coordinates
from sparsetile.intake.csr import CSR
from sparsetile.intake.npz import DEFLATE_LIMIT, check_rows, damaged, read_npz, reading

__all__ = ["read_matrix", "write_npz"]

_LINE_LIMIT = 2**16
_FIELDS = ("real", "double", "complex", "integer", "unsigned-integer", "pattern")
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


def read_matrix(
    path: str | os.PathLike[str], *, function: str = "read_matrix", complex_values: bool = False
) -> CSR:
    """Read a matrix file into canonical CSR on the CPU.

    ``.mtx`` or ``.mtx.gz``: Matrix Market, coordinate format, field real, integer, pattern or, with
    ``complex_values``, complex, any symmetry (the other half is filled in); values are float64 or
    complex128, None for a pattern. ``.npz``: arrays
    ``indptr``, ``indices``, ``shape`` and, unless it is a pattern, ``data``; or what
    ``scipy.sparse.save_npz`` writes. A damaged file is a DataError.
    """
    file = Path(path)
    name = file.name.lower()
    if not name.endswith((".mtx", ".mtx.gz", ".npz")):
        raise value_error(
            function, "path", "a file named .mtx, .mtx.gz or .npz", repr(str(file)),
            "Convert the matrix to one of these",
        )  # fmt: skip
    if file.is_dir():
        raise IsADirectoryError(
            describe(function, "path", "a file", f"the folder {str(file)!r}", "Name a file in it")
        )
    if not file.exists():
        raise FileNotFoundError(
            describe(function, "path", "an existing file", repr(str(file)), "Check the path")
        )
    try:
        csr = read_npz(function, file) if name.endswith(".npz") else _read_mtx(function, file)
        if not complex_values:
            refuse_complex(function, f"values in {file.name}", csr.values)
        return csr
    except DataError:
        raise
    except (TypeError, ValueError) as error:  # from the checks of every input
        raise DataError(str(error)) from None


def write_npz(path: str | os.PathLike[str], csr: CSR, *, compress: bool = False) -> None:
    """Write ``csr`` as ``.npz``: indptr int64, indices int32, shape, and data unless a pattern.

    The file appears whole or not at all. bfloat16 values, which numpy lacks, are stored as
    float32 without loss. ``compress`` makes the file smaller and writing much slower.
    """
    file = Path(path)
    if not file.name.lower().endswith(".npz"):
        raise value_error(
            "write_npz", "path", "a file named .npz", repr(str(file)), "Add .npz to its name"
        )
    arrays = {
        "indptr": csr.indptr.cpu().numpy(),
        "indices": csr.indices.cpu().numpy(),
        "shape": np.array(csr.shape, dtype=np.int64),
    }
    if csr.values is not None:
        values = csr.values.detach().cpu()
        arrays["data"] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    with replacing(file) as partial, open(partial, "wb") as stream:
        (np.savez_compressed if compress else np.savez)(stream, **cast(Any, arrays))


# --- Matrix Market -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MarketHeader:
    rows: int
    columns: int
    entries: int
    field: str
    symmetry: str


def _read_mtx(function: str, file: Path) -> CSR:
    packed = file.name.lower().endswith(".gz")
    room = file.stat().st_size * (DEFLATE_LIMIT if packed else 1)
    with reading(function, file, "a Matrix Market file"), _open(file, packed) as stream:
        header = _read_market_header(function, file, stream)
    least = 4 if header.field == "pattern" else 6  # "1 1\n" and "1 1 1\n"
    if header.entries * least > room + 1:
        raise damaged(
            function, file, f"large enough for the {header.entries} entries its header announces",
            f"{file.stat().st_size} bytes",
        )  # fmt: skip
    check_rows(function, file, header.rows, room)

    from scipy.io import mmread

    with reading(function, file, "a Matrix Market file"), _open(file, packed) as stream:
        by_path = not packed and _is_text(file) and _is_sound(stream)
        matrix = mmread(file if by_path else _Text(stream))
    names = Names(function).inside(file.name)
    pattern = header.field == "pattern"
    return from_coordinates(
        names,
        scipy_index_tensor(function, names.rows, matrix.row),
        scipy_index_tensor(function, names.columns, matrix.col),
        None if pattern else values_tensor(function, names.values, matrix.data),
        (header.rows, header.columns),
    )


class _Text:
    """A stream that ends its last line and rejects NUL: either would crash scipy's reader."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._inside_line = False
        self.completed = False  # whether the last line lacked its end

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(size)
        if b"\0" in piece:
            raise ValueError("NUL in text")
        if not piece and self._inside_line:
            self.completed = True
            piece = b"\n"
        self._inside_line = bool(piece) and not piece.endswith(b"\n")
        return piece


def _is_text(file: Path) -> bool:
    """Return whether a path can be passed to libraries that take UTF-8."""
    try:
        str(file).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_sound(stream: BinaryIO) -> bool:
    """Return whether scipy may read the file by its path, which is faster than a stream."""
    text = _Text(stream)
    while text.read(2**22):
        pass
    stream.seek(0)
    return not text.completed


def _open(file: Path, packed: bool) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "rb")) if packed else open(file, "rb")


def _read_market_header(function: str, file: Path, stream: BinaryIO) -> _MarketHeader:
    banner = stream.readline(_LINE_LIMIT).decode("latin-1").split()
    if not banner or not re.fullmatch("%{1,2}MatrixMarket", banner[0]):
        raise damaged(
            function, file, "a Matrix Market file that begins with %%MatrixMarket", "no such line"
        )
    words = [word.lower() for word in banner[1:]]
    if len(words) != 4 or words[0] != "matrix":
        raise damaged(
            function, file, "headed '%%MatrixMarket matrix coordinate FIELD SYMMETRY'",
            repr(" ".join(banner)[:80]),
        )  # fmt: skip
    _, layout, field, symmetry = words
    for given, allowed, what, remedy in (
        (layout, ("coordinate",), "format", "Convert it with scipy.sparse.coo_array and mmwrite"),
        (field, _FIELDS, "field", "Write it with one of these"),
        (symmetry, _SYMMETRIES, "symmetry", "Write it as general"),
    ):
        if given not in allowed:
            expected = f"a Matrix Market file of {what} {' or '.join(allowed)}"
            raise DataError(describe(function, file.name, expected, repr(given[:80]), remedy))
    if field == "pattern" and symmetry == "skew-symmetric":
        raise damaged(
            function, file, "free of contradictions", "a pattern (no signs) that is skew-symmetric"
        )

    rows, columns, entries = _read_size_line(function, file, stream)
    if symmetry != "general" and rows != columns:
        raise damaged(function, file, f"square, being {symmetry}", f"{rows} x {columns}")
    return _MarketHeader(rows, columns, entries, field, symmetry)


def _read_size_line(function: str, file: Path, stream: BinaryIO) -> tuple[int, int, int]:
    while True:
        line = stream.readline(_LINE_LIMIT)
        if line.startswith(b"%"):
            while line and not line.endswith(b"\n"):  # a comment longer than the limit
                line = stream.readline(_LINE_LIMIT)
        elif line.strip() or not line:
            break
    text = line.decode("latin-1").strip()
    if not re.fullmatch(r"[+-]?\d+\s+[+-]?\d+\s+[+-]?\d+", text, flags=re.ASCII):
        got = repr(text[:80]) if text else "the end of the file"
        raise damaged(function, file, "sized by a line 'ROWS COLUMNS ENTRIES'", got)
    if len(text) > 80:  # Python refuses to convert thousands of digits, and no count has them
        raise damaged(function, file, "sized by counts of at most 19 digits", repr(text[:80]))
    rows, columns, entries = (int(word) for word in text.split())
    if min(rows, columns, entries) < 0 or max(rows, columns) > MAX_DIM:
        raise damaged(
            function, file, f"sized by ROWS and COLUMNS from 0 to {MAX_DIM} and ENTRIES from 0",
            repr(text),
        )  # fmt: skip
    return rows, columns, entries
