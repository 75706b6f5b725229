"""The predicted time of a product of ``csr``.

Rows of B for entries, most of them from L1, and for distinct (8-row window, column) pairs, then
A, B and C once. Constants were fitted to H200 records of the core matrices, by bytes of an element
(docs/explanation/notes/planning.md).
"""

from __future__ import annotations

from sparsetile.engines.cost import SHORT_WINDOW, GatherModel
from sparsetile.engines.request import Request

__all__ = ["CSR_MODEL", "least_seconds", "predict_rows"]

CSR_MODEL = {
    4: GatherModel(2.25e-6, 6.0, 1.42, 0, 0.50, 1.58, 1.25),
    2: GatherModel(3.4e-6, 2.55, 1.99, 0, 0.455, 1.44, 0.80),
}


def _model(request: Request) -> GatherModel:
    return CSR_MODEL[4 if request.dtype.itemsize >= 4 else 2]


def least_seconds(request: Request) -> float:
    """Return a lower bound for predictions of products of rows or windows.

    Hybrid systems are predicted by an H200's times of tiles and entries. Without this bound tiny
    products, and any on a slower machine, would be predicted faster than A, B and C can be read.
    """
    return _model(request).least(request)


def predict_rows(request: Request) -> float:
    """Return the seconds of one product.

    Pairs are counted only if another candidate counts them; otherwise entries are assumed to be
    random. Counting sorts all entries, and changed no choice among csr, cuSPARSE and dense.
    """
    return _model(request).seconds(request, request.counted_pairs(SHORT_WINDOW))
