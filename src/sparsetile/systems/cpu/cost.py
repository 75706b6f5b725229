"""The predicted time of a product of ``cpu``.

A sparse product on CPU cores runs at about 0.15 of a dense one per flop, and a row costs a
nanosecond beside its entries; development readings on a Xeon.
"""

from __future__ import annotations

from sparsetile.engines.request import Request

__all__ = ["SPARSE_SHARE", "predict_cpu"]

# Rate of a sparse product over a dense one: matrices with a larger share of entries run as dense.
SPARSE_SHARE = 0.15
_ROW_SECONDS = 1e-9


def predict_cpu(request: Request) -> float:
    """Return the seconds of one product."""
    ceilings = request.machine
    flops = 2.0 * request.csr.nnz * request.n
    rows = request.csr.shape[0] * _ROW_SECONDS
    return ceilings.launch + flops / (ceilings.dense_flops * SPARSE_SHARE) + rows
