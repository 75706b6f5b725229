"""What ``sparsetile tune --fit`` does: Equation 1 of Voltrix-SpMM and each system's cost model,
fitted on the GPU at hand.

For Equation 1, products of generated windows, all with the same number of tiles, are timed at
several widths. Four fifths of them are fitted to; R² is that of the others, as in the paper. The
schedule of ``voltrix`` uses the ratio of the coefficients. Systems are in ``fit_systems.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from sparsetile.balance.cost_model import CostModel, Reading, fit_cost_model
from sparsetile.core.device import machine
from sparsetile.core.errors import value_error
from sparsetile.core.fitted import SystemModel, keep_fitted
from sparsetile.engines.request import Request
from sparsetile.formats.bmat import WINDOW_ROWS
from sparsetile.intake.csr import CSR
from sparsetile.jit.source import device_tree_digest
from sparsetile.reorder import Permutation
from sparsetile.systems.registry import candidates
from sparsetile.tune.choose import measure_systems
from sparsetile.tune.fit_systems import fit_systems, model_readings, tf32_allowed

__all__ = ["FitFound", "fit_readings", "fit_schedule", "r2_of", "readings_of", "with_window_tiles"]

_IDENTITY = Permutation("identity", None)
# Of a GPU that has no such schedule.
NO_MODEL = CostModel(0.0, 0.0)
# Generated products: windows, tiles of each, width of B.
WINDOWS, TILES, WIDTHS = (500, 1000, 2000, 4000), (4, 16, 48, 96), (256, 512, 1024)
COLUMNS, FITTED_SHARE = 8192, 0.8
# Seconds of measured work per product.
BUDGET = 0.01
# Seconds for the products of all systems, mostly to compile kernels; Equation 1 takes about 10.
SYSTEMS_SECONDS = 60.0


@dataclass(frozen=True)
class FitFound:
    """A fitted model, with R² of the products that it was fitted to, and of the others."""

    model: CostModel
    r2_fitted: float
    r2_others: float
    readings: tuple[Reading, ...]
    systems: Mapping[str, SystemModel] = field(default_factory=dict)


def with_window_tiles(tiles: Sequence[int], columns: int, seed: int = 0) -> CSR:
    """A matrix with the given tiles of eight columns per 16-row window, one entry a column.

    The columns of a window are spread evenly over A, starting from a random one.
    """
    random = np.random.default_rng(seed)
    rows, cols = [], []
    for window, count in enumerate(tiles):
        wanted = 8 * count
        if wanted > columns:
            raise value_error(
                "with_window_tiles", "tiles", f"at most {columns // 8} a window", count,
                "Use more columns",
            )  # fmt: skip
        if not wanted:
            continue
        step = columns // wanted
        cols.append((random.integers(columns) + np.arange(wanted) * step) % columns)
        rows.append(window * WINDOW_ROWS + random.integers(0, WINDOW_ROWS, wanted))
    row = torch.from_numpy(np.concatenate(rows or [np.empty(0, int)]))
    col = torch.from_numpy(np.concatenate(cols or [np.empty(0, int)]))
    key = torch.sort(row * columns + col).values
    indptr = torch.zeros(WINDOW_ROWS * len(tiles) + 1, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(key // columns, minlength=indptr.numel() - 1), 0)
    values = torch.from_numpy(random.standard_normal(key.numel())).float()
    return CSR(indptr, (key % columns).int(), values, (indptr.numel() - 1, columns))


def r2_of(expected: Sequence[float], predicted: Sequence[float]) -> float:
    """Share of the variance of ``expected`` that the predictions explain."""
    actual, guess = np.array(expected), np.array(predicted)
    spread = float(((actual - actual.mean()) ** 2).sum())
    return 1.0 - float(((actual - guess) ** 2).sum()) / spread if spread else 1.0


def readings_of(measure: Callable[[CSR, str, int], float]) -> list[Reading]:
    """Return the readings of all generated products; ``measure`` maps a matrix, its name and the
    width of B to seconds.
    """
    found = []
    for windows, tiles in itertools.product(WINDOWS, TILES):
        csr = with_window_tiles([tiles] * windows, COLUMNS, seed=windows + tiles)
        name = f"{windows} windows of {tiles}"
        for n in WIDTHS:
            found.append(Reading(windows * tiles, windows, n, measure(csr, name, n)))
    return found


def fit_readings(readings: Sequence[Reading]) -> FitFound:
    """Fit Equation 1, with D in columns of B, to four fifths of the readings."""
    order = np.random.default_rng(0).permutation(len(readings))
    fitted = round(FITTED_SHARE * len(readings))
    used, rest = [readings[i] for i in order[:fitted]], [readings[i] for i in order[fitted:]]
    found = fit_cost_model(used)
    guesses = [found.model.seconds(r.tiles, r.windows, r.width) for r in rest]
    others = r2_of([r.seconds for r in rest], guesses)
    return FitFound(found.model, found.r2, others, tuple(readings))


def fit_schedule(device: torch.device, matrices: Iterable[CSR] = ()) -> FitFound:
    """Time the products on a GPU, fit, and keep the coefficients for its schedules and choices.

    ``matrices`` are those that systems are timed on (``fit_systems.MATRICES``). A GPU for which
    ``voltrix`` has no kernel keeps no coefficients of Equation 1.
    """
    if device.type != "cuda":
        raise value_error(
            "tune", "--fit", "run on a machine with a GPU", "none", "Run it where the GPU is"
        )

    def measure(csr: CSR, name: str, n: int) -> float:
        there = csr.to(device)
        request = Request(there, n, torch.float32, _IDENTITY)
        seconds, _ = measure_systems(request, ["voltrix"], {}, BUDGET)
        if "voltrix" not in seconds:
            raise value_error(
                "tune", "--fit", "run where all products can be timed", f"none of {name}",
                "Free memory of the GPU",
            )  # fmt: skip
        return seconds["voltrix"]

    found = FitFound(NO_MODEL, 0.0, 0.0, ())
    if "voltrix" in able_systems(device):
        found = fit_readings(readings_of(measure))
    found = replace(found, systems=fit_systems(model_readings(device, matrices, SYSTEMS_SECONDS)))
    model = asdict(found.model) if found.readings else {}
    keep_fitted(
        machine(device).name, device_tree_digest(), model, found.r2_fitted, found.r2_others,
        found.systems,
    )  # fmt: skip
    return found


def able_systems(device: torch.device) -> list[str]:
    """Return the systems that can multiply a small matrix there, in float32 as TF32."""
    request = Request(with_window_tiles([1], 8).to(device), 8, torch.float32, _IDENTITY)
    with tf32_allowed():
        return candidates(request)[0]
