"""Rows of a very large matrix in parts, for counts that sort entries.

A sort of all entries, with what follows, temporarily takes up to 60 bytes an entry: over 7 GB for a
graph of 115 million edges whose product needs 2. Counts by windows of rows can be made part by part
instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["counted_in_parts", "row_parts"]

# Entries counted at once.
PART_ENTRIES = 2**24


def counted_in_parts(csr: CSR, height: int) -> bool:
    """Whether counts by windows of ``height`` rows should be made part by part."""
    return csr.nnz > PART_ENTRIES and csr.shape[0] > height


def row_parts(
    csr: CSR, order: Tensor | None, multiple: int, overlap: int = 0
) -> Iterator[tuple[int, CSR]]:
    """Yield (number of its own rows, CSR without values) of parts of A's rows, in ``order``.

    Rows of a part are a multiple of ``multiple``, but for the last; ``overlap`` rows of the next
    part are appended.
    """
    rows = csr.shape[0]
    lengths = csr.row_lengths() if order is None else csr.row_lengths()[order]
    ends = torch.cumsum(lengths, 0)
    marks = torch.arange(PART_ENTRIES, csr.nnz, PART_ENTRIES, device=csr.device)
    cuts = torch.searchsorted(ends, marks).div(multiple, rounding_mode="floor").add_(1)
    bounds = [0, *sorted({min(cut * multiple, rows) for cut in cuts.tolist()} | {rows})]
    for begin, end in itertools.pairwise(bounds):
        last = min(end + overlap, rows)
        if order is not None:
            part, _ = csr.with_values(None).select_rows(order[begin:last])
        else:
            indptr = csr.indptr[begin : last + 1]
            first, stop = int(indptr[0]), int(indptr[-1])
            indices = csr.indices[first:stop]
            part = CSR(indptr - first, indices, None, (last - begin, csr.shape[1]))
        yield end - begin, part
