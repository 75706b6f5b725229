"""Matrix Market files: what is read, and how each kind of damage is named."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch

from sparsetile.core.errors import DataError
from sparsetile.intake import as_csr, read_matrix

BANNER = "%%MatrixMarket matrix coordinate real general\n"
PATTERN = "%%MatrixMarket matrix coordinate pattern general\n"
AGAIN = "The file is damaged, truncated or of another kind: fetch or write it again."
EXAMPLE = np.array([[0.0, 2.0, 0.0], [0.5, 0.0, -3.0]])


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, function="read_matrix"):
    with pytest.raises(DataError) as refused:
        read_matrix(path, function=function)
    return str(refused.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_matrix_market_file_reads_as_scipy_reads_it(packed, tmp_path, dense):
    path = tmp_path / ("a.mtx.gz" if packed else "a.mtx")
    text = io.BytesIO()
    scipy.io.mmwrite(text, sp.coo_array(EXAMPLE), comment="of two rows")
    write(path, gzip.compress(text.getvalue()) if packed else text.getvalue())
    csr = as_csr(path)
    assert csr.values.dtype == torch.float64
    assert torch.equal(dense(csr), torch.from_numpy(EXAMPLE))
    assert torch.equal(dense(as_csr(str(path))), torch.from_numpy(EXAMPLE))


def test_capitals_in_the_name_and_the_header_are_read(tmp_path, dense):
    path = write(
        tmp_path / "A.MTX", BANNER.replace("coordinate real", "Coordinate REAL") + "1 1 1\n1 1 2\n"
    )
    assert dense(read_matrix(path)).item() == 2.0


def test_a_pattern_file_keeps_no_values(tmp_path):
    csr = read_matrix(write(tmp_path / "a.mtx", PATTERN + "% note\n\n3 4 3\n3 1\n1 2\n1 1\n"))
    assert csr.values is None
    assert csr.shape == (3, 4)
    assert (csr.indptr.tolist(), csr.indices.tolist()) == ([0, 2, 2, 3], [0, 1, 0])
    assert csr.entry_map.tolist() == [2, 1, 0]


def test_a_repeated_entry_of_a_pattern_file_counts_twice(tmp_path):
    csr = read_matrix(write(tmp_path / "a.mtx", PATTERN + "2 2 3\n2 1\n1 1\n2 1\n"))
    assert csr.values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("symmetry", "upper"), [("symmetric", 5.0), ("skew-symmetric", -5.0), ("hermitian", 5.0)]
)
def test_half_a_matrix_is_made_whole(symmetry, upper, tmp_path, dense):
    text = f"%%MatrixMarket matrix coordinate real {symmetry}\n2 2 1\n2 1 5\n"
    csr = read_matrix(write(tmp_path / "a.mtx", text))
    assert dense(csr).tolist() == [[0.0, upper], [5.0, 0.0]]


def test_a_symmetric_pattern_is_made_whole_without_values(tmp_path):
    text = "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 3\n"
    csr = read_matrix(write(tmp_path / "a.mtx", text))
    assert csr.values is None
    assert csr.indices.tolist() == [1, 0, 2]


@pytest.mark.parametrize("field", ["integer", "unsigned-integer"])
def test_whole_numbers_in_a_file_become_floats(field, tmp_path):
    text = f"%%MatrixMarket matrix coordinate {field} general\n1 2 2\n1 1 3\n1 2 16777216\n"
    csr = read_matrix(write(tmp_path / "a.mtx", text))
    assert csr.values.dtype == torch.get_default_dtype()
    assert csr.values.tolist() == [3.0, 16777216.0]


def test_non_finite_values_in_a_file_are_ordinary(tmp_path):
    csr = read_matrix(write(tmp_path / "a.mtx", BANNER + "1 3 3\n1 1 nan\n1 2 inf\n1 3 -inf\n"))
    assert csr.values.isnan().tolist() == [True, False, False]
    assert csr.values[1:].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("size", ["0 0 0", "0 5 0", "5 0 0", "3 3 0"])
def test_a_file_without_entries_is_an_empty_matrix(size, tmp_path, dense):
    csr = read_matrix(write(tmp_path / "a.mtx", BANNER + size))
    rows, columns, _ = map(int, size.split())
    assert torch.equal(dense(csr), torch.zeros(rows, columns, dtype=torch.float64))


def test_a_comment_longer_than_any_buffer_is_skipped(tmp_path):
    text = BANNER + "%" + "x" * 200_000 + "\n1 1 1\n1 1 2\n"
    assert read_matrix(write(tmp_path / "a.mtx", text)).values.tolist() == [2.0]


@pytest.mark.parametrize("packed", [False, True])
def test_a_last_line_without_an_end_is_read(packed, tmp_path):
    # Left to itself, scipy's reader runs off the end of this file in search of a line feed.
    content = (BANNER + "1 1 1\n1 1 2./").encode() + b"\x94"
    path = tmp_path / ("a.mtx.gz" if packed else "a.mtx")
    write(path, gzip.compress(content) if packed else content)
    assert read_matrix(path).values.tolist() == [2.0]


BROKEN_MARKET = {
    "empty": ("", "a Matrix Market file that begins with %%MatrixMarket, got no such line."),
    "no banner": (
        "3 3 1\n1 1 1\n",
        "a Matrix Market file that begins with %%MatrixMarket, got no such line.",
    ),
    "binary": (
        bytes(range(256)) * 20,
        "a Matrix Market file that begins with %%MatrixMarket, got no such line.",
    ),
    "short banner": (
        "%%MatrixMarket matrix coordinate real\n1 1 1\n1 1 1\n",
        "headed '%%MatrixMarket matrix coordinate FIELD SYMMETRY', "
        "got '%%MatrixMarket matrix coordinate real'.",
    ),
    "vector": (
        "%%MatrixMarket vector coordinate real general\n1 1\n1 1\n",
        "headed '%%MatrixMarket matrix coordinate FIELD SYMMETRY', "
        "got '%%MatrixMarket vector coordinate real general'.",
    ),
    "skew pattern": (
        "%%MatrixMarket matrix coordinate pattern skew-symmetric\n2 2 1\n2 1\n",
        "free of contradictions, got a pattern (no signs) that is skew-symmetric.",
    ),
    "symmetric rectangle": (
        "%%MatrixMarket matrix coordinate real symmetric\n2 3 1\n2 1 1\n",
        "square, being symmetric, got 2 x 3.",
    ),
    "header alone": (BANNER, "sized by a line 'ROWS COLUMNS ENTRIES', got the end of the file."),
    "two sizes": (BANNER + "3 3\n1 1 1\n", "sized by a line 'ROWS COLUMNS ENTRIES', got '3 3'."),
    "four sizes": (BANNER + "3 3 1 1\n", "sized by a line 'ROWS COLUMNS ENTRIES', got '3 3 1 1'."),
    "sizes in words": (
        BANNER + "nan 3 1\n1 1 1\n",
        "sized by a line 'ROWS COLUMNS ENTRIES', got 'nan 3 1'.",
    ),
    "negative rows": (
        BANNER + "-3 3 1\n1 1 1\n",
        "sized by ROWS and COLUMNS from 0 to 2147483647 and ENTRIES from 0, got '-3 3 1'.",
    ),
    "negative entries": (
        BANNER + "3 3 -1\n1 1 1\n",
        "sized by ROWS and COLUMNS from 0 to 2147483647 and ENTRIES from 0, got '3 3 -1'.",
    ),
    "too many columns": (
        BANNER + "3 2147483648 1\n1 1 1\n",
        "sized by ROWS and COLUMNS from 0 to 2147483647 and ENTRIES from 0, got '3 2147483648 1'.",
    ),
    "a size of 5000 digits": (
        BANNER + "3 3 " + "9" * 5000 + "\n1 1 1\n",
        f"sized by counts of at most 19 digits, got '3 3 {'9' * 76}'.",
    ),
    "10^18 entries": (
        BANNER + "3 3 1000000000000000000\n1 1 1\n",
        "large enough for the 1000000000000000000 entries its header announces, got 76 bytes.",
    ),
    "more entries than bytes": (
        PATTERN + "3 3 20\n1 1\n",
        "large enough for the 20 entries its header announces, got 60 bytes.",
    ),
    "rows out of proportion": (
        BANNER + "2147483647 2147483647 1\n1 1 1\n",
        "a matrix with rows that the size of the file bears out, got 2147483647 rows.",
    ),
    "truncated": (
        BANNER + "3 3 2\n1 1 1.0\n",
        "a Matrix Market file, got an error in reading it: "
        "Truncated file. Expected another 1 lines.",
    ),
    "overlong": (
        BANNER + "3 3 1\n1 1 1.0\n2 2 2.0\n",
        "a Matrix Market file, got an error in reading it: "
        "Line 4: Too many lines in file (file too long).",
    ),
    "row zero": (
        BANNER + "3 3 1\n0 1 1.0\n",
        "a Matrix Market file, got an error in reading it: Line 3: Row index out of bounds.",
    ),
    "column too large": (
        BANNER + "3 3 1\n1 4 1.0\n",
        "a Matrix Market file, got an error in reading it: Line 3: Column index out of bounds.",
    ),
    "index beyond int32": (
        BANNER + "3 3 1\n4294967297 1 1\n",
        "a Matrix Market file, got an error in reading it: Line 3: Integer out of range.",
    ),
    "NUL, which would crash the reader": (
        BANNER + "1 1 1\n1 1 2\0\n",
        "a Matrix Market file, got an error in reading it: NUL in text.",
    ),
    "value missing": (
        BANNER + "3 3 1\n1 1  \n",
        "a Matrix Market file, got an error in reading it: Line 3: Invalid floating-point value.",
    ),
}


@pytest.mark.parametrize("case", BROKEN_MARKET)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_matrix_market_file_is_refused_with_one_clear_text(case, packed, tmp_path):
    content, text = BROKEN_MARKET[case]
    content = content if isinstance(content, bytes) else content.encode()
    if packed:
        if "bytes" in text or "bears out" in text or "Truncated" in text:
            pytest.skip("what a packed file may hold is bounded more widely: tested apart")
        path = write(tmp_path / "a.mtx.gz", gzip.compress(content))
    else:
        path = write(tmp_path / "a.mtx", content)
    assert refusal(path) == f"read_matrix: {path.name} must be {text} {AGAIN}"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (
            "matrix array real general",
            "a Matrix Market file of format coordinate, got 'array'. "
            "Convert it with scipy.sparse.coo_array and mmwrite.",
        ),
        (
            "matrix coordinate quaternion general",
            "a Matrix Market file of field real or double or complex or integer or "
            "unsigned-integer or pattern, got 'quaternion'. Write it with one of these.",
        ),
        (
            "matrix coordinate real odd",
            "a Matrix Market file of symmetry general or symmetric or skew-symmetric or hermitian, "
            "got 'odd'. Write it as general.",
        ),
    ],
)
def test_a_kind_of_matrix_market_file_that_is_not_read_is_named(header, text, tmp_path):
    path = write(tmp_path / "a.mtx", f"%%MatrixMarket {header}\n1 1 1\n1 1 1\n")
    assert refusal(path, "plan") == f"plan: a.mtx must be {text}"


def test_whole_numbers_in_a_file_that_a_float_would_round_are_refused(tmp_path):
    text = "%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 16777217\n"
    assert refusal(write(tmp_path / "a.mtx", text)) == (
        "read_matrix: values in a.mtx must be whole numbers that float32 holds exactly, "
        "got int64 that it would round (entry 0). "
        "Convert it to the float type you want, for instance with .to(torch.float64)."
    )


def test_a_packed_file_cannot_announce_more_than_it_can_hold(tmp_path):
    path = write(
        tmp_path / "a.mtx.gz", gzip.compress((BANNER + "3 3 1000000000\n1 1 1\n").encode())
    )
    assert refusal(path) == (
        "read_matrix: a.mtx.gz must be large enough for the 1000000000 entries its header "
        f"announces, got {path.stat().st_size} bytes. {AGAIN}"
    )


@pytest.mark.parametrize("keep", [5, 40, -20, -1])
def test_a_truncated_packed_file_is_refused(keep, tmp_path):
    rng = np.random.default_rng(0)
    lines = "".join(f"1 {column} {rng.random()}\n" for column in range(1, 2001))
    packed = gzip.compress((BANNER + "1 2000 2000\n" + lines).encode())
    path = write(tmp_path / "a.mtx.gz", packed[:keep])
    assert refusal(path).startswith(
        "read_matrix: a.mtx.gz must be a Matrix Market file, got an error in reading it: "
    )


def test_a_file_that_only_claims_to_be_packed_is_refused(tmp_path):
    path = write(tmp_path / "a.mtx.gz", BANNER + "1 1 1\n1 1 1\n")
    assert refusal(path) == (
        "read_matrix: a.mtx.gz must be a Matrix Market file, "
        f"got an error in reading it: Not a gzipped file (b'%%'). {AGAIN}"
    )
