"""The choice of a system for a request: by each system's own model, or by timing the best few.

A prediction is free but at times off by a quarter. On a GPU, systems predicted to be nearly as
fast as the fastest are built and timed, for about 20 ms, unless few products are expected of the
plan. This compiles only the exact system's kernels, and only if a measurement contradicts the
model: other kernels take seconds to compile.
``tune="measure"`` times the model's best few, within a larger budget. Both keep their results on
disk (``tune/kept.py``), so that the same matrix gets the same system again. If torch is set to be
deterministic, only ``tune="measure"`` times anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sparsetile.core.timer import measure_queued, one_product
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.jit import NotCompiled, without_compiling
from sparsetile.systems.registry import SYSTEMS, exact_system, runner
from sparsetile.tune.kept import kept_timings, key_of
from sparsetile.tune.models import corrected, source_of

__all__ = [
    "EXPECTED_RUNS", "KEPT_RUNS", "MEASURE_SECONDS", "Choice", "choose_system", "close_calls",
    "measure_systems", "predict_systems",
]  # fmt: skip

# Products that a plan is made for if nobody says: about what a plan of `csr` costs. For how many
# all systems are compared is in tune/account.py.
EXPECTED_RUNS = 100
# Products that commands and benchmarks plan for: a plan that is timed or saved is kept. From so
# many on close calls are timed in any case.
KEPT_RUNS = 10_000
# Time limits of ``tune="measure"`` and of timing close calls, in seconds without compilation.
MEASURE_SECONDS, CLOSE_SECONDS = 0.5, 0.02
# Most systems to time, and the factor over the fastest prediction up to which a system is timed:
# single predictions are off by up to 2.6 (docs/explanation/notes/planning.md).
MOST_TIMED, WORTH_TIMING = 5, 3.0
# Two predictions closer than this may be in the wrong order: models are typically off by 1.2 to
# 1.3, in the same direction for most matrices.
CLOSE = 1.3
# The same for matrices that no model was fitted to: of few rows, or nearly dense. (36 x 87482 with
# a density of 0.2: `rsh` took twice its prediction.)
FEW_ROWS, NEARLY_DENSE, CLOSE_UNSEEN = 1024, 0.05, 2.0
# Most systems to time, and if the model's constants were scaled from another GPU's.
MOST_CLOSE, MOST_CLOSE_SCALED = 3, 4
# The exact system's kernels are compiled for a close call if the fastest took this much longer
# than predicted. (11,631 rows, 29 entries each, N = 128: `half`, predicted at 19 us, took 26;
# `csr`, predicted at 21, takes 20.) They take 0.3 s on an H200's host; those of `wcsr` took 2.7 s,
# and as long again at the first gradient (ogbl-ddi, N = 256).
DOUBT = 1.15
# Approximate seconds to compile another system's kernels.
COMPILE_SECONDS = 3.0
# Mean saving from timing such a call. The model's choices lose 0.5 to 1.5 % of the fastest
# system's time over all matrices; a fifth of them are close calls.
CLOSE_SAVES = 0.05
# Seconds to build a system on a GPU or a host: fixed, and per entry.
BUILD_SECONDS = (8e-3, 1e-9)
REPEATS = 5
# Products below this may take the host longer than the device.
SHORT_SECONDS = 2e-3


@dataclass(frozen=True)
class Choice:
    """The system that serves a request, and the systems it was compared with."""

    system: str
    by: str  # "model", "measure", "kept" (measured earlier on this machine) or "only"
    # Predicted or measured, of a product by system; empty if nothing was compared.
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    # That the choice made and kept: of the fastest and of the exact system.
    builds: Mapping[str, BuiltSystem] = field(default_factory=dict)

    def build(self, request: Request) -> BuiltSystem:
        """Return the chosen system's build."""
        if self.system in self.builds:
            return self.builds[self.system]
        return SYSTEMS[self.system].build(request)


def predict_systems(request: Request, able: Sequence[str]) -> dict[str, float]:
    """Return the predicted seconds of each able system.

    Distinct (window, column) pairs are counted only if a candidate's model needs them: counting
    sorts all entries. Predictions are kept, because the choice of an order asks for them first.
    """
    counts = any(SYSTEMS[name].counts_pairs for name in able)
    asked = request.changed(counts_pairs=counts)
    key = (asked.n, asked.dtype, asked.ablation, asked.ceilings, counts)
    return {
        name: asked.once(("predicted", name, *key), functools.partial(_predict, name, asked))
        for name in able
    }


def _predict(name: str, request: Request) -> float:
    return corrected(name, request, SYSTEMS[name].predict(request))


def _ranked(predicted: Mapping[str, float]) -> list[str]:
    """Systems, fastest first; among equals the exact one first, which is the quickest to build.

    A hybrid that leaves every row to CUDA cores is predicted as ``csr``, and works like it.
    """
    exact = [SYSTEMS.exact_on(device) for device in ("cpu", "cuda")]
    return sorted(predicted, key=lambda name: (predicted[name], name not in exact))


def close_calls(request: Request, predicted: Mapping[str, float], expected_runs: int) -> list[str]:
    """Return the systems to time, the fastest first: those predicted near the fastest; none if the
    prediction decides.

    The expected saving must exceed the time of building and timing. On a GPU it is not asked for if
    very many products are expected, or the usual number with a matrix that no model was fitted to.
    """
    ranked = _ranked(predicted)
    fastest = predicted[ranked[0]]
    rows, cols = request.csr.shape
    scaled = source_of(request.machine) == "scaled"
    unseen = scaled or rows < FEW_ROWS or request.csr.nnz > NEARLY_DENSE * rows * cols
    most = (CLOSE_UNSEEN if unseen else CLOSE) * fastest
    near: dict[float, str] = {}  # one of equal predictions: a hybrid without tiles is `csr`
    for name in ranked:
        if predicted[name] <= most:
            near.setdefault(predicted[name], name)
    names = list(near.values())[: MOST_CLOSE_SCALED if scaled else MOST_CLOSE]
    if len(names) == 1 or request.deterministic or request.ablation is not None:
        return []
    always = EXPECTED_RUNS if unseen else KEPT_RUNS
    if request.device.type == "cuda" and expected_runs >= always:
        return names
    build = BUILD_SECONDS[0] + BUILD_SECONDS[1] * request.csr.nnz
    cost = (len(names) - 1) * build + CLOSE_SECONDS
    return names if expected_runs * CLOSE_SAVES * fastest > cost else []


def choose_system(
    request: Request, able: Sequence[str], tune: str, *, expected_runs: int = EXPECTED_RUNS,
    budget: float = MEASURE_SECONDS,
) -> Choice:  # fmt: skip
    """Choose one of the able systems for ``expected_runs`` products; ``tune`` is ``model`` or
    ``measure``, which may take ``budget`` seconds and times at least one system.
    """
    if len(able) == 1:
        return Choice(able[0], "only", predict_systems(request, able))
    kept = tune == "measure" and request.ablation is None
    if kept:
        key = key_of(request, able)
        found = kept_timings().get(key)
        if found is not None:
            return Choice(found.system, "kept", found.seconds, found.measured)
    predicted = predict_systems(request, able)
    ranked = _ranked(predicted)
    if tune == "model":
        timed_names, budget = close_calls(request, predicted, expected_runs), CLOSE_SECONDS
        if not timed_names:
            return Choice(ranked[0], "model", predicted)
        key = key_of(request, timed_names) | {"close": True}
        found = kept_timings().get(key)
        if found is not None:
            return Choice(found.system, "model", found.seconds, found.measured)
    else:
        most = WORTH_TIMING * predicted[ranked[0]]
        # Always time the second system if it takes a small part of the budget.
        most = max(most, min(predicted[ranked[1]], budget / 10))
        timed_names = [name for name in ranked if predicted[name] <= most][:MOST_TIMED]
    saved = expected_runs * CLOSE_SAVES * predicted[ranked[0]]
    compiles = tune == "measure" or saved > COMPILE_SECONDS
    timed, builds = measure_systems(request, timed_names, predicted, budget, compiles=compiles)
    if not timed:  # no memory for any of them: only the prediction is left
        return Choice(ranked[0], "model", predicted)
    chosen = min(timed, key=timed.__getitem__)
    choice = Choice(chosen, tune, {**predicted, **timed}, frozenset(timed), builds)
    if kept or tune == "model":
        complete = tune == "measure" or len(timed) == len(timed_names)
        kept_timings().put(key, chosen, choice.seconds, choice.measured, complete=complete)
    return choice


def measure_systems(
    request: Request, names: Sequence[str], predicted: Mapping[str, float],
    budget: float = MEASURE_SECONDS, *, compiles: bool = True,
) -> tuple[dict[str, float], dict[str, BuiltSystem]]:  # fmt: skip
    """Build and time systems, the model's fastest first, on random input; return seconds and builds
    by name.

    Keeps only the builds of the fastest and of the device's exact system, to save memory. A system
    that runs out of memory is omitted. ``budget`` does not count compilation: the first system is
    always timed, others while there is time, or if they are predicted to be faster than all that
    were measured. Without ``compiles``, only the first system's kernels are compiled, and the exact
    system's if its prediction is well below the measurement; others are omitted.
    """
    csr, begun, compiling = request.csr, time.perf_counter(), 0.0
    exact = exact_system(request.device.type).name
    values = None if csr.values is None else csr.values.detach().to(request.dtype)
    seconds: dict[str, float] = {}
    builds: dict[str, BuiltSystem] = {}
    try:
        # An own generator: planning must not change the caller's random numbers.
        generator = torch.Generator(request.device).manual_seed(0)
        shape = (csr.shape[1], request.n)
        B = torch.randn(shape, device=request.device, generator=generator).to(request.dtype)
        out = torch.empty((csr.shape[0], request.n), dtype=request.dtype, device=request.device)
    except torch.OutOfMemoryError:
        return seconds, builds
    for place, name in enumerate(names):
        left = budget - (time.perf_counter() - begun - compiling)
        doubt = min(seconds.values()) / predicted[name] if seconds else math.inf
        if left <= 0 and doubt <= 1:
            break
        may = compiles or not seconds or (name == exact and doubt > DOUBT)
        allowed = contextlib.nullcontext() if may else without_compiling()
        try:
            with allowed:
                built = SYSTEMS[name].build(request)
                work, before = runner(built.recipe), time.perf_counter()
                work.prepare(request.n, request.dtype, values is not None, request.device)
                compiling += time.perf_counter() - before
                packed = work.pack(built.tensors, values, request.dtype)
                product = functools.partial(work.spmm, built.tensors, values, packed, B, out)
                seconds[name] = _bounded(product, request.device, left / (len(names) - place))
                del packed, product  # the next system's build may need their memory
        except (torch.OutOfMemoryError, NotCompiled):
            continue
        builds[name] = built
        del built
        wanted = {exact, min(seconds, key=seconds.__getitem__)}
        for other in builds.keys() - wanted:
            del builds[other]
    return seconds, builds


def _bounded(product: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the seconds of a product on its device; the median of several if the budget allows."""
    product()
    one = one_product(product, device)
    fits = int(budget / one) - 2
    # Wall-clock time includes launches, which dominate short products: cuBLAS's 20 us in three
    # launches took 480 us by the clock. So short products are always measured on the device.
    if fits < 1 and one > SHORT_SECONDS:
        return one
    return measure_queued(product, device, max(1, min(fits, REPEATS)))
