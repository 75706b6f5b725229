"""Equation 1 of Voltrix-SpMM: the cost of a product on windows of tiles, and its fit.

    seconds = tile * tiles * D + window * windows * D + fixed

with D the width of B (in any unit, the same for all). ``tile`` is cf1 (loading rows of B and
multiplying), ``window`` cf2 (writing rows of C), ``fixed`` cf3. Coefficients are data: they belong
to one kernel on one GPU, and are fitted to measured times by linear regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsetile.core.errors import value_error

__all__ = ["CostModel", "Fit", "Reading", "fit_cost_model"]


@dataclass(frozen=True)
class CostModel:
    """Coefficients of Equation 1; schedules depend only on the ratio of ``tile`` and ``window``."""

    tile: float = 1.0
    window: float = 4.0
    fixed: float = 0.0

    def seconds(self, tiles: float, windows: float, width: float) -> float:
        """Return the cost of a product, in the unit of the coefficients."""
        return (self.tile * tiles + self.window * windows) * width + self.fixed


@dataclass(frozen=True)
class Reading:
    """One measured product."""

    tiles: float
    windows: float
    width: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted model with the share of the variance that it explains (R²)."""

    model: CostModel
    r2: float


def fit_cost_model(readings: Sequence[Reading]) -> Fit:
    """Fit Equation 1 by linear regression with coefficients of at least 0."""
    if len(readings) < 3:
        raise value_error(
            "fit_cost_model", "readings", "at least 3", len(readings), "Measure more products"
        )
    terms = np.array([[r.tiles * r.width, r.windows * r.width, 1.0] for r in readings])
    seconds = np.array([r.seconds for r in readings])
    scale = np.abs(terms).max(axis=0)
    if not scale.all() or np.linalg.matrix_rank(terms / scale) < 3:
        raise value_error(
            "fit_cost_model", "readings", "of different windows, tiles and widths",
            "readings that do not tell the coefficients apart", "Measure other matrices, too",
        )  # fmt: skip
    from scipy.optimize import nnls  # slow to import

    found, error = nnls(terms / scale, seconds)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1.0 - float(error) ** 2 / spread if spread else 1.0
    tile, window, fixed = (found / scale).tolist()
    return Fit(CostModel(tile, window, fixed), r2)
