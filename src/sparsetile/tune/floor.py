"""The floor: the least time physics allows for one product on a machine.

floor = max(launch, compulsory, min(g1, max(g16, f16), max(g64, f64))). *compulsory* moves
A, the used rows of B, and C once through DRAM; gW gathers the distinct (window of W rows, column)
pairs of B through L2; fW multiplies them on Tensor Cores. The floor holds for the given row
order: an order that lowers the distinct pairs lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsetile.core.device import Machine
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR

__all__ = ["Floor", "floor_seconds"]


@dataclass(frozen=True)
class Floor:
    """The floor and which term set it."""

    seconds: float
    term: str


def floor_seconds(
    csr: CSR, n: int, dtype: torch.dtype, ceilings: Machine, perm: torch.Tensor | None = None
) -> Floor:
    """Return the least time of one product of width ``n`` on a machine."""
    item = dtype.itemsize
    rows, _ = csr.shape
    used_columns = int(torch.unique(csr.indices).numel()) if csr.nnz else 0
    value_bytes = 0 if csr.values is None else item
    compulsory = ((4 + value_bytes) * csr.nnz + item * n * (used_columns + rows)) / ceilings.dram

    def gather(pairs: int) -> float:
        return item * n * (pairs + rows) / ceilings.l2_gather

    speedup = 4 / item  # 16-bit types double the Tensor Core rate
    routes = {"gather by row": gather(csr.nnz)}
    for window, rate in ((16, ceilings.tensor_flops_16), (64, ceilings.tensor_flops_64)):
        pairs = distinct_pairs(csr, window, perm)
        flops = 2 * window * pairs * n / (rate * speedup)
        routes[f"gather by {window}-row window"] = max(gather(pairs), flops)
    best = min(routes, key=routes.__getitem__)
    terms = {"launch": ceilings.launch, "compulsory traffic": compulsory, best: routes[best]}
    top = max(terms, key=terms.__getitem__)
    return Floor(terms[top], top)
