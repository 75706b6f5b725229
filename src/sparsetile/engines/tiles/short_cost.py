"""The predicted time of a product of ``acc``.

A row of B for each distinct (8-row window, column) pair, with 148 to 155 bytes for decoding it,
then B and C once. Constants were fitted to H200 records of the core matrices, by bytes of an
element (docs/explanation/notes/planning.md). A's own bytes are hidden behind the gathers.
"""

from __future__ import annotations

import math

from sparsetile.engines.cost import SHORT_WINDOW, GatherModel
from sparsetile.engines.request import Request

__all__ = ["ACC_MODEL", "predict_short_windows"]

ACC_MODEL = {
    4: GatherModel(6.6e-6, math.inf, 1.05, 148, math.inf, 1.79, 1.29),
    2: GatherModel(6.9e-6, math.inf, 0.89, 155, math.inf, 2.0, 1.145),
}


def predict_short_windows(request: Request) -> float:
    """Return the seconds of one product."""
    model = ACC_MODEL[4 if request.dtype.itemsize >= 4 else 2]
    return model.seconds(request, request.pairs(SHORT_WINDOW))
