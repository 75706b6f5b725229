"""What a product of ``csr`` is predicted to take.

Rows of B for entries, of which L1 holds most, and for distinct (8-row window, column) pairs, then
A, B and C once. Constants were fitted to H200 records of the core matrices, by bytes of an element
(docs/explanation/notes/planning.md).
"""

from __future__ import annotations

from sparsetile.systems.base import Request
from sparsetile.systems.shared.cost import SHORT_WINDOW, GatherModel

__all__ = ["CSR_MODEL", "least_seconds", "predict_csr"]

CSR_MODEL = {
    4: GatherModel(2.25e-6, 6.0, 1.42, 0, 0.50, 1.58, 1.25),
    2: GatherModel(3.4e-6, 2.55, 1.99, 0, 0.455, 1.44, 0.80),
}


def _model(request: Request) -> GatherModel:
    return CSR_MODEL[4 if request.dtype.itemsize >= 4 else 2]


def least_seconds(request: Request) -> float:
    """Return the seconds that no product of rows or windows is predicted under.

    Hybrid systems are predicted by times of an H200 for tiles and entries; without this bound tiny
    products, and any on a slower machine, would be predicted faster than A, B and C can be read.
    """
    return _model(request).least(request)


def predict_csr(request: Request) -> float:
    """Return the seconds of one product.

    Pairs are counted only where another candidate counts them; else entries are taken to lie at
    random. Counting sorts all entries, and has changed no choice among csr, cuSPARSE and dense.
    """
    return _model(request).seconds(request, request.counted_pairs(SHORT_WINDOW))
