"""A rank's rows of A, for every form of A: whole, in shares, on one rank, or in files."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.checks import MAX_DIM, dimension, matrix_shape
from sparsetile.core.errors import value_error
from sparsetile.dist.partition import Partition
from sparsetile.intake import CSR
from sparsetile.intake.canonical import Names, from_compressed
from sparsetile.reorder.permutation import positions

__all__ = ["Found", "Share", "check_entries", "content_digest", "renumbered", "rows_of"]


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's rows of A, for :func:`sparsetile.dist.plan`; no rank holds the whole matrix.

    Attributes
    ----------
    matrix : sparse matrix [rows, K]
        Anything that :func:`sparsetile.plan` accepts. Column indices are those of the whole A.
    first_row : int
        Index of its first row in A. The ranks' shares are consecutive.
    shape : (M, K)
        Of the whole A.
    """

    matrix: Any
    first_row: int
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        dimension("Share", "first_row", self.first_row)
        object.__setattr__(self, "shape", matrix_shape("Share", self.shape))


@dataclass(frozen=True, eq=False)
class Found:
    """The result of reading A on a rank."""

    # CSR [own rows, K]: in the partition's numbering of columns. For a :class:`Share`, its
    # ``entry_map`` maps the caller's entries to these.
    csr: CSR
    partition: Partition
    shape: tuple[int, int]
    source: str
    # Returns this rank's current values, one per entry of ``csr``, if the
    # caller's require grad.
    follow: Callable[[], Tensor | None] | None = None


def rows_of(csr: CSR, rows: Tensor) -> CSR:
    """Return some rows of a matrix, without its ``entry_map``."""
    if rows.numel() and int(rows[-1]) - int(rows[0]) + 1 == rows.numel():
        first, last = int(rows[0]), int(rows[-1]) + 1
        if bool((rows[1:] > rows[:-1]).all()):  # a run: slices, no gather
            begin, end = int(csr.indptr[first]), int(csr.indptr[last])
            return CSR(
                csr.indptr[first : last + 1] - begin,
                csr.indices[begin:end],
                None if csr.values is None else csr.values[begin:end],
                (rows.numel(), csr.shape[1]),
            )
    return csr.select_rows(rows.to(csr.device))[0]


def renumbered(csr: CSR, partition: Partition, part: int) -> CSR:
    """Return one share of a whole matrix, columns in the partition's order."""
    mine = rows_of(csr, partition.ids(part))
    if partition.order is None:
        return mine
    place = positions(partition.order).to(csr.device)
    return from_compressed(
        Names("plan"), mine.indptr, place[mine.indices.long()], mine.values, mine.shape
    )


def content_digest(csr: CSR) -> str:
    """Return a short digest of a matrix, to detect that ranks have different ones."""
    parts = [csr.indptr, csr.indices, *([] if csr.values is None else [csr.values.detach()])]
    found = 0
    for part in parts:
        flat = part.cpu().contiguous().reshape(-1)
        if flat.numel():
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return f"{csr.shape[0]}x{csr.shape[1]}, {csr.nnz} entries, content {found:08x}"


def check_entries(function: str, entries: int) -> None:
    """Raise for a share with too many entries for a plan."""
    if entries > MAX_DIM:
        raise value_error(
            function, "a rank's share", f"below {MAX_DIM + 1} entries", entries,
            "Use more ranks, or a partition that balances entries",
        )  # fmt: skip
