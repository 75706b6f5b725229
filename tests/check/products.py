"""Exact products for the tests of the judge, by a way that shares nothing with its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR


def entries(csr: CSR) -> Tensor:
    """A written out in float64."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    full = torch.zeros(csr.shape, dtype=torch.float64)
    full[csr.row_ids(), csr.indices.long()] = values.double()
    return full


def exact(csr: CSR, B: Tensor, reduce: str = "sum") -> Tensor:
    """The product of finite operands in float64."""
    full, B = entries(csr), B.double()
    if reduce in ("sum", "mean"):
        lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
        return full @ B / (lengths if reduce == "mean" else 1)
    terms = full.unsqueeze(2) * B.unsqueeze(0)
    never = -torch.inf if reduce == "max" else torch.inf
    terms = terms.masked_fill((full == 0).unsqueeze(2), never)
    best = terms.amax(1) if reduce == "max" else terms.amin(1)
    return torch.where(csr.row_lengths().unsqueeze(1) == 0, torch.zeros_like(best), best)


def row_by_row(csr: CSR, B: Tensor) -> Tensor:
    """The sum, entry by entry, so that no invented zero meets an Inf or NaN of B."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    C = torch.zeros(csr.shape[0], B.shape[1], dtype=torch.float64)
    places = zip(csr.row_ids().tolist(), csr.indices.tolist(), values.double(), strict=True)
    for row, column, value in places:
        C[row] += value * B[column].double()
    return C
