"""Parts of tools.fresh_times that take a matrix: first products, counts, few columns, break-even.

Times of calls are wall times with a wait before and after. Kernel times come from replayed CUDA
graphs. Values are random and float32; B is new in each case.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile import functional
from sparsetile.cli.against import paid_after
from sparsetile.core.timer import one_product
from tools.fresh_cases import (
    Case,
    Context,
    Figure,
    graph_time,
    poison,
    sampled_error,
    tf32,
    wrong,
)

__all__ = ["break_even", "counts", "first", "one"]

WIDTHS = (32, 128, 512)
FEW_COLUMNS = (1, 8, 16)
SETTINGS = (True, False)
FRESH = 7
# Products of the same matrix, and how often the whole series is repeated.
COUNTS = {1: 7, 10: 5, 100: 3, 1000: 2}
EXPECTED_RUNS: tuple[int | None, ...] = (None, 10, 100, 1000)  # None: not said
FEW_RUNS = 100  # up to which they are called one by one
MOST_GROWING = 8000  # products until a plan compares all systems, at most
# A plan that a user keeps has been used before it is timed.
KNOWN_CALLS = 300


def _group(n: int, allowed: bool, more: str = "") -> str:
    return f"N={n} {'TF32' if allowed else 'float32'}{more}"


def _microseconds(seconds: float) -> float:
    return 1e6 * seconds


def _checked(case: Case, A: Tensor, B: Tensor, run: Callable[[], Tensor], allowed: bool) -> Figure:
    """Run once more, in memory filled with NaN, and compare rows with float64."""
    poison((case.rows, B.shape[1]), B.dtype, case.device)
    C = run()
    return wrong(sampled_error(A.crow_indices(), A.col_indices(), A.values(), B, C), allowed)


def first(context: Context) -> None:
    """One product of a matrix that was never seen, over torch.sparse.mm of another such."""

    def measure(case: Case, n: int, allowed: bool) -> Figure:
        B = case.dense(n)
        st.clear_plan_cache()
        for _ in range(2):  # compiles kernels and loads cuSPARSE, for another matrix
            st.spmm(case.fresh(3), B)
            torch.sparse.mm(case.fresh(3), B)
        ours, torchs = [], []
        made = [(case.fresh(), case.fresh()) for _ in range(FRESH)]
        for A, other in made:
            ours.append(one_product(functools.partial(st.spmm, A, B), case.device))
            torchs.append(one_product(functools.partial(torch.sparse.mm, other, B), case.device))
        A = case.fresh()
        checked = _checked(case, A, B, lambda: st.spmm(A, B), allowed)
        mine, theirs = statistics.median(ours), statistics.median(torchs)
        st.clear_plan_cache()
        return {
            "ours_us": _microseconds(mine), "torch_us": _microseconds(theirs),
            "ratios": {"over torch": theirs / mine}, **checked,
        }  # fmt: skip

    def matrix(case: Case) -> None:
        for n in WIDTHS:
            for allowed in SETTINGS:
                with tf32(allowed):
                    context.attempt(
                        "first", _group(n, allowed), case.name,
                        functools.partial(measure, case, n, allowed),
                    )  # fmt: skip

    context.each_matrix("first", matrix)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def counts(context: Context) -> None:
    """All products of one matrix from its first on, by st.spmm, torch.sparse.mm and cuSPARSE.

    The best is torch or cuSPARSE, of which preprocessing and kernels count, or ("calls") launches
    from Python too. Each repetition takes another variant of the matrix. The longest series counts
    with its fastest repetition: a kernel may be compiled in the other.
    """
    series = {1: 3, 10: 2, 100: 2} if context.small else COUNTS

    def totals(case: Case, count: int, product: Callable[[Tensor], object]) -> float:
        seconds = []
        for repetition in range(series[count]):
            st.clear_plan_cache()
            A = case.fresh(repetition)
            work = functools.partial(_repeat, functools.partial(product, A), count)
            seconds.append(one_product(work, case.device))
        return min(seconds) if len(seconds) < 3 else statistics.median(seconds)

    def measure(case: Case, n: int, allowed: bool, count: int, torchs: dict[int, float]) -> Figure:
        B = case.dense(n)
        if count not in torchs:  # TF32 does not matter to it
            torchs[count] = totals(case, count, lambda A: torch.sparse.mm(A, B))
        mine = totals(case, count, lambda A: st.spmm(A, B))
        found: Figure = {
            "count": count, "ours_us": _microseconds(mine),
            "torch_us": _microseconds(torchs[count]),
        }  # fmt: skip
        baselines = case.baselines(n)
        kernels = baselines.total(count)
        name = baselines.best
        calls = math.inf if name is None else baselines.preprocess[name] + count * baselines.call
        found |= {"cusparse_us": _microseconds(kernels), "cusparse_calls_us": _microseconds(calls)}
        ratios = {
            "over the best": min(torchs[count], kernels) / mine,
            "over the best, calls": min(torchs[count], calls) / mine,
        }
        return found | baselines.facts | {"ratios": ratios}

    def matrix(case: Case) -> None:
        for n in WIDTHS:
            torchs: dict[int, float] = {}
            for allowed in SETTINGS:
                with tf32(allowed):
                    _warm(case, n, context)
                    for count in series:
                        context.attempt(
                            "counts", _group(n, allowed, f" x{count}"), case.name,
                            functools.partial(measure, case, n, allowed, count, torchs),
                        )  # fmt: skip

    context.each_matrix("counts", matrix)
    st.clear_plan_cache()


def _warm(case: Case, n: int, context: Context) -> None:
    """Compile what plans and products of such a matrix need, by another one."""

    def warm() -> Figure:
        A, B = case.fresh(3), case.dense(n)
        st.plan(A, n, expected_runs=max(COUNTS)) @ B
        for _ in range(3):
            st.spmm(A, B)
            torch.sparse.mm(A, B)
        return {}

    try:
        warm()
    except Exception as error:  # the measurement that follows fails too, and says so
        context.skip("counts", [f"{case.name}, N={n}, warm-up"], f"{type(error).__name__}: {error}")


def one(context: Context) -> None:
    """Kernel time of 1, 8 and 16 columns: cuSPARSE's fastest over a plan, st.spmm, functional."""

    def measure(case: Case, n: int, allowed: bool, way: str) -> Figure:
        B, A = case.dense(n), case.fresh()
        run, found = _way(way, A, B, n)
        samples = graph_time(run, case.device)
        seconds = samples.median
        found |= {"ours_us": _microseconds(seconds), "method": samples.method}
        found |= _checked(case, A, B, run, allowed)
        baselines = case.baselines(n)
        name = baselines.best
        found |= baselines.facts
        if name is None:
            return found
        best = baselines.kernel[name]
        kernels = {key: _microseconds(each) for key, each in baselines.kernel.items()}
        return found | {
            "baseline": name,
            "kernels_us": kernels,
            "ratios": {"over cuSPARSE": best / seconds},
        }

    def matrix(case: Case) -> None:
        for n in FEW_COLUMNS:
            for allowed in SETTINGS:
                for way in ("plan @ B", "st.spmm", "functional.spmm"):
                    with tf32(allowed):
                        context.attempt(
                            "one", _group(n, allowed, f", {way}"), case.name,
                            functools.partial(measure, case, n, allowed, way),
                        )  # fmt: skip

    context.each_matrix("one", matrix)
    st.clear_plan_cache()


def _way(way: str, A: Tensor, B: Tensor, n: int) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """A product by its name, ready to be timed, and what is known of it."""
    if way == "plan @ B":
        plan = st.plan(A, n)
        return lambda: plan @ B, {"system": plan.system}
    if way == "st.spmm":
        _repeat(lambda: st.spmm(A, B), KNOWN_CALLS if B.is_cuda else 2)
        return lambda: st.spmm(A, B), {}
    arrays = A.crow_indices(), A.col_indices(), A.values()
    return lambda: functional.spmm(*arrays, B), {}


def break_even(context: Context) -> None:
    """Planning time and kernel time of st.plan over cuSPARSE's and over products without a plan.

    Planning is the median of three variants of the matrix, after a plan of the fourth. Ratios are
    those of ``expected_runs`` products, with planning and preprocessing; below 1 a plan loses. If
    no number is said, they are those of 100, and of the kernel once the plan has compared all
    systems. With "calls", few products are called one by one, launches of the host included, and
    so are cuSPARSE's.
    """

    def without_plan(case: Case, n: int) -> float:
        run, _ = _way("functional.spmm", case.fresh(), case.dense(n), n)
        return graph_time(run, case.device).median

    def called(case: Case, B: Tensor, n: int, expected: int, variant: int) -> float:
        """Seconds of a plan and of its products."""
        A = case.fresh(variant)

        def work() -> None:
            plan = st.plan(A, n, expected_runs=expected)
            _repeat(lambda: plan @ B, expected)

        return one_product(work, case.device)

    def measure(
        case: Case, n: int, allowed: bool, expected: int | None, bare: list[float]
    ) -> Figure:
        if not bare:
            bare.append(without_plan(case, n))
        B = case.dense(n)
        st.plan(case.fresh(3), n, expected_runs=expected) @ B
        planning: list[float] = []
        plans: list[st.Plan] = []
        made = [case.fresh(number) for number in (0, 1, 2)]

        def keep(A: Tensor) -> None:
            plans.append(st.plan(A, n, expected_runs=expected))

        for A in made:
            planning.append(one_product(functools.partial(keep, A), case.device))
        plan, cost = plans[0], statistics.median(planning)
        if expected is not None:  # no more products than that are measured
            plan._family.settled(plan._variant)
        kernel = graph_time(lambda: plan @ B, case.device).median
        found: Figure = {
            "system": plan.system, "expected_runs": expected, "plan_us": _microseconds(cost),
            "plans_us": [_microseconds(each) for each in planning],
            "kernel_us": _microseconds(kernel), "unplanned_us": _microseconds(bare[0]),
        }  # fmt: skip
        found |= _checked(case, made[0], B, lambda: plan @ B, allowed)
        runs = expected or 100
        total = cost + runs * kernel
        ratios = {"over no plan": runs * bare[0] / total}
        medians = {"planning, us": _microseconds(cost)}
        baselines = case.baselines(n)
        name = baselines.best
        if name is not None:
            preprocess, theirs = baselines.preprocess[name], baselines.kernel[name]
            pays = paid_after(cost, kernel, preprocess, theirs)
            found |= {
                "baseline": name, "cusparse_us": _microseconds(theirs),
                "preprocess_us": _microseconds(preprocess), "break_even": pays,
            }  # fmt: skip
            ratios["over cuSPARSE"] = baselines.total(runs) / total
            if expected is not None and expected <= FEW_RUNS:
                calls = statistics.median(called(case, B, n, expected, each) for each in (0, 1, 2))
                found["calls_us"] = _microseconds(calls)
                called_theirs = baselines.preprocess[name] + runs * baselines.call
                ratios["over cuSPARSE, calls"] = called_theirs / calls
            medians["break-even"] = pays
            if expected is None:
                plan = plans[1]  # that of plans[0] is settled: a CUDA graph was captured
                later = plan.info.get("account", {}).get("later")
                if later is not None and later <= MOST_GROWING:
                    _repeat(lambda: plan @ B, later)
                grown = graph_time(lambda: plan @ B, case.device).median
                found |= {"later": later, "grown": plan.system, "grown_us": _microseconds(grown)}
                found |= _checked(case, made[1], B, lambda: plan @ B, allowed)
                ratios["grown, kernel over cuSPARSE"] = theirs / grown
        loses = [name for name, ratio in ratios.items() if ratio < 1]
        return found | baselines.facts | {"loses": loses, "ratios": ratios, "medians": medians}

    def matrix(case: Case) -> None:
        for n in WIDTHS:
            for allowed in SETTINGS:
                with tf32(allowed):
                    bare: list[float] = []
                    for expected in EXPECTED_RUNS:
                        group = _group(n, allowed, f", {expected or 'unknown'} runs")
                        context.attempt(
                            "breakeven", group, case.name,
                            functools.partial(measure, case, n, allowed, expected, bare),
                        )  # fmt: skip

    context.each_matrix("breakeven", matrix)
