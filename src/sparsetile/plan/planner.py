"""``plan()``: intake, row order, choice of a system, build, compile; timed stage by stage.

``build_plan`` is the same with what only benchmarks ask for: ablations and exact stage times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from typing import Any, Literal

import torch
from torch import Tensor

from sparsetile.core.checks import dimension, one_of, real_number
from sparsetile.core.errors import type_error, value_error
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import refuse_capture
from sparsetile.engines.request import Request
from sparsetile.intake import CSR, as_csr, current_values
from sparsetile.intake.csr import COMPLEX, PRODUCT_DTYPES
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.tuples import graph_parts
from sparsetile.plan.build import (
    built_within_memory,
    direct_variant,
    directly,
    later_of,
    notes_on,
    order_that_pays,
    quickly,
    sensible,
    within_memory,
)
from sparsetile.plan.complex_plan import ComplexPlan
from sparsetile.plan.complex_products import parts_of
from sparsetile.plan.devices import usable_device
from sparsetile.plan.family import FIRST_WIDTH, Family, Widths
from sparsetile.plan.inference import InferencePlan
from sparsetile.plan.modes import outside_modes, untraced, wrapped
from sparsetile.plan.plan import Plan
from sparsetile.plan.taken import taken
from sparsetile.plan.traced.flat import Direction
from sparsetile.plan.variant import Variant
from sparsetile.reorder import REORDERERS, Permutation
from sparsetile.reorder.columns import first_use, with_columns
from sparsetile.systems import SYSTEMS, candidates, runner
from sparsetile.systems.registry import exact_system, unsupported
from sparsetile.tune import (
    EXPECTED_RUNS,
    MEASURE_SECONDS,
    Choice,
    choose_system,
)

__all__ = ["build_plan", "plan", "refuse_traced", "refuse_wrapped"]


def _target_device(A: object, device: torch.device | str | None) -> torch.device | None:
    if device is not None:
        return usable_device("plan", device)
    on_host = isinstance(A, (str, os.PathLike)) or type(A).__module__.startswith("scipy.")
    if on_host and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return None


def refuse_wrapped(function: str, A: Any) -> None:
    """A plan outlives the transform of torch.func that a matrix may be an argument of."""
    if any(wrapped(part) for part in (A if isinstance(A, (tuple, list)) else (A,))):
        raise value_error(
            function, "A", "a matrix from outside of torch.func's transforms", "an argument of one",
            "Plan A outside, and give its values to plan.run(B, values=) inside",
        )  # fmt: skip


def refuse_traced(function: str, remedy: str) -> None:
    """torch.jit.trace has tensors for sizes: nothing can be planned with those."""
    if torch.jit.is_tracing():
        raise value_error(
            function, "the call", "outside of torch.jit.trace", "a call inside of it", remedy
        )


def _permutation(reorder: str | Tensor, csr: CSR) -> Permutation:
    if isinstance(reorder, Tensor):
        if reorder.is_floating_point() or reorder.is_complex() or reorder.dtype is torch.bool:
            raise type_error(
                "plan", "reorder", "whole row numbers", reorder.dtype,
                "Call reorder.to(torch.int64)",
            )  # fmt: skip
        order = reorder.to(device=csr.device, dtype=torch.int64)
        return Permutation("given", order).checked(csr.shape[0])
    name = one_of("plan", "reorder", reorder, ["auto", *REORDERERS])
    if name not in ("auto", "identity") and csr.nnz >= entry_limit():
        raise value_error(
            "plan", "reorder", f"'identity' or a permutation for {entry_limit()} entries or more",
            repr(name), "Find an order of a part of A, or omit reorder=",
        )  # fmt: skip
    return REORDERERS["identity" if name == "auto" else name](csr)


@untraced("Planning reads the pattern of A. Call sparsetile.plan outside of what is compiled")
def plan(
    A: Any,
    n: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    system: str = "auto",
    reorder: str | Tensor = "auto",
    reorder_columns: bool = False,
    deterministic: bool | None = None,
    tune: Literal["model", "measure", "none"] = "model",
    device: torch.device | str | None = None,
    keep: Literal["all", "inference"] = "all",
    expected_runs: int | None = None,
    budget: float = MEASURE_SECONDS,
) -> Plan:
    """Prepare A for products with dense matrices of about ``n`` columns.

    Parameters
    ----------
    A : sparse matrix [M, K]
        torch CSR/CSC/COO/BSR, scipy, cupyx, PyG's ``Data`` and ``EdgeIndex``,
        ``(edge_index, weight, shape)`` (square if the shape is omitted),
        ``(indptr, indices, values, shape)``, or the path of a .mtx, .mtx.gz or .npz file.
    n : int, optional
        Columns of B. Products of other widths work, with this width's plan. When None, the plan is
        made for 128 columns, and each other width is planned at its first product; the plans of
        the 8 most recent widths are kept.
    dtype : torch.dtype, optional
        Type of B and C; that of A's values (torch's default for a pattern) when None. Complex
        numbers (``complex64``, ``complex128``) are multiplied as real ones: a real A by one product
        of twice the columns, a complex one by two, with the exact system unless ``system`` names
        another.
    system : str
        ``auto``, or a name from :func:`sparsetile.systems`.
    reorder : str or Tensor [M]
        Row order: ``auto`` (one that is predicted to pay off within ``expected_runs`` products,
        else the given order), ``identity`` (the given order), ``rcm``, ``louvain``, ``lsh``,
        ``merging``, ``rabbit``, ``affinity``, ``locality`` (and its stages ``locality-mst`` and
        ``locality-2opt``), or a permutation of the rows.
    reorder_columns : bool
        Also renumber A's columns, in the order of their first use, so that rows of B that are
        used together are stored together. Products then take ``plan.permute(B)`` instead of B:
        permute a B that many products use only once. C keeps the order of A's rows.
    deterministic : bool, optional
        Use only systems that give the same bits in every run, and choose among them without timing
        (except with ``tune="measure"``). When None, torch's own setting.
    tune : {"model", "measure", "none"}
        ``model`` chooses the system by a cost model. ``measure`` times the systems with the best
        predictions on random input; timings are kept on disk and reused (``sparsetile tune``).
        ``none`` compares nothing: ``auto`` is then the device's exact system (``csr`` or ``cpu``).
        Use it for matrices that are multiplied only a few times, such as sampled blocks.
    device : torch.device, optional
        Where to run. When None, A's own device; files and scipy matrices go to the GPU if there is
        one.
    keep : {"all", "inference"}
        ``"inference"`` keeps only what products read: for ``bcsr`` the blocks and their indices,
        about a tenth of the dense bytes if nine of ten blocks are dropped. Such a plan supports
        sums and means without gradients. New values, gradients, the transpose, max, min, other
        dtypes and :meth:`Plan.save` need ``"all"``. ``Plan.info["bytes"]`` lists what is kept.
    expected_runs : int, optional
        Number of products that you expect to compute with the plan. On a GPU, comparing all
        systems takes as long as hundreds to thousands of products: with a number, that is done at
        once if so many products are predicted to save it, and never if not. When None, the plan
        starts with a system that is planned quickly and compares all of them when it has computed
        enough products for that to pay; products before and after may differ in rounding. Give a
        number before you capture a CUDA graph, which fixes what is planned by then. For a few dozen
        products or fewer not even a schedule is built until more are computed: they read A's
        arrays.
        ``reorder="auto"`` searches for a row order by the same arithmetic.
    budget : float
        Seconds that ``tune="measure"`` may spend on timing, not counting compilation.

    Returns
    -------
    Plan

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> st.plan(A, n=2) @ torch.ones(3, 2)
    tensor([[3., 3.],
            [3., 3.]])

    A graph, as PyTorch Geometric writes it; entry (i, j) of A is the edge from j to i:

    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> graph = (edge_index.flip(0), None, (3, 3))
    >>> st.plan(graph, n=1) @ torch.tensor([[1.0], [10.0], [100.0]])
    tensor([[100.],
            [101.],
            [ 10.]])
    """
    refuse_traced("plan", "Make the plan outside of what is traced")
    refuse_wrapped("plan", A)
    made = build_plan(
        A, FIRST_WIDTH if n is None else n, dtype=dtype, system=system, reorder=reorder,
        reorder_columns=reorder_columns, deterministic=deterministic, tune=tune, device=device,
        keep=keep, expected_runs=expected_runs, budget=budget,
    )  # fmt: skip
    if n is None and keep == "all":
        exact = isinstance(made, ComplexPlan) and made._family.imaginary is not None
        made._family.widths = Widths(system, "none" if exact else tune, expected_runs)
    return made


@untraced("Planning reads the pattern of A. Call build_plan outside of what is compiled")
@outside_modes
def build_plan(
    A: Any, n: int, *, dtype: torch.dtype | None = None, system: str = "auto",
    reorder: str | Tensor = "auto", reorder_columns: bool = False,
    deterministic: bool | None = None, tune: str = "model",
    device: torch.device | str | None = None, keep: str = "all", expected_runs: int | None = None,
    budget: float = MEASURE_SECONDS, ablation: str | None = None, timed: bool = False,
    in_place: bool = False,
) -> Plan:  # fmt: skip
    """Do what :func:`plan` does, for benchmarks and ``spmm`` too.

    ``ablation`` is the last step of the named system's ladder that is on, or the one part that is
    off. ``timed`` waits for the device at the end of each stage, so that ``info["seconds"]`` and
    ``info["build"]`` hold each stage's own work. With ``in_place`` values will be read
    from the caller's memory: the exact system must not copy them.
    """
    n = dimension("plan", "n", n)
    one_of("plan", "tune", tune, ["model", "measure", "none"])
    one_of("plan", "system", system, ["auto", *SYSTEMS])
    one_of("plan", "keep", keep, ["all", "inference"])
    runs = None if expected_runs is None else dimension("plan", "expected_runs", expected_runs)
    budget = real_number("plan", "budget", budget)
    if not 0 < budget < math.inf:
        raise value_error("plan", "budget", "seconds above 0", budget, "Omit it for half a second")
    if not isinstance(reorder_columns, bool):
        raise type_error(
            "plan", "reorder_columns", "True or False", repr(reorder_columns),
            "Choose a row order with reorder=",
        )  # fmt: skip
    _check_ablation(system, ablation)
    clock = {"begun": time.perf_counter()}
    target = _target_device(A, device)
    if torch.cuda.is_initialized():
        refuse_capture("plan", torch.device("cuda"), "Plan A before the capture")
    csr = taken(A, target)
    source = as_csr(A, function="plan", device=target, complex_values=True) if csr is None else csr
    if dtype in COMPLEX or (source.values is not None and source.values.is_complex()):
        plain = not reorder_columns and keep == "all"
        return _complex_plan(
            A, source, n, dtype, system, plain, reorder=reorder, deterministic=deterministic,
            tune=tune, expected_runs=expected_runs, budget=budget, ablation=ablation, timed=timed,
        )  # fmt: skip
    if csr is None:
        csr = _own(source)
    read = functools.partial(_read_clock, csr.device if timed else None)
    if dtype is None:
        dtype = torch.get_default_dtype() if csr.values is None else csr.values.dtype
    if dtype not in PRODUCT_DTYPES:
        names = ", ".join(str(d) for d in (*PRODUCT_DTYPES, *COMPLEX))
        raise type_error("plan", "dtype", f"one of {names}", dtype, "Choose one of those")
    clock["intake"] = read()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    permutation, orders, notes = _permutation(reorder, csr), list[str](), list[str]()
    request = Request(csr, n, dtype, permutation, deterministic, ablation, timed, in_place=in_place)
    guard = torch.cuda.device(csr.device) if csr.device.type == "cuda" else contextlib.nullcontext()
    reorders = isinstance(reorder, str) and reorder == system == "auto" and tune != "none"
    reorders = reorders and csr.nnz < entry_limit()
    # What is kept for products alone cannot be planned again.
    settled = system != "auto" or tune != "model" or (keep == "inference" and runs is None)
    with guard:
        quick = None if settled else quickly(request, runs)
        if reorders and quick is None:
            try:
                expected = EXPECTED_RUNS if runs is None else runs
                permutation, orders = order_that_pays(request, expected)
            except torch.OutOfMemoryError:
                notes.append("memory ran out while row orders were compared: the given order")
    given, entries, column_order = csr, None, None
    if reorder_columns:
        _check_columns_reorder(csr)
        column_order = first_use(csr, permutation)
        csr, entries = with_columns(csr, column_order)
    if reorder_columns or permutation is not request.permutation:
        request = dataclasses.replace(request, csr=csr, permutation=permutation)
    clock["reorder"] = read()
    if quick is not None and not reorder_columns and keep == "all":
        direct = directly(request, quick[0], runs)
        followed = source.values is not None and source.values.requires_grad
        if direct is not None and not followed:
            clock["build"] = clock["compile"] = clock["reorder"]
            with guard:
                report = {"seconds": _spent(clock), "orders": orders}
                return Plan(Family(direct_variant(request, *quick, direct, runs, report)))
    uncompared = tune == "none" and system == "auto"
    if uncompared:
        system = exact_system(csr.device.type).name
    account, later, rejected = None, None, dict[str, list[str]]()
    with guard:
        if quick is not None:
            choice, account = quick
            later = later_of(account, runs, reorders and not reorder_columns, deterministic)
        else:
            able, rejected = sensible(request) if system == "auto" else candidates(request, system)
            if not able:
                raise unsupported("plan", rejected, "no system" if system == "auto" else system)
            choice = Choice(system, "none" if uncompared else "request")
            if system == "auto":
                choose = functools.partial(
                    choose_system, request, able, tune, budget=budget,
                    expected_runs=EXPECTED_RUNS if runs is None else runs,
                )  # fmt: skip
                choice = within_memory(request, choose, notes)
        choice, built = built_within_memory(request, choice, notes)
        clock["build"] = read()
        work = runner(built.recipe)  # held until the plan holds it, with what it prepared
        work.prepare(n, dtype, csr.values is not None, csr.device)
        clock["compile"] = read()
        spent = _spent(clock)
        direction, exact = None, choice.builds.get(exact_system(csr.device.type).name)
        if exact is not None and exact is not built:  # timed too: it need not be built again
            direction = Direction(csr.indptr, built, exact)
        variant = Variant(
            csr, n, dtype, built, permutation, deterministic=deterministic, direction=direction,
            report={
                "seconds": spent, "build": dict(built.seconds), "considered": dict(choice.seconds),
                "considered_by": choice.by, "measured": sorted(choice.measured), "orders": orders,
                "rejected": rejected, "notes": [*notes, *notes_on(request, choice)],
            } | ({} if account is None else {"account": account.report(runs)}),
        )  # fmt: skip
        variant.later = later
        made = Plan(Family(variant, column_order))
    if keep == "inference":
        return InferencePlan.of(made)
    if source.values is not None and source.values.requires_grad:
        made._family.follow = _following(A, given.with_values(None), entries)
    return made


def _spent(clock: dict[str, float]) -> dict[str, float]:
    """Seconds of each stage, from the times at their ends."""
    stamps = list(clock.items())
    return {name: at - before for (_, before), (name, at) in itertools.pairwise(stamps)}


def _check_columns_reorder(csr: CSR) -> None:
    """Renumbered columns have to be sorted, which takes 24 bytes for each entry."""
    if csr.nnz >= entry_limit():
        raise value_error(
            "plan", "reorder_columns", f"False for {entry_limit()} entries or more", True,
            "Renumber the columns of A before planning",
        )  # fmt: skip


def _complex_plan(
    A: Any, source: CSR, n: int, dtype: torch.dtype | None, system: str, plain: bool, **options: Any
) -> Plan:
    """Plan the real parts of A, for their own columns and those of the imaginary parts."""
    if not plain:
        raise value_error(
            "plan", "reorder_columns and keep", "False and 'all' with complex numbers",
            "something else", "Omit both",
        )  # fmt: skip
    values = source.values
    if dtype is None:
        assert values is not None
        dtype = values.dtype
    if dtype not in COMPLEX:
        raise type_error(
            "plan", "dtype", "torch.complex64 or torch.complex128 of a complex A", dtype,
            "Plan the real and imaginary parts of A for real products",
        )  # fmt: skip
    part, imaginary, trained = COMPLEX[dtype], None, None
    if values is not None and values.requires_grad:
        trained = _following(A, source.with_values(None), None)
    real = None if values is None else values.detach()
    if real is not None and real.is_complex():
        real, imaginary = parts_of(real.to(dtype))
        if system == "auto":  # others pack the imaginary parts again for each product
            options["tune"] = "none"
    made = build_plan(source.with_values(real), 2 * n, dtype=part, system=system, **options)
    return ComplexPlan.of(made, imaginary, trained)  # type: ignore[arg-type]


def _read_clock(device: torch.device | None) -> float:
    """Seconds now, once ``device`` has done all it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _following(
    A: Any, given: CSR, entries: Tensor | None
) -> functools.partial[Tensor] | functools.partial[Tensor | None]:
    """What returns A's values at each call. A tensor that can be named is, for tracers' sake."""
    kind = kind_of(A)
    if kind is Kind.GRAPH:
        return _following(graph_parts("plan", A), given, entries)
    if kind is Kind.CSR_TUPLE or kind is Kind.EDGE_TUPLE:
        leaf = A[2] if kind is Kind.CSR_TUPLE else A[1]
        return functools.partial(_ordered, leaf, given, entries)
    return functools.partial(_current, A, given, entries)


def _ordered(leaf: Tensor, given: CSR, entries: Tensor | None) -> Tensor:
    """The values of a tuple in the order of the plan's entries; differentiable."""
    values = given.canonical_values(leaf.to(given.device))
    return values if entries is None else values[entries]


@untraced("torch does not trace sparse tensors. Give the values of A to plan.update_values instead")
def _current(A: Any, given: CSR, entries: Tensor | None) -> Tensor | None:
    """A's values now, in the order of the plan's entries; differentiable."""
    values = current_values(A, given, function="run")
    if values is None:
        return None
    # A view of a sparse tensor is one that torch cannot trace: no view must come out of here.
    return values.clone() if entries is None else values[entries]


def _check_ablation(system: str, ablation: str | None) -> None:
    if ablation is None:
        return
    steps = SYSTEMS[system].ablations if system in SYSTEMS else ()
    if not steps:
        able = ", ".join(name for name in SYSTEMS if SYSTEMS[name].ablations)
        raise value_error(
            "plan", "ablation", f"None with system={system!r}", repr(ablation),
            f"Name a system that has ablations: {able}",
        )  # fmt: skip
    one_of("plan", "ablation", ablation, steps)


def _own(csr: CSR) -> CSR:
    """Return a copy that shares no memory with the caller's matrix."""
    return CSR(
        csr.indptr.clone(), csr.indices.clone(),
        None if csr.values is None else csr.values.detach().clone(), csr.shape,
        None if csr.entry_map is None else csr.entry_map.clone(), csr.checked,
    )  # fmt: skip
