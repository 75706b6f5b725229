"""Which system serves a request: by each system's own model, or by timing the best few.

A prediction is free, and off by a quarter at times. On a GPU, systems that are predicted nearly as
fast as the fastest are built and timed, for about 20 ms, unless few products are expected of the
plan. Only the exact system's kernels are compiled for that, and only where what was measured
contradicts the model: others take seconds.
``tune="measure"`` times the model's best few, within a larger budget. Both keep what they found on
disk (``tune/kept.py``), so that the same matrix is given the same system again. Where torch was
told to be deterministic, only ``tune="measure"`` times anything.
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
from sparsetile.jit import NotCompiled, without_compiling
from sparsetile.systems import BuiltSystem, Request
from sparsetile.systems.registry import SYSTEMS, exact_system, runner
from sparsetile.tune.kept import kept_timings, key_of

__all__ = [
    "EXPECTED_RUNS",
    "MEASURE_SECONDS",
    "Choice",
    "choose_system",
    "close_calls",
    "measure_systems",
    "predict_systems",
]

# Products that a plan is made for where nobody says.
EXPECTED_RUNS = 100
# What ``tune="measure"`` may take, and what timing close calls may, compilation apart.
MEASURE_SECONDS, CLOSE_SECONDS = 0.5, 0.02
# Systems that are timed at most, and the factor over the fastest prediction up to which one is
# worth it: single predictions are off by up to 2.6 (docs/explanation/notes/planning.md).
MOST_TIMED, WORTH_TIMING = 5, 3.0
# Two predictions closer than this may be the other way round: models are off by 1.2 to 1.3
# typically, in the same direction for most matrices.
CLOSE = 1.3
# The same for matrices that no model was fitted to: of few rows, or nearly dense. (36 x 87482, a
# fifth of it entries: `rsh` took twice its prediction.)
FEW_ROWS, NEARLY_DENSE, CLOSE_UNSEEN = 1024, 0.05, 2.0
MOST_CLOSE = 3
# The exact system's kernels are compiled for a close call where the fastest took this much longer
# than it is predicted to take. (11,631 rows, 29 entries each, N = 128: `half`, predicted at 19 us,
# took 26; `csr`, predicted at 21, takes 20.) They take 0.3 s on an H200's host; those of `wcsr`
# took 2.7, and as long again at the first gradient (ogbl-ddi, N = 256).
DOUBT = 1.15
# Seconds that compiling another system's kernels takes, about.
COMPILE_SECONDS = 3.0
# What timing such a call saves in the mean. The model's choices lose 0.5 to 1.5 % of the fastest
# system's time over all matrices; a fifth of them are close calls.
CLOSE_SAVES = 0.05
# Seconds to build a system on a GPU or a host: fixed, and for an entry.
BUILD_SECONDS = (8e-3, 1e-9)
REPEATS = 5
# Products below this may take the host longer than the device.
SHORT_SECONDS = 2e-3


@dataclass(frozen=True)
class Choice:
    """The system that serves a request, and what it was compared with.

    Attributes
    ----------
    by : str
        ``model``, ``measure``, ``kept`` (measured earlier on this machine) or ``only``.
    seconds : mapping
        Predicted or measured seconds of a product by system; empty where nothing was compared.
    measured : frozenset of str
        Systems whose seconds were measured.
    builds : mapping
        What was built on the way, of the fastest and of the exact system.
    """

    system: str
    by: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    builds: Mapping[str, BuiltSystem] = field(default_factory=dict)

    def build(self, request: Request) -> BuiltSystem:
        """Return the chosen system's build."""
        if self.system in self.builds:
            return self.builds[self.system]
        return SYSTEMS[self.system].build(request)


def predict_systems(request: Request, able: Sequence[str]) -> dict[str, float]:
    """Return the predicted seconds of each able system.

    Distinct (window, column) pairs are counted only where a candidate's model needs them: counting
    sorts all entries. Each is predicted once: the choice of an order asks first.
    """
    counts = any(SYSTEMS[name].counts_pairs for name in able)
    asked = request.changed(counts_pairs=counts)
    said = (asked.n, asked.dtype, asked.ablation, asked.ceilings, counts)
    return {
        name: asked.once(("predicted", name, *said), lambda name=name: SYSTEMS[name].predict(asked))  # type: ignore[misc]
        for name in able
    }


def _ranked(predicted: Mapping[str, float]) -> list[str]:
    """Systems, the fastest first; of equals the exact one, which is built in the least time.

    A hybrid that leaves every row to CUDA cores is predicted as ``csr``, and does what it does.
    """
    exact = {name for name, system in SYSTEMS.items() if system.exact_on}
    return sorted(predicted, key=lambda name: (predicted[name], name not in exact))


def close_calls(request: Request, predicted: Mapping[str, float], expected_runs: int) -> list[str]:
    """Return systems that should be timed: those near the fastest.

    Parameters
    ----------
    predicted : mapping
        Seconds by system.
    expected_runs : int
        Products that the plan is made for. Fewer than usual, and those on a host, must save what
        building and timing take.

    Returns
    -------
    list of str
        Two systems or more, the fastest first; empty where the prediction decides.
    """
    ranked = _ranked(predicted)
    fastest = predicted[ranked[0]]
    rows, cols = request.csr.shape
    unseen = rows < FEW_ROWS or request.csr.nnz > NEARLY_DENSE * rows * cols
    most = (CLOSE_UNSEEN if unseen else CLOSE) * fastest
    near: dict[float, str] = {}  # of equal predictions one: a hybrid without tiles is `csr`
    for name in ranked:
        if predicted[name] <= most:
            near.setdefault(predicted[name], name)
    names = list(near.values())[:MOST_CLOSE]
    if len(names) == 1 or request.deterministic or request.ablation is not None:
        return []
    if request.device.type == "cuda" and expected_runs >= EXPECTED_RUNS:
        return names
    build = BUILD_SECONDS[0] + BUILD_SECONDS[1] * request.csr.nnz
    cost = (len(names) - 1) * build + CLOSE_SECONDS
    return names if expected_runs * CLOSE_SAVES * fastest > cost else []


def choose_system(
    request: Request,
    able: Sequence[str],
    tune: str,
    *,
    expected_runs: int = EXPECTED_RUNS,
    budget: float = MEASURE_SECONDS,
) -> Choice:
    """Choose one of the able systems.

    Parameters
    ----------
    able : sequence of str
        Systems that can serve the request; at least one.
    tune : {"model", "measure"}
    expected_runs : int
        Products that the plan is made for.
    budget : float
        Seconds that ``tune="measure"`` may take; at least one system is timed.
    """
    if len(able) == 1:
        return Choice(able[0], "only")
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
        # The second is timed in any case where it takes a small part of the budget.
        most = max(most, min(predicted[ranked[1]], budget / 10))
        timed_names = [name for name in ranked if predicted[name] <= most][:MOST_TIMED]
    saved = expected_runs * CLOSE_SAVES * predicted[ranked[0]]
    compiles = tune == "measure" or saved > COMPILE_SECONDS
    timed, builds = measure_systems(request, timed_names, predicted, budget, compiles=compiles)
    if not timed:  # no memory for any of them: the prediction is what there is
        return Choice(ranked[0], "model", predicted)
    chosen = min(timed, key=timed.__getitem__)
    choice = Choice(chosen, tune, {**predicted, **timed}, frozenset(timed), builds)
    if kept or tune == "model":
        complete = tune == "measure" or len(timed) == len(timed_names)
        kept_timings().put(key, chosen, choice.seconds, choice.measured, complete=complete)
    return choice


def measure_systems(
    request: Request,
    names: Sequence[str],
    predicted: Mapping[str, float],
    budget: float = MEASURE_SECONDS,
    *,
    compiles: bool = True,
) -> tuple[dict[str, float], dict[str, BuiltSystem]]:
    """Build and time systems on random input; return seconds and builds by name.

    Builds are those of the fastest and of the device's exact system: others would be memory that
    nobody needs any more. One that runs out of memory is left out.

    Parameters
    ----------
    names : sequence of str
        The fastest by the model first.
    predicted : mapping
        Seconds by system.
    budget : float
        Seconds, not counting compilation. The first is timed in any case, others while there is
        time, or if they are predicted to take less than all that were measured.
    compiles : bool
        Whether kernels are compiled for all. If not, those of the first are, and those of the
        exact system where it is predicted well below what was measured; others are left out.
    """
    csr, begun, compiling = request.csr, time.perf_counter(), 0.0
    exact = exact_system(request.device.type).name
    values = None if csr.values is None else csr.values.detach().to(request.dtype)
    seconds: dict[str, float] = {}
    builds: dict[str, BuiltSystem] = {}
    try:
        # Of a generator of its own: planning must not change what the caller draws next.
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
    """Return the seconds of a product on its device, of several if they fit the budget."""
    product()
    one = one_product(product, device)
    fits = int(budget / one) - 2
    # By the clock a product includes its launches, which decide where it is short: cuBLAS's 20 us
    # in three launches were 480 us of that clock. Such products are measured once in any case.
    if fits < 1 and one > SHORT_SECONDS:
        return one
    return measure_queued(product, device, max(1, min(fits, REPEATS)))
