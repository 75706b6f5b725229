"""Part of tools.fresh_times: the time of st.plan itself, by the form of A and the products planned.

A plan ends with a wait of the host, so its wall time is all of it. Kernels are compiled before:
a plan of another matrix is made first. ``calls`` is what Python calls in one plan, its own
functions and built-in ones.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.timer import one_product
from tools.fresh_cases import Case, Context, Figure

__all__ = ["planning"]

# Of one matrix, another in each repetition.
REPEATS = 9
WIDTH = 128
# What is planned, and the options of the plan.
PLANS: dict[str, dict[str, Any]] = {
    "exact system": {"tune": "none"},
    "10 runs": {"expected_runs": 10},
    "100 runs": {"expected_runs": 100},
    "unknown runs": {},
}


def _edges(case: Case, variant: int, shuffled: bool) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """A variant as edges, in any order if asked for."""
    csr, (_, _, values) = case.variant(variant), case.arrays(variant)
    edges = torch.stack([csr.row_ids(), csr.indices.to(torch.int64)])
    if shuffled:
        order = torch.randperm(csr.nnz, device=case.device)
        edges, values = edges[:, order].contiguous(), values[order]
    return edges, values, csr.shape


def _tuple(case: Case, variant: int, index: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Any]:
    indptr, indices, values = case.arrays(variant)
    return indptr.to(index), indices.to(index), values, case.csr.shape


# Forms of A, of a variant of the matrix.
FORMS: dict[str, Callable[[Case, int], Any]] = {
    "sparse tensor": lambda case, variant: case.fresh(variant),
    "int64 arrays": lambda case, variant: _tuple(case, variant, torch.int64),
    "int32 arrays": lambda case, variant: _tuple(case, variant, torch.int32),
    "sorted edges": lambda case, variant: _edges(case, variant, False),
    "edges": lambda case, variant: _edges(case, variant, True),
}


def _calls(plan: Callable[[], object]) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(plan)
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined, no-any-return]


def planning(context: Context) -> None:
    """Wall time of st.plan, in microseconds."""

    def measure(case: Case, form: str, options: dict[str, Any]) -> Figure:
        make = functools.partial(FORMS[form], case)
        for _ in range(2):
            st.plan(make(3), WIDTH, **options)
        spent, plans = [], []
        for number in range(REPEATS):
            A = make(number)

            def keep(A: Any = A) -> None:
                plans.append(st.plan(A, WIDTH, **options))

            spent.append(one_product(keep, case.device))
        median = 1e6 * statistics.median(spent)
        calls = _calls(functools.partial(st.plan, make(0), WIDTH, **options))
        return {
            "nnz": case.csr.nnz, "rows": case.rows, "system": plans[0].system,
            "plans_us": [1e6 * each for each in spent],
            "medians": {"plan, us": median, "calls": calls},
        }  # fmt: skip

    def matrix(case: Case) -> None:
        for named, options in PLANS.items():
            for form in FORMS if named in ("exact system", "10 runs") else ("int64 arrays",):
                context.attempt(
                    "planning", f"{named}, {form}", case.name,
                    functools.partial(measure, case, form, options),
                )  # fmt: skip

    context.each_matrix("planning", matrix)
