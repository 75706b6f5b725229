"""Edge lists as SNAP publishes them: lines ``source target``, comments after ``#``, gzip or not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from sparsetile.core.checks import MAX_DIM
from sparsetile.core.errors import DataError, describe
from sparsetile.data.archive import LimitedGzip
from sparsetile.data.sampling import Keys, csr_from_keys, distinct
from sparsetile.intake.csr import CSR

__all__ = ["read_edge_list"]

_BLOCK = 4 << 20
_COMMENT = re.compile(rb"^[ \t]*[#%].*$", re.MULTILINE)
_UNDIRECTED = re.compile(rb"^#\s*Undirected graph", re.MULTILINE | re.IGNORECASE)
# Row pointers of this many rows take 128 MiB: up to it any numbering is accepted.
_FREE_ROWS = 1 << 24
_ROWS_PER_EDGE = 64


def read_edge_list(path: Path, *, function: str = "read_edge_list") -> CSR:
    """Read an edge list (``.txt`` or ``.txt.gz``) as a square pattern.

    A line has two node numbers; further columns are ignored, repeated edges are merged. The matrix
    has (largest number + 1) rows, as in the published sizes of most graphs. If the file calls its
    graph undirected, each edge is stored in both directions. Errors begin with ``function``.
    """
    pairs: list[Keys] = []
    undirected = False
    for text in _text_blocks(path, function):
        undirected = undirected or (b"#" in text and _UNDIRECTED.search(text) is not None)
        pairs.append(_parse(path, function, text))
    edges = np.concatenate(pairs) if pairs else np.empty((0, 2), dtype=np.int64)
    if edges.size == 0:
        raise _bad(path, function, "a list of edges", "no edge", "Check that it is the right file")
    if edges.min() < 0:
        raise _bad(path, function, "numbered from 0", f"node {edges.min()}", "Renumber the nodes")
    source, target = edges[:, 0], edges[:, 1]
    rows = int(max(source.max(), target.max())) + 1
    if rows > min(MAX_DIM, max(_FREE_ROWS, _ROWS_PER_EDGE * source.size)):
        raise _bad(
            path,
            function,
            "numbered without large gaps",
            f"node {rows - 1} among {source.size} edges",
            "Renumber the nodes",
        )
    keys = source * rows + target
    if undirected:
        keys = np.concatenate([keys, target * rows + source])
    # The generator is for values, of which a pattern has none.
    rng = np.random.default_rng(0)
    return csr_from_keys(distinct(keys), (rows, rows), weighted=False, rng=rng)


def _open(path: Path, function: str) -> BinaryIO:
    with open(path, "rb") as probe:
        packed = probe.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, LimitedGzip(path, function)) if packed else open(path, "rb")


def _text_blocks(path: Path, function: str) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines."""
    rest = b""
    with _open(path, function) as stream:
        while block := stream.read(_BLOCK):
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                yield rest + head
                rest = tail
            else:
                rest += tail
            if len(rest) > _BLOCK:
                raise _bad(path, function, "made of lines", "one without end", "Check the file")
    if rest:
        yield rest


def _parse(path: Path, function: str, text: bytes) -> Keys:
    """Return the first two columns of a block of lines, int64 [edges, 2]."""
    if b"#" in text or b"%" in text:
        text = _COMMENT.sub(b"", text)
    columns = _columns(path, function, text)
    if columns == 0:
        return np.empty((0, 2), dtype=np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # older NumPy only warns on bad text
        try:
            numbers = np.fromstring(text, dtype=np.int64, sep=" ")  # type: ignore[call-overload]
        except (ValueError, DeprecationWarning):
            raise _bad(
                path,
                function,
                "lines of whole numbers",
                f"other text, such as {text.strip()[:40]!r}",
                "Check that it is an edge list",
            ) from None
    return cast(Keys, numbers.reshape(-1, columns)[:, :2])


def _columns(path: Path, function: str, text: bytes) -> int:
    """Return the number of words of every line; 0 if all lines are blank."""
    byte = np.frombuffer(text + b"\n", dtype=np.uint8)
    blank = byte <= 32
    begins = ~blank
    begins[1:] &= blank[:-1]
    line_ends = np.flatnonzero(byte == 10)
    words = np.diff(np.cumsum(begins, dtype=np.int32)[line_ends], prepend=0)
    words = words[words > 0]
    if words.size == 0:
        return 0
    low, high = int(words.min()), int(words.max())
    if low != high or low < 2:
        got = f"{low} to {high} numbers a line" if low != high else f"{low} number a line"
        raise _bad(
            path, function, "lines of equal length, two numbers or more", got, "Check the file"
        )
    return low


def _bad(path: Path, function: str, expected: str, actual: object, remedy: str) -> DataError:
    return DataError(describe(function, path.name, expected, actual, remedy))
