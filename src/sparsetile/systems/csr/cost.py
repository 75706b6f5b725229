"""What a product of ``csr`` is predicted to take.

Rows of B for entries, of which L1 holds most, and for distinct (8-row window, column) pairs, then
A, B and C once. Constants were fitted to H200 records of the core matrices, by bytes of an element
(docs/explanation/notes/planning.md).
"""

from __future__ import annotations

from sparsetile.systems.base import Request
from sparsetile.systems.shared.cost import SHORT_WINDOW, GatherModel

__all__ = ["CSR_MODEL", "predict_csr"]

CSR_MODEL = {
    4: GatherModel(2.25e-6, 6.0, 1.42, 0, 0.50, 1.58, 1.25),
    2: GatherModel(3.4e-6, 2.55, 1.99, 0, 0.455, 1.44, 0.80),
}


def predict_csr(request: Request) -> float:
    """Return the seconds of one product.

    Pairs are counted only where another candidate counts them; else entries are taken to lie at
    random. Counting sorts all entries, and has changed no choice among csr, cuSPARSE and dense.
    """
    model = CSR_MODEL[4 if request.dtype.itemsize >= 4 else 2]
    counted = request.counted_pairs(SHORT_WINDOW)
    return model.seconds(request, counted)
