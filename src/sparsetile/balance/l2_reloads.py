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


def l2_reload_factor(csr: CSR, order: Tensor | None, row_bytes: int) -> float:
    """Return how often ``row_bytes`` of a row of B come into a cache of ``CACHE_BYTES``.

    Entries are split in row order into runs of as many as the cache holds rows of B; each run reads
    its distinct columns once. 0 if B fits the cache.
    """
    window = max(1, CACHE_BYTES // max(row_bytes, 1))
    if csr.shape[1] <= window or not csr.nnz:
        return 0.0
    lengths = csr.row_lengths()
    if order is None:
        number = torch.arange(csr.nnz, device=csr.device)
    else:
        ordered = lengths[order]
        start = torch.empty_like(ordered)
        start[order] = torch.cumsum(ordered, 0) - ordered
        row = csr.row_ids()
        number = start[row] + torch.arange(csr.nnz, device=csr.device) - csr.indptr[row]
    window_of = number // window
    cells = -(-csr.nnz // window) * csr.shape[1]
    if cells > MOST_CELLS:
        keys = torch.unique(window_of * csr.shape[1] + csr.indices)
        return keys.numel() / int(torch.unique(csr.indices).numel())
    # One mark per (window, column): no sort.
    marks = torch.zeros(cells, dtype=torch.bool, device=csr.device)
    marks[window_of * csr.shape[1] + csr.indices] = True
    columns = marks.reshape(-1, csr.shape[1]).any(0)
    read, distinct = torch.stack([marks.sum(), columns.sum()]).tolist()
    return float(read / distinct)
