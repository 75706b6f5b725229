"""``.npz`` files: both layouts, what is written, and how each kind of damage is named."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile.core.errors import DataError
from sparsetile.intake import as_csr, read_matrix, write_npz

AGAIN = "The file is damaged, truncated or of another kind: fetch or write it again."
EXAMPLE = np.array([[0.0, 2.0, 0.0], [0.5, 0.0, -3.0]])


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, function="read_matrix"):
    with pytest.raises(DataError) as refused:
        read_matrix(path, function=function)
    return str(refused.value)


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def own(**changes):
    arrays = {
        "indptr": np.array([0, 1, 3]),
        "indices": np.array([1, 0, 2], dtype=np.int32),
        "shape": np.array([2, 3]),
        "data": np.array([2.0, 0.5, -3.0]),
    }
    return {key: value for key, value in {**arrays, **changes}.items() if value is not None}


def test_our_own_layout_is_read(tmp_path, dense):
    csr = as_csr(npz(tmp_path / "a.npz", **own()))
    assert torch.equal(dense(csr), torch.from_numpy(EXAMPLE))
    assert csr.entry_map is None


def test_our_own_layout_without_data_is_a_pattern(tmp_path):
    assert read_matrix(npz(tmp_path / "a.npz", **own(data=None))).values is None


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("family", [sp.coo_array, sp.coo_matrix])
def test_reads_files_saved_by_scipy(name, family, tmp_path, dense):
    path = tmp_path / "a.npz"
    sp.save_npz(path, family(EXAMPLE).asformat(name))
    assert torch.equal(dense(read_matrix(path)), torch.from_numpy(EXAMPLE))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32, torch.float64])
def test_round_trips_bit_for_bit(compress, dtype, tmp_path):
    weight = None if dtype is None else torch.tensor([1.5, -2.0, float("nan")], dtype=dtype)
    csr = as_csr((torch.tensor([[2, 0, 0], [1, 3, 0]]), weight, (3, 4)))
    path = tmp_path / "a.npz"
    write_npz(path, csr, compress=compress)
    back = read_matrix(path)
    assert back.shape == csr.shape
    assert torch.equal(back.indptr, csr.indptr)
    assert torch.equal(back.indices, csr.indices)
    if dtype is None:
        assert back.values is None
    else:
        assert back.values.dtype == dtype
        assert torch.equal(back.values.view(torch.uint8), csr.values.view(torch.uint8))
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_the_written_file_has_the_layout_of_the_project(tmp_path):
    csr = as_csr(sp.csr_array(EXAMPLE.astype(np.float32)))
    write_npz(tmp_path / "a.npz", csr.with_values(csr.values.requires_grad_(True)))
    with np.load(tmp_path / "a.npz") as archive:
        found = {key: (archive[key].dtype.name, archive[key].shape) for key in archive.files}
    assert found == {
        "indptr": ("int64", (3,)),
        "indices": ("int32", (3,)),
        "shape": ("int64", (2,)),
        "data": ("float32", (3,)),
    }


def test_bfloat16_values_are_written_as_float32_without_loss(tmp_path):
    csr = as_csr(torch.tensor([[1.7, 0.3]], dtype=torch.bfloat16).to_sparse_csr())
    write_npz(tmp_path / "a.npz", csr)
    back = read_matrix(tmp_path / "a.npz").values
    assert back.dtype == torch.float32
    assert torch.equal(back.bfloat16(), csr.values)


def test_writing_to_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError) as refused:
        write_npz("a.bin", as_csr(sp.eye_array(2)))
    assert str(refused.value) == (
        "write_npz: path must be a file named .npz, got 'a.bin'. Add .npz to its name."
    )


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_npz(path, as_csr(sp.eye_array(2)))
    before = path.read_bytes()

    def full_disk(stream, **arrays):
        stream.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_npz(path, as_csr(sp.eye_array(3)))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


BROKEN_ARRAYS = {
    "no indices": (
        own(indices=None),
        "a.npz must be an .npz file with indptr, indices and shape, "
        f"got only ['data', 'indptr', 'shape']. {AGAIN}",
    ),
    "nothing": (
        {},
        f"a.npz must be an .npz file with indptr, indices and shape, got only []. {AGAIN}",
    ),
    "shape of three": (
        own(shape=np.array([2, 3, 4])),
        f"a.npz must be an .npz file of a matrix, got shape [2, 3, 4]. {AGAIN}",
    ),
    "shape NaN": (
        own(shape=np.array([2.0, np.nan])),
        "shape[1] in a.npz must be a whole number, got nan. "
        "Give a whole number from 0 to 2147483647.",
    ),
    "shape negative": (
        own(shape=np.array([-2, 3])),
        "shape[0] in a.npz must be between 0 and 2147483647, got -2. "
        "Give a whole number from 0 to 2147483647.",
    ),
    "shape against indptr": (
        own(shape=np.array([4, 3])),
        "indptr in a.npz must be of length 5 (rows + 1), got length 3. Check it against shape.",
    ),
    "indices of floats": (
        own(indices=np.array([1.0, 0.0, 2.0])),
        "indices in a.npz must be int32 or int64, got float64. Convert it with .to(torch.int64).",
    ),
    "index too large": (
        own(indices=np.array([1, 0, 3])),
        "indices in a.npz must be at least 0 and below 3, the number of columns, got 3 at entry 2. "
        "Check shape, and that indices count from 0.",
    ),
    "indptr falls": (
        own(indptr=np.array([0, 4, 3])),
        "indptr in a.npz must be non-decreasing, got 4 followed by 3 at position 2. "
        "Pass cumulative counts of the entries.",
    ),
    "data too short": (
        own(data=np.ones(2)),
        "data in a.npz must be of length 3, one for each entry, got length 2. "
        "Give one value for each index, or None for a pattern.",
    ),
    "data complex": (
        own(data=np.ones(3) * 1j),
        "values in a.npz must be float16, bfloat16, float32, float64, or whole numbers, "
        "got complex128. Split it into real and imaginary parts.",
    ),
    "data of text": (
        own(data=np.array(["a", "b", "c"])),
        "data in a.npz must be an array of a type that torch has, got dtype <U1. "
        "Convert it with astype, for instance to float32 or int64.",
    ),
    "scipy index too large": (
        {
            "format": np.array(b"csr"),
            "indptr": np.array([0, 1]),
            "indices": np.array([9]),
            "data": np.ones(1),
            "shape": np.array([1, 3]),
        },
        "indices in a.npz must be at least 0 and below 3, the number of columns, got 9 at entry 0. "
        "Check shape, and that indices count from 0.",
    ),
    "scipy rows out of proportion": (
        {
            "format": np.array(b"coo"),
            "row": np.array([0]),
            "col": np.array([0]),
            "data": np.ones(1),
            "shape": np.array([2**31 - 1, 3]),
        },
        "a.npz must be a matrix with rows that the size of the file bears out, "
        f"got 2147483647 rows. {AGAIN}",
    ),
    "scipy shape of 2^31": (
        {
            "format": np.array(b"coo"),
            "row": np.array([0]),
            "col": np.array([0]),
            "data": np.ones(1),
            "shape": np.array([2**31, 3]),
        },
        "shape[0] in a.npz must be between 0 and 2147483647, got 2147483648. "
        "Give a whole number from 0 to 2147483647.",
    ),
}


@pytest.mark.parametrize("case", BROKEN_ARRAYS)
def test_a_broken_npz_is_refused_with_one_clear_text(case, tmp_path):
    arrays, text = BROKEN_ARRAYS[case]
    assert refusal(npz(tmp_path / "a.npz", **arrays)) == f"read_matrix: {text}"


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"format": np.array(b"csr")}, "data is not a file in the archive"),
        ({"format": np.array(b"odd"), "shape": np.array([1, 1])}, 'Unknown format "odd'),
        (own(format=np.array(b"csr"), indptr=np.array([0, 1])), "index pointer size"),
    ],
)
def test_a_broken_file_of_scipy_is_refused(arrays, text, tmp_path):
    with pytest.raises(DataError, match=f"^read_matrix: a.npz must be a matrix .*({text}).*again"):
        read_matrix(npz(tmp_path / "a.npz", **arrays))


class Intruder:
    """Would run when unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("key", ["data", "indices", "format"])
def test_pickled_objects_are_refused_unopened(key, tmp_path):
    arrays = own(**{key: np.array([Intruder()], dtype=object)})
    path = npz(tmp_path / "a.npz", **arrays)
    assert "Object arrays cannot be loaded when allow_pickle=False" in refusal(path)


def test_a_pickle_named_npz_is_refused_unopened(tmp_path):
    path = write(tmp_path / "a.npz", pickle.dumps(Intruder()))
    assert refusal(path).startswith("read_matrix: a.npz must be an .npz file, got an error in ")


def test_a_single_array_named_npz_is_refused(tmp_path):
    content = io.BytesIO()
    np.save(content, np.ones(3))
    path = write(tmp_path / "a.npz", content.getvalue())
    assert refusal(path) == (
        f"read_matrix: a.npz must be an .npz file, got a single .npy array. {AGAIN}"
    )


def test_an_array_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    header = header.ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    path = npz(tmp_path / "a.npz", **own(indptr=None))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("indptr.npy", array)
    assert refusal(path).startswith("read_matrix: a.npz must be an .npz file, got an error in ")


def test_rejects_an_unparsable_array_header(tmp_path):
    path = npz(tmp_path / "a.npz", **own(indptr=None))
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (3,".ljust(117) + "\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(
            "indptr.npy",
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(24),
        )
    assert refusal(path).startswith("read_matrix: a.npz must be an .npz file, got an error in ")


def test_rejects_a_member_that_is_not_an_array(tmp_path):
    path = npz(tmp_path / "a.npz", **own(shape=None))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("shape.npy", b"2, 3")
    assert refusal(path) == (
        f"read_matrix: a.npz must be an .npz file with an array shape, got other bytes. {AGAIN}"
    )


@pytest.mark.parametrize("keep", [0, 10, 300, -30])
def test_a_truncated_npz_is_refused(keep, tmp_path):
    path = npz(tmp_path / "a.npz", **own())
    write(path, path.read_bytes()[:keep])
    assert refusal(path).startswith("read_matrix: a.npz must be an .npz file, got an error in ")
