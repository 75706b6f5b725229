"""Any file: which are looked at, and that damage does nothing but raise one error."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsetile.core.errors import DataError
from sparsetile.intake import CSR, as_csr, read_matrix

BANNER = "%%MatrixMarket matrix coordinate real general\n"


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError) as refused:
        as_csr("nowhere/a.mtx")
    assert str(refused.value) == (
        "plan: path must be an existing file, got 'nowhere/a.mtx'. Check the path."
    )


def test_a_folder_is_refused(tmp_path):
    folder = tmp_path / "a.npz"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as refused:
        read_matrix(folder)
    assert str(refused.value) == (
        f"read_matrix: path must be a file, got the folder {str(folder)!r}. Name a file in it."
    )


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def forbidden(*args, **options):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.mtx.gz", gzip.compress(BANNER.encode()))
    monkeypatch.setattr(gzip, "open", forbidden)
    with pytest.raises(PermissionError, match="Permission denied"):
        read_matrix(path)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.gz", "mtx", "a.mtx.bz2", ""])
def test_an_unknown_extension_is_refused_before_the_file_is_looked_for(name):
    with pytest.raises(ValueError) as refused:
        read_matrix(name)
    shown = name or "."
    assert str(refused.value) == (
        f"read_matrix: path must be a file named .mtx, .mtx.gz or .npz, got {shown!r}. "
        "Convert the matrix to one of these."
    )


def sample(name: str) -> bytes:
    content = io.BytesIO()
    if name.endswith(".npz"):
        np.savez(content, indptr=[0, 1, 3], indices=[1, 0, 2], shape=[2, 3], data=[2.0, 0.5, -3.0])
        return content.getvalue()
    text = (BANNER + "% note\n3 4 4\n1 1 0.5\n3 4 1e3\n2 2 -7\n1 3 2\n").encode()
    return gzip.compress(text) if name.endswith(".gz") else text


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz", "a.npz"])
@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_file_with_any_damage_reads_as_a_matrix_or_is_refused_as_data(name, data, tmp_path):
    content = bytearray(sample(name))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not content:
            break
    path = write(tmp_path / name, bytes(content))
    try:
        csr = read_matrix(path)
    except DataError as error:
        assert str(error).startswith("read_matrix: ")
    else:
        assert isinstance(csr, CSR)
        as_csr((csr.indptr, csr.indices, csr.values, csr.shape))
