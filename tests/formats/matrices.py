"""Small matrices drawn by hypothesis, and their dense form: shared by the tests of tile formats."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR


@st.composite
def matrices(draw: st.DrawFn, most: int = 150) -> tuple[CSR, Tensor | None]:
    """A small matrix with values 1, 2, 3, ... and, sometimes, an order of its rows."""
    rows, cols = draw(st.integers(0, most)), draw(st.integers(0, most))
    cells = st.integers(0, max(rows * cols - 1, 0))
    chosen = sorted(draw(st.sets(cells, max_size=150))) if rows * cols else []
    row = torch.tensor([cell // cols for cell in chosen], dtype=torch.int64)
    column = torch.tensor([cell % cols for cell in chosen], dtype=torch.int32)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(row, minlength=rows), 0)
    order = draw(st.one_of(st.none(), st.integers(0, 2**32)))
    csr = CSR(indptr, column, torch.arange(1.0, len(chosen) + 1), (rows, cols))
    if order is None:
        return csr, None
    return csr, torch.randperm(rows, generator=torch.Generator().manual_seed(order))


def dense_of(csr: CSR, order: Tensor | None = None) -> Tensor:
    """A as a dense matrix, its rows in ``order``."""
    dense = torch.zeros(csr.shape)
    dense[csr.row_ids(), csr.indices.long()] = csr.values.float()
    return dense if order is None else dense[order]
