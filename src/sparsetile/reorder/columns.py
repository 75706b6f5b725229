"""Column order: rows of B that are used together are stored together (Acc-SpMM, section 4.3.1).

A row order fixes which rows of A are processed at the same time. Columns of A are numbered by their
first use in that order, and B's rows are permuted accordingly, so that neighbouring rows of A read
neighbouring rows of B. The sharing of columns does not change, only B's layout in memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import Permutation, positions

__all__ = ["first_use", "with_columns"]


def first_use(csr: CSR, permutation: Permutation) -> Tensor:
    """Order columns by the first row that uses them; equal ones as given, unused ones last."""
    place = csr.row_ids()
    if permutation.perm is not None:
        place = positions(permutation.perm)[place]
    first = torch.full((csr.shape[1],), csr.shape[0], dtype=torch.int64, device=csr.device)
    first.scatter_reduce_(0, csr.indices.to(torch.int64), place, "amin")
    return torch.argsort(first, stable=True)


def with_columns(csr: CSR, order: Tensor) -> tuple[CSR, Tensor]:
    """Return A with column ``order[j]`` numbered j, and the old position of its entries.

    The result is canonical and still takes values in the order of the caller's entries.
    """
    columns = positions(order)[csr.indices.to(torch.int64)]
    entries = torch.argsort(csr.row_ids() * csr.shape[1] + columns)
    moved = positions(entries)
    return (
        replace(
            csr,
            indices=columns[entries].to(torch.int32),
            values=None if csr.values is None else csr.values[entries],
            entry_map=moved if csr.entry_map is None else moved[csr.entry_map],
        ),
        entries,
    )
