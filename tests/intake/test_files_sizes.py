"""Sizes of files: memory is reserved for a matrix, never for what a header or a packed file claims.

Packed zeros take a thousandth of their size. What is wrong with such a file is known from the
headers of its arrays: it is refused before one of them is unpacked.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetile.core.errors import DataError
from sparsetile.dist.folder import MatrixRows
from sparsetile.intake import as_csr, read_matrix, write_npz

LARGE = 4 * 2**20  # numbers: 32 MiB of float64, packed into 32 KiB
LITTLE = 2**21  # bytes that a refusal may take


def refused(path: Path) -> str:
    """The text of the refusal, which took no memory to speak of."""
    read_matrix(path.with_name("right.npz"))  # so that what is imported once is
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read_matrix(path)
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith("read_matrix: ") and text.endswith(".")
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "right.npz", **own())
    return tmp_path


def own(**changes: np.ndarray) -> dict[str, np.ndarray]:
    arrays = {
        "indptr": np.array([0, 1, 3]),
        "indices": np.array([1, 0, 2], dtype=np.int32),
        "shape": np.array([2, 3]),
        "data": np.array([2.0, 0.5, -3.0]),
    }
    return {**arrays, **changes}


def zeros(*shape: int, dtype: type = np.float64) -> np.ndarray:
    return np.zeros(shape, dtype)


FAULTS = {
    "more values than entries": ({"data": zeros(LARGE)}, "got length 4194304"),
    "more entries than values": ({"indices": zeros(LARGE, dtype=np.int32)}, "got length 3"),
    "row pointers of another shape": ({"indptr": zeros(LARGE, dtype=np.int64)}, "length 4194304"),
    "entries that no row has": (
        {"indices": zeros(LARGE, dtype=np.int32), "data": zeros(LARGE)},
        "row pointers up to 4194304 entries, got 3",
    ),
    "values as a matrix": ({"data": zeros(LARGE // 2, 2)}, "1-dimensional, got shape (2097152, 2)"),
    "columns as floats": ({"indices": zeros(LARGE)}, "must be int32 or int64, got float64"),
    "text as values": ({"data": np.zeros(LARGE, "<U1")}, "a type that torch has, got dtype <U1"),
    "a shape without end": ({"shape": zeros(LARGE, dtype=np.int64)}, "shape of 4194304 numbers"),
    "more entries than cells": (
        {
            "indptr": np.array([0, 0, 2**24 + 8]),
            "indices": zeros(2**24 + 8, dtype=np.int32),
            "data": zeros(2**24 + 8, dtype=np.float16),
        },
        "got 16777224 entries",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_headers_show_is_refused_before_arrays_are_read(folder, fault):
    changes, text = FAULTS[fault]
    np.savez_compressed(folder / "a.npz", **own(**changes))
    assert (folder / "a.npz").stat().st_size < 300_000
    assert text in refused(folder / "a.npz")


SCIPY = {
    "csr": {"format": np.array(b"csr"), **own(data=zeros(LARGE))},
    "csr pointers": {"format": np.array(b"csr"), **own(indptr=zeros(LARGE, dtype=np.int64))},
    "coo": {
        "format": np.array(b"coo"), "shape": np.array([2, 3]), "data": zeros(LARGE),
        "row": np.array([0]), "col": np.array([0]),
    },
    "coo pairs": {
        "format": np.array(b"coo"), "shape": np.array([2, 3]), "data": zeros(3),
        "coords": zeros(2, LARGE, dtype=np.int64),
    },
    "dia": {
        "format": np.array(b"dia"), "shape": np.array([2, 3]), "data": zeros(2, LARGE),
        "offsets": np.array([0]),
    },
    "format": {"format": np.zeros(LARGE, "S8"), **own()},
    "rows": {
        "format": np.array(b"coo"), "shape": np.array([2**31 - 1, 3]), "data": zeros(LARGE),
        "row": zeros(LARGE, dtype=np.int64), "col": zeros(LARGE, dtype=np.int64),
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", SCIPY)
def test_rejects_faulty_scipy_headers_before_arrays_are_read(folder, fault):
    np.savez_compressed(folder / "a.npz", **SCIPY[fault])
    text = {
        "csr": "indices and data alike, got (3,) and (4194304,)",
        "csr pointers": "at most 4 pointers, got 4194304",
        "coo": "and data alike, got (1,) and (4194304,)",
        "coo pairs": "coords and data alike, got (2, 4194304) and (3,)",
        "dia": "offsets and data alike, got (1,) and (2, 4194304)",
        "format": "got 4194304 formats",
        "rows": "rows that the size of the file bears out, got 2147483647 rows",
    }[fault]
    assert text in refused(folder / "a.npz")


def add(path: Path, name: str, header: bytes, *, version: int = 1, body: int = 0) -> None:
    """Add an array to the archive whose header is written by hand."""
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(body))


def without(path: Path, name: str) -> Path:
    np.savez(path, **{key: value for key, value in own().items() if key != name})
    return path


@pytest.mark.parametrize(
    ("header", "version"),
    [
        (b"{'descr': '<f8', 'fortran_order': False, 'shape': (4000000,), }\n", 1),
        (b"{'descr': '|V32000000', 'fortran_order': False, 'shape': (1,), }\n", 1),
        (b"{'descr': '<f8', 'fortran_order': False, 'shape': (-4,), }\n", 1),
        (b" " * 32_000_000, 2),
    ],
    ids=["long", "wide", "negative", "endless"],
)
def test_rejects_a_forged_header(folder, header, version):
    path = without(folder / "a.npz", "data")
    add(path, "data.npy", header, version=version, body=24)
    text = refused(path)
    assert "must be an .npz file, got an error in reading it: " in text
    assert version == 2 or "data claims " in text or "shape" in text


def test_rejects_an_impossible_compression_ratio(folder):
    """The directory of the archive claims 32 MB of an array whose packed bytes are 40."""
    path = without(folder / "a.npz", "data")
    add(path, "data.npy", b"{'descr': '<f8', 'fortran_order': False, 'shape': (4000000,), }\n")
    body = bytearray(path.read_bytes())
    entry = body.rindex(b"PK\x01\x02")
    struct.pack_into("<I", body, entry + 24, 32_000_074)
    path.write_bytes(body)
    refused(path)


def test_partial_reads_check_the_header_first(folder):
    """``MatrixRows`` reads rows of a file; it has its own way to the arrays."""
    changes = {"indptr": zeros(LARGE, dtype=np.int64)}
    np.savez_compressed(folder / "a.npz", **own(**changes))
    MatrixRows(folder / "right.npz", "plan").read(0, 2)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            MatrixRows(folder / "a.npz", "plan")
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027, 0o002])
@pytest.mark.parametrize("before", [False, True])
def test_a_written_file_has_the_mode_that_the_umask_leaves(tmp_path, mask, before):
    path = tmp_path / "a.npz"
    if before:
        path.write_bytes(b"old")
        path.chmod(0o777)
    old = os.umask(mask)
    try:
        write_npz(path, as_csr(sp.eye_array(3)))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
