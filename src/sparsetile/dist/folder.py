"""A matrix in parts on disk: one ``.npz`` of rows per part, and the manifest ``partition.json``.

The manifest is replaced as a whole, first and after each part, so an interrupted run continues
where it stopped. Each part has a SHA-256; a rank checks those of the parts it reads. Columns have
the numbers of the whole matrix (in the partition's order, if it has one).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.core.files import replacing
from sparsetile.dist.manifest import (
    MANIFEST,
    MOST_PARTS,
    VERSION,
    damaged_part,
    own_file,
    part_name,
    read_manifest,
    sha256,
    write_manifest,
)
from sparsetile.dist.partition import Partition, find_partition
from sparsetile.dist.shares import check_entries, renumbered, rows_of
from sparsetile.intake import CSR, as_csr, read_matrix, write_npz
from sparsetile.intake.npz import NpzArrays, reading

__all__ = ["Folder", "MatrixRows", "open_folder", "write_folder"]

_ORDER = "order.npy"


class MatrixRows:
    """Rows of a matrix file or of a matrix in memory, read in ranges.

    An ``.npz`` with arrays ``indptr``, ``indices`` and ``shape`` is read by parts: only row
    pointers are in memory, so it may have more than 2^31 entries. Other files are read whole.
    """

    def __init__(self, matrix: Any, function: str) -> None:
        self.file: Path | None = None
        self._csr: CSR | None = None
        self._function = function
        arrays = _npz_arrays(matrix)
        if arrays is None:
            self._csr = as_csr(matrix, function=function, device="cpu")
            self.indptr, self.shape = self._csr.indptr, self._csr.shape
            return
        self.file = Path(matrix)
        self.shape = (int(arrays["shape"][0]), int(arrays["shape"][1]))
        self.indptr = torch.from_numpy(arrays["indptr"].astype(np.int64))
        pointers = self.indptr
        rising = pointers.numel() == self.shape[0] + 1 and int(pointers[0]) == 0
        if not rising or bool((pointers[1:] < pointers[:-1]).any()):
            raise damaged_part(function, self.file, "rising row pointers from 0", "others")

    @property
    def nnz(self) -> int:
        return int(self.indptr[-1])

    @property
    def whole(self) -> CSR | None:
        """The matrix in memory; None if it is read by parts."""
        return self._csr

    def pattern(self) -> CSR:
        """The whole matrix, read if necessary: row orders need all of it."""
        if self._csr is None:
            assert self.file is not None
            self._csr = read_matrix(self.file, function=self._function)
        return self._csr

    def read(self, first: int, last: int) -> CSR:
        """Return rows ``first`` to ``last``; columns keep their numbers."""
        if self._csr is not None:
            return rows_of(self._csr, torch.arange(first, last))
        assert self.file is not None
        begin, end = int(self.indptr[first]), int(self.indptr[last])
        check_entries(self._function, end - begin)
        with reading(self._function, self.file, "an .npz file"), NpzArrays(self.file) as archive:
            indices = _slice(archive, "indices", begin, end, self._function, self.file)
            values = None
            if "data" in archive.names:
                values = _slice(archive, "data", begin, end, self._function, self.file)
        pointers = self.indptr[first : last + 1] - begin
        parts = (pointers, indices, values, (last - first, self.shape[1]))
        return as_csr(parts, function=self._function)


def _npz_arrays(matrix: Any) -> dict[str, np.ndarray] | None:
    """Return the small arrays of an ``.npz`` of our own layout; None for anything else."""
    if not isinstance(matrix, (str, os.PathLike)) or not str(matrix).lower().endswith(".npz"):
        return None
    try:
        with NpzArrays(Path(matrix)) as archive:
            if "format" in archive.names or not {"indptr", "indices", "shape"} <= archive.names:
                return None
            pair, pointers = archive.header("shape"), archive.header("indptr")
            if pair.shape != (2,) or pair.dtype.kind not in "iu" or pointers.dtype.kind not in "iu":
                return None
            shape = archive.read("shape")
            if pointers.shape != (int(shape[0]) + 1,):
                return None
            return {"indptr": archive.read("indptr"), "shape": shape}
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # reading it whole raises the error


def _slice(
    archive: NpzArrays, name: str, begin: int, end: int, function: str, file: Path
) -> np.ndarray:
    """Return elements ``begin`` to ``end`` of a stored 1-D array."""
    shape = archive.header(name).shape
    if len(shape) != 1 or end > shape[0]:
        raise damaged_part(function, file, f"a 1-D array {name}.npy of {end} numbers", str(shape))
    found = archive.part(name, begin, end)
    if found.size != end - begin:
        raise damaged_part(function, file, f"whole to entry {end} of {name}.npy", "its end before")
    return found


@dataclass(frozen=True)
class Folder:
    """An opened folder of parts."""

    path: Path
    shape: tuple[int, int]
    nnz: int  # entries of all parts together; may exceed 2^31
    partition: Partition  # the shares of the parts, in the order that the folder was written in
    files: tuple[dict[str, Any], ...]
    digest: str

    def read(self, first: int, last: int, function: str = "plan") -> CSR:
        """Return parts ``first`` to ``last`` as one matrix of their rows, checksums compared."""
        pieces = [self._read_part(part, function) for part in range(first, last)]
        if len({piece.values is None for piece in pieces}) > 1:
            manifest, expected = self.path / MANIFEST, "of parts, all of them with values or none"
            raise damaged_part(function, manifest, expected, "some with and some without")
        check_entries(function, sum(piece.nnz for piece in pieces))
        if len(pieces) == 1:
            return pieces[0]
        ends, total = [torch.zeros(1, dtype=torch.int64)], 0
        for piece in pieces:
            ends.append(piece.indptr[1:] + total)
            total += piece.nnz
        weighted = any(piece.values is not None for piece in pieces)
        values = [piece.values for piece in pieces if piece.values is not None]
        empty = torch.zeros(0, dtype=torch.int32)
        return CSR(
            torch.cat(ends),
            torch.cat([empty, *(piece.indices for piece in pieces)]),
            torch.cat(values) if weighted else None,
            (sum(piece.shape[0] for piece in pieces), self.shape[1]),
        )

    def _read_part(self, part: int, function: str) -> CSR:
        entry = self.files[part]
        file = own_file(self.path / entry["name"], function)
        if not file.is_file() or sha256(file) != entry["sha256"]:
            got = "no such file" if not file.is_file() else "another checksum"
            raise damaged_part(function, file, "the part that partition.json describes", got)
        csr = read_matrix(file, function=function)
        rows = self.partition.rows
        expected = (rows[part + 1] - rows[part], self.shape[1]), entry["nnz"]
        if (csr.shape, csr.nnz) != expected:
            found = f"{csr.shape} with {csr.nnz} entries"
            raise damaged_part(function, file, "of the rows that partition.json gives it", found)
        return csr


def open_folder(path: str | os.PathLike[str], function: str = "plan") -> Folder:
    """Read the manifest of a folder that :func:`write_folder` wrote, and check that it is whole."""
    folder = Path(path)
    text = read_manifest(folder, function)
    if text is None:
        raise DataError(
            describe(
                function,
                "A",
                f"a folder with {MANIFEST}",
                repr(str(folder)),
                "Write it with `sparsetile partition MATRIX --parts P --out DIR`",
            )
        )
    missing = [entry["name"] for entry in text["files"] if entry["sha256"] is None]
    if missing:
        raise DataError(
            describe(
                function,
                str(folder),
                "a finished partition",
                f"{len(missing)} parts missing",
                "Run the same `sparsetile partition` again: it continues where it stopped",
            )
        )
    order = None
    if text["order"] is not None:
        order = _read_order(folder / _ORDER, text["order"], text["shape"][0], function)
    partition = Partition(text["partition"], tuple(text["rows"]), tuple(text["columns"]), order)
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
    shape = (text["shape"][0], text["shape"][1])
    return Folder(folder, shape, text["nnz"], partition, tuple(text["files"]), digest)


def _read_order(file: Path, checksum: str, rows: int, function: str) -> Tensor:
    own_file(file, function)
    if not file.is_file() or sha256(file) != checksum:
        raise damaged_part(function, file, "the order that partition.json names", "another")
    # Every order of this many rows has this header: never allocate what another header claims.
    header = _order_header(rows)
    order = torch.zeros(0, dtype=torch.int64)
    if rows and file.stat().st_size == len(header) + 8 * rows:
        body = bytearray(file.read_bytes())
        if body.startswith(header):
            order = torch.frombuffer(body, dtype=torch.int64, offset=len(header))
    if not torch.equal(order.sort().values, torch.arange(rows)):
        raise damaged_part(function, file, f"a permutation of {rows} rows", "other numbers")
    return order


def _order_header(rows: int) -> bytes:
    """The header of an ``.npy`` file of that many int64."""
    header = io.BytesIO()
    facts = {"descr": "<i8", "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def write_folder(
    matrix: Any,
    parts: int,
    out: str | os.PathLike[str],
    *,
    partition: str | Tensor = "auto",
    n: int = 128,
    advance: Callable[[], None] = lambda: None,
    function: str = "partition",
) -> Folder:
    """Write a matrix as ``parts`` files of rows; continue where an earlier run stopped.

    Parameters
    ----------
    matrix : path or sparse matrix
        An ``.npz`` with row pointers is read part by part; anything else is read whole.
    partition : str or Tensor
        As in :func:`sparsetile.dist.plan`.
    n : int
        Columns of B that shares are balanced for.
    advance : callable
        Called after each part.
    """
    folder = Path(out)
    rows = MatrixRows(matrix, function)
    _check_parts(function, parts, rows.shape[0])
    plain = isinstance(partition, str) and partition in ("auto", "even", "identity")
    # Contiguous shares need only the lengths of rows, so entries may stay on disk.
    pointers = CSR(rows.indptr, torch.zeros(0, dtype=torch.int32), None, rows.shape)
    found = find_partition(function, pointers if plain else rows.pattern(), parts, partition, n, 4)
    for part in range(parts):
        if found.order is None:
            entries = int(rows.indptr[found.rows[part + 1]] - rows.indptr[found.rows[part]])
            check_entries(function, entries)
    folder.mkdir(parents=True, exist_ok=True)
    text: dict[str, Any] = {
        "kind": "sparsetile-partition",
        "version": VERSION,
        "source": _source_digest(rows),
        "shape": list(rows.shape),
        "nnz": rows.nnz,
        "partition": found.name,
        "rows": list(found.rows),
        "columns": list(found.columns),
        "order": None,
        "files": [{"name": part_name(part), "nnz": None, "sha256": None} for part in range(parts)],
    }
    order = None
    if found.order is not None:
        order = _order_header(rows.shape[0]) + found.order.numpy().tobytes()
        text["order"] = hashlib.sha256(order).hexdigest()
    for name in (MANIFEST, _ORDER, *(entry["name"] for entry in text["files"])):
        own_file(folder / name, function)
    _resume(folder, text, function)
    if order is not None:
        with replacing(folder / _ORDER) as partial:
            partial.write_bytes(order)
    write_manifest(folder, text)
    for part, entry in enumerate(text["files"]):
        file = folder / entry["name"]
        if entry["sha256"] is None or not file.is_file() or sha256(file) != entry["sha256"]:
            first, last = found.rows[part], found.rows[part + 1]
            if found.order is None:
                piece = rows.read(first, last)
            else:
                piece = renumbered(rows.pattern(), found, part)
            write_npz(file, piece)
            entry["nnz"], entry["sha256"] = piece.nnz, sha256(file)
            write_manifest(folder, text)
        advance()
    return open_folder(folder, function)


def _resume(folder: Path, text: dict[str, Any], function: str) -> None:
    """Take over the checksums of an earlier run of the same partition."""
    before = read_manifest(folder, function)
    if before is not None:
        old = {key: value for key, value in before.items() if key != "files"}
        new = {key: value for key, value in text.items() if key != "files"}
        if old != new:
            names = sorted(key for key in new if old.get(key) != new[key])
            raise value_error(
                function, "--out", "a folder of this partition, or an empty one",
                f"one of another ({', '.join(names)} differ)", "Name another folder",
            )  # fmt: skip
        text["files"] = before["files"]


def _check_parts(function: str, parts: int, rows: int) -> None:
    most = max(1, min(rows, MOST_PARTS))
    if not 1 <= parts <= most:
        why = ", the rows of A" if rows <= MOST_PARTS else ""
        raise value_error(
            function, "--parts", f"from 1 to {most}{why}", parts,
            "Ask for fewer parts" if parts > most else "Ask for more parts",
        )  # fmt: skip


def _source_digest(rows: MatrixRows) -> str:
    """Identify a matrix, so that no run continues with the parts of another."""
    if rows.file is not None:
        return sha256(rows.file)
    csr = rows.pattern()
    digest = hashlib.sha256(csr.indptr.numpy().tobytes())
    digest.update(csr.indices.numpy().tobytes())
    if csr.values is not None and csr.nnz:
        digest.update(csr.values.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
