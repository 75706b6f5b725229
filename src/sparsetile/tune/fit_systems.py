"""Every system's cost model fitted on the GPU at hand: a part of ``sparsetile tune --fit``.

Products of generated matrices (fixed seeds) are timed by all systems that are predicted to be
anywhere near the fastest, until the time is up. Each system's times are then fitted to its own
predictions (``tune/models.py``), by least squares of relative errors.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparsetile.core.fitted import SystemModel
from sparsetile.engines.request import Request
from sparsetile.intake.csr import CSR
from sparsetile.reorder import Permutation
from sparsetile.systems.registry import SYSTEMS, candidates
from sparsetile.tune.choose import measure_systems
from sparsetile.tune.models import model_name

__all__ = [
    "MATRICES", "SystemReading", "fit_model", "fit_systems", "model_readings", "tf32_allowed",
]  # fmt: skip

# Generated matrices, alternately of scattered and of clustered entries: short products first, so
# that all kinds have been timed when a slow machine runs out of time.
MATRICES = (
    "gen:power_law?rows=14000&nnz=490000&seed=1",
    "gen:fem_blocks?nodes=5000&dofs=3&seed=2",
    "gen:random?rows=20000&cols=20000&nnz=200000&seed=3",
    "gen:banded?rows=40000&bandwidth=12&density=0.6&seed=4",
    "gen:power_law?rows=60000&nnz=900000&seed=5",
    "gen:road_grid?rows=130000&seed=6",
    "gen:pruned_weights?out_features=4096&in_features=4096&sparsity=0.9&seed=7",
    "gen:molecules?count=8000&seed=8",
    "gen:fem_blocks?nodes=15000&dofs=4&seed=9",
    "gen:random?rows=8000&cols=8000&nnz=1500000&seed=10",
    "gen:power_law?rows=200000&nnz=3000000&seed=11",
)
WIDTHS = (128, 32, 512)
DTYPES = (torch.float32, torch.float16)
# Seconds of measured work per product, without compilation, and factor over the fastest prediction
# up to which a system is timed: it may be off by 2.6 (tune/choose.py) in either direction.
BUDGET, WORTH_TIMING = 0.03, 5.0
# Products that a model needs, twice its coefficients; of a system with fewer nothing is known.
FEWEST = 4


@dataclass(frozen=True)
class SystemReading:
    """One timed product: the model's name, its own prediction and the time, in seconds."""

    model: str
    predicted: float
    seconds: float


def fit_model(readings: Sequence[SystemReading]) -> SystemModel:
    """Fit ``fixed + scale * prediction`` to times, by least squares of relative errors.

    A negative ``fixed`` means that the prediction's own start is too long: it is 0 then.
    """
    predicted = np.array([each.predicted for each in readings])
    seconds = np.array([each.seconds for each in readings])
    columns = np.stack([predicted / seconds, 1 / seconds], 1)
    (scale, fixed), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if fixed < 0 or scale <= 0:
        ratio = predicted / seconds
        scale, fixed = float(ratio.sum() / (ratio**2).sum()), 0.0
    found = fixed + scale * predicted
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1.0 - float(((seconds - found) ** 2).sum()) / spread if spread else 1.0
    worst = float(np.exp(np.abs(np.log(found / seconds)).max()))
    return SystemModel(float(scale), float(fixed), len(readings), r2, worst)


def _products(matrices: Iterable[CSR]) -> Iterator[tuple[CSR, int, torch.dtype]]:
    for csr in matrices:
        values = torch.from_numpy(np.random.default_rng(0).standard_normal(csr.nnz)).float()
        for n, dtype in itertools.product(WIDTHS, DTYPES):
            yield csr.with_values(values.to(dtype)), n, dtype


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """Let float32 be rounded to TF32, without which tiles do not compete."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@tf32_allowed()
def model_readings(
    device: torch.device, matrices: Iterable[CSR], seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[SystemReading]:  # fmt: skip
    """Time products of each matrix on a GPU for about ``seconds``."""
    begun, found = clock(), list[SystemReading]()
    for csr, n, dtype in _products(matrices):
        request = Request(csr.to(device), n, dtype, Permutation("identity", None))
        able, _ = candidates(request)
        asked = request.changed(counts_pairs=True)
        predicted = {name: SYSTEMS[name].predict(asked) for name in able}
        most = WORTH_TIMING * min(predicted.values())
        names = sorted((n for n in able if predicted[n] <= most), key=predicted.__getitem__)
        timed, _ = measure_systems(request, names, predicted, BUDGET)
        found += [
            SystemReading(model_name(name, dtype.itemsize), predicted[name], took)
            for name, took in timed.items()
        ]
        if clock() - begun > seconds:
            break
    return found


def fit_systems(readings: Sequence[SystemReading]) -> dict[str, SystemModel]:
    """Return the model of each system that was timed often enough.

    Systems that were not are slower than others by the same factor as by their own models: they get
    the typical scale of all.
    """
    by_name: dict[str, list[SystemReading]] = defaultdict(list)
    for each in readings:
        by_name[each.model].append(each)
    found = {name: fit_model(group) for name, group in by_name.items() if len(group) >= FEWEST}
    if not found:
        return {}
    typical = math.exp(sum(math.log(each.scale) for each in found.values()) / len(found))
    rest = {
        model_name(name, itemsize) for name in SYSTEMS if "cuda" in SYSTEMS[name].devices
        for itemsize in (2, 4)
    }  # fmt: skip
    for name in sorted(rest - found.keys()):
        found[name] = SystemModel(typical, 0.0, 0, 0.0, 1.0)
    return found
