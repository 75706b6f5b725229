"""Row pieces of a matrix with more entries than kernels number with 32 bits.

A piece is a range of whole rows. Its columns and values are where A has them, from its first entry
on: kernels and schedules see a matrix of fewer entries, and A is never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsetile.core.errors import value_error

__all__ = ["RowPiece", "checked_pieces", "row_pieces"]

# What one launch can number.
MAX_ENTRIES = 2**31


class RowPiece(NamedTuple):
    """Rows from ``first_row`` to before ``end_row`` and their entries."""

    first_row: int
    end_row: int
    begin: int
    end: int

    @property
    def rows(self) -> slice:
        """The piece's rows of A and C."""
        return slice(self.first_row, self.end_row)

    @property
    def entries(self) -> slice:
        """The piece's entries of A."""
        return slice(self.begin, self.end)

    def pointers(self, indptr: Tensor) -> Tensor:
        """Return the piece's own row pointers, which begin at 0."""
        return indptr[self.first_row : self.end_row + 1] - self.begin


def row_pieces(indptr: Tensor, limit: int) -> list[RowPiece]:
    """Cut rows into the fewest pieces of fewer than ``limit`` entries, about equally large.

    A row of more entries is a piece of its own. Waits for a GPU, once for each piece.
    """
    rows, total = indptr.shape[0] - 1, int(indptr[-1])
    room = max(limit - 1, 1)
    share = -(-total // max(-(-total // room), 1))
    pieces, first_row, begin = list[RowPiece](), 0, 0
    while first_row < rows:
        # Ends once it has its share, if that is within the limit: a few long rows add no piece.
        enough = torch.searchsorted(indptr, begin + share)
        most = torch.searchsorted(indptr, begin + room, right=True) - 1
        near = int(torch.minimum(enough, most))
        end_row = min(max(near, first_row + 1), rows)
        end = int(indptr[end_row])
        if end == total and end - begin <= room:
            end_row = rows  # with the empty rows at the end
        pieces.append(RowPiece(first_row, end_row, begin, end))
        first_row, begin = end_row, end
    return pieces


def checked_pieces(
    function: str, indptr: Tensor, indices: Tensor, cols: int, limit: int
) -> list[RowPiece]:
    """Return the pieces of CSR arrays as they came; raise if an index is wrong.

    Waits for a GPU: kernels would report a wrong index by its place in a piece, and later.
    """
    entries = indices.shape[0]
    steps = indptr[1:] < indptr[:-1]
    facts = [indptr[0], indptr[-1], steps.any(), *torch.aminmax(indices)]
    first, last, falls, low, high = torch.stack([each.to(torch.int64) for each in facts]).tolist()
    if first != 0 or last != entries or falls:
        found = f"{last} at the end" if not falls else "descending ones"
        raise value_error(
            function, "row pointers", f"ascending from 0 to {entries}, the number of entries",
            f"{first} at row 0" if first else found, "Correct A and multiply again",
        )  # fmt: skip
    if low < 0 or high >= cols:
        raise value_error(
            function, "column indices", f"from 0 to {cols - 1} (rows of B - 1)",
            low if low < 0 else high, "Correct A and multiply again",
        )  # fmt: skip
    pieces = row_pieces(indptr, limit)
    longest = max(piece.end - piece.begin for piece in pieces)
    if longest >= MAX_ENTRIES:
        raise value_error(
            function, "row pointers", "of rows with fewer than 2^31 entries", f"{longest} in one",
            "Add up entries of the same place",
        )  # fmt: skip
    return pieces
