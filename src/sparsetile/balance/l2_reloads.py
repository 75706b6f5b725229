"""How far apart A uses the same row of B: decides whether a product runs in narrow slabs."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.device import SMALLEST_L2_BYTES
from sparsetile.intake.csr import CSR

__all__ = ["l2_reload_factor"]

# The same for every GPU, so that a matrix gets the same tiles on all of them.
CACHE_BYTES = SMALLEST_L2_BYTES
# Most (window, column) pairs; each takes a byte while they are counted.
MOST_CELLS = 2**28
# Of more entries, SAMPLES stretches of rows of as many entries are counted: all would take 40 bytes
# for each entry.
MOST_ENTRIES, SAMPLES, SAMPLED_ENTRIES = 2**27, 8, 2**23


def l2_reload_factor(csr: CSR, order: Tensor | None, row_bytes: int) -> float:
    """Return how often ``row_bytes`` of a row of B come into a cache of ``CACHE_BYTES``.

    Entries are split in row order into runs of as many as the cache holds rows of B; each run reads
    its distinct columns once. 0 if B fits the cache.
    """
    window = max(1, CACHE_BYTES // max(row_bytes, 1))
    if csr.shape[1] <= window or not csr.nnz:
        return 0.0
    if csr.nnz > MOST_ENTRIES:
        return _sampled(csr, order, window)
    read, distinct = _counted(csr, order, window)
    return read / distinct


def _counted(csr: CSR, order: Tensor | None, window: int) -> tuple[int, int]:
    """Return the distinct columns of all runs of ``window`` entries together, and of A."""
    number = torch.arange(csr.nnz, device=csr.device)
    if order is not None:
        lengths = csr.row_lengths()
        ordered = lengths[order]
        start = torch.empty_like(ordered)
        start[order] = torch.cumsum(ordered, 0) - ordered
        row = csr.row_ids()
        number += (start - csr.indptr[:-1])[row]
    window_of = number.div_(window, rounding_mode="floor")
    cells = -(-csr.nnz // window) * csr.shape[1]
    if cells > MOST_CELLS:
        keys = torch.unique(window_of * csr.shape[1] + csr.indices)
        return keys.numel(), int(torch.unique(csr.indices).numel())
    # One mark per (window, column): no sort.
    marks = torch.zeros(cells, dtype=torch.bool, device=csr.device)
    marks.index_fill_(0, window_of.mul_(csr.shape[1]).add_(csr.indices), True)
    columns = marks.reshape(-1, csr.shape[1]).any(0)
    read, distinct = torch.stack([marks.sum(), columns.sum()]).tolist()
    return int(read), int(distinct)


def _sampled(csr: CSR, order: Tensor | None, window: int) -> float:
    """Return about the factor: reads of some stretches stand for those of all rows."""
    rows = csr.shape[0]
    ends = csr.indptr[1:] if order is None else csr.row_lengths()[order].cumsum(0)
    firsts = torch.arange(SAMPLES, device=csr.device) * (csr.nnz // SAMPLES)
    begin = torch.searchsorted(ends, firsts, right=True)
    end = torch.searchsorted(ends, firsts + SAMPLED_ENTRIES, right=True)
    reads = entries = 0
    for first, last in torch.stack([begin, end], 1).tolist():
        stop = min(max(last, first + 1), rows)
        chosen = (
            torch.arange(first, stop, device=csr.device) if order is None else order[first:stop]
        )
        some, _ = csr.select_rows(chosen)
        reads += _counted(some, None, window)[0] if some.nnz else 0
        entries += some.nnz
    distinct = int((csr.column_lengths() > 0).sum())
    return reads * csr.nnz / max(entries, 1) / distinct
