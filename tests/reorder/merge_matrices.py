"""Matrices whose order by merging is compared: by tensor operations and by kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["MERGE_MATRICES", "merge_matrix"]

# Name -> rows, columns, entries.
MERGE_MATRICES = {
    "no row": (0, 5, 0),
    "no entry": (9, 5, 0),
    "one row": (1, 40, 17),
    "two rows": (2, 40, 30),
    "one column": (70, 1, 50),
    "three rows": (3, 9, 20),
    "65 rows": (65, 30, 300),
    "random": (1500, 400, 6000),
    "wide": (300, 2**31 - 1, 900),
    "power law": (1200, 1200, 9000),
    "band": (1100, 1100, 5500),
    "equal rows": (1300, 500, 13000),
    "one dense row": (400, 3000, 1200),
    "rows of a thousand": (40, 4000, 40000),
    "mostly empty": (3000, 300, 400),
}


def _columns(name: str, rows: Tensor, cols: int, draw: torch.Generator) -> Tensor:
    chance = torch.rand(rows.numel(), generator=draw, dtype=torch.float64)
    if name == "power law":
        chance = chance**4
    if name == "equal rows":  # nine families
        return (rows % 9 * 37 + (chance * 30).long() * 11) % cols
    if name == "band":
        return (rows + (chance * 7).long()).clamp(max=cols - 1)
    return (chance * cols).long()


def merge_matrix(name: str) -> CSR:
    """Return a pattern; every fifth row of most has no entry."""
    height, cols, count = MERGE_MATRICES[name]
    draw = torch.Generator().manual_seed(height + count)
    rows = torch.randint(0, max(height, 1), (count,), generator=draw)
    if height > 9 and name != "band":
        rows = torch.where(rows % 5 == 2, rows - 1, rows)
    keys = rows * cols + _columns(name, rows, cols, draw)
    if name == "one dense row":
        keys = torch.cat([keys, 7 * cols + torch.arange(cols)])
    keys = torch.unique(keys)
    indptr = torch.zeros(height + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=height), 0, out=indptr[1:])
    return CSR(indptr, (keys % cols).to(torch.int32), None, (height, cols))
