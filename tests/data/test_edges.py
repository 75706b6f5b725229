"""Edge lists: what is read, how it is numbered, what is refused."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from sparsetile.core.errors import DataError
from sparsetile.data import edges
from sparsetile.data.edges import read_edge_list
from tests.data.matrix_checks import assert_canonical, dense, is_symmetric

SNAP = b"""# Directed graph (each unordered pair of nodes is saved once): small.txt
# Nodes: 4 Edges: 5
# FromNodeId\tToNodeId
0\t1
0\t2
2\t3\r
3\t0

2\t3
"""


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_snap_file_is_read(tmp_path, packed):
    path = write(tmp_path / "small.txt", gzip.compress(SNAP) if packed else SNAP)
    matrix = read_edge_list(path)
    assert_canonical(matrix)
    expected = np.zeros((4, 4), dtype=bool)
    expected[[0, 0, 2, 3], [1, 2, 3, 0]] = True
    assert (dense(matrix) == expected).all()


def test_a_graph_that_calls_itself_undirected_is_made_symmetric(tmp_path):
    path = write(tmp_path / "u.txt", b"# Undirected graph: u.txt\n0 1\n1 2\n2 2\n")
    assert is_symmetric(read_edge_list(path))
    assert read_edge_list(path).nnz == 5


def test_further_columns_are_ignored(tmp_path):
    path = write(tmp_path / "weights.txt", b"0 1 5 77\n2 0 -9 78\n")
    assert dense(read_edge_list(path))[[0, 2], [1, 0]].all()


def test_a_file_of_many_blocks_reads_as_one(tmp_path, monkeypatch):
    pairs = np.random.default_rng(0).integers(0, 500, size=(3000, 2))
    lines = b"".join(b"%d\t%d\n" % (u, v) for u, v in pairs.tolist())
    path = write(tmp_path / "many.txt", gzip.compress(lines.rstrip(b"\n")))
    whole = dense(read_edge_list(path))
    monkeypatch.setattr(edges, "_BLOCK", 97)
    assert (dense(read_edge_list(path)) == whole).all()
    expected = np.zeros_like(whole)
    expected[pairs[:, 0], pairs[:, 1]] = True
    assert (whole == expected).all()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "a list of edges, got no edge"),
        (b"# only a comment\n\n", "a list of edges, got no edge"),
        (b"1\n2\n", "lines of equal length, two numbers or more, got 1 number a line"),
        (b"1 2\n3\n", "lines of equal length, two numbers or more, got 1 to 2 numbers a line"),
        (b"1 2\n3 4 5\n0 1\n", "lines of equal length, .* got 2 to 3 numbers a line"),
        (b"a b\nc d\n", "lines of whole numbers, got other text, such as b'a b"),
        (b"1 2\n3 4.5\n", "lines of whole numbers, got other text"),
        (b"1,2\n3,4\n", "lines of equal length"),
        (b"<html> <body>\n", "lines of whole numbers, got other text"),
        (b"0 1\n-3 2\n", "numbered from 0, got node -3"),
        (b"0 2000000000\n", "numbered without large gaps, got node 2000000000 among 1 edges"),
        (b"0 99999999999999999999\n", "numbered without large gaps"),
    ],
)
def test_a_bad_edge_list_is_one_clear_error(tmp_path, content, text):
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=f"^read_edge_list: bad.txt must be {text}"):
        read_edge_list(path)


def test_a_line_without_end_is_refused(tmp_path):
    path = write(tmp_path / "bad.txt", b"1 2 " * (2 << 20))
    with pytest.raises(DataError, match=r"bad.txt must be made of lines, got one without end"):
        read_edge_list(path)


def test_a_truncated_gzip_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 10**6, size=(2000, 2)).tolist()
    packed = gzip.compress(b"".join(b"%d %d\n" % (u, v) for u, v in noise))
    path = write(tmp_path / "cut.txt.gz", packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"cut.txt.gz must be a whole gzip file, got a damaged one"):
        read_edge_list(path)


def test_a_decompression_bomb_is_refused(tmp_path):
    lines = gzip.compress(b" " * ((1 << 20) - 1) + b"\n")
    path = write(tmp_path / "bomb.txt.gz", lines * 65)
    with pytest.raises(
        DataError, match=rf"at most {64 << 20} bytes when unpacked, got more \(a de"
    ):
        read_edge_list(path)
