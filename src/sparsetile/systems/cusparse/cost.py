"""The predicted time of a product of ``cusparse``.

The larger of gathers through L2 and everything once through DRAM, at 0.40 of both ceilings: the
mean share of cuSPARSE's best algorithm in H200 records of the core matrices.
"""

from __future__ import annotations

from sparsetile.engines.cost import a_bytes, rows_once
from sparsetile.engines.request import Request

__all__ = ["predict_cusparse"]

_SHARE = 0.40


def predict_cusparse(request: Request) -> float:
    """Return the seconds of one product."""
    csr, row, ceilings = request.csr, request.row_bytes, request.machine
    gathered = row * (csr.nnz + csr.shape[0]) / ceilings.l2_gather
    once = (a_bytes(request) + row * rows_once(csr)) / ceilings.dram
    return (ceilings.launch + max(gathered, once)) / _SHARE
