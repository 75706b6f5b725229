"""Builds a variant on the matrix's device, by a system that is given or chosen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.intake.arrays import dtype_name
from sparsetile.plan.direct import DirectVariant, multiplies_arrays
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.traced.flat import Direction
from sparsetile.plan.variant import Later, Variant
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, candidates, runner
from sparsetile.systems.registry import exact_system, unsupported
from sparsetile.tune import (
    EXPECTED_RUNS,
    Account,
    Choice,
    choose_order,
    choose_quickly,
    choose_system,
    schedule_account,
    source_of,
)

__all__ = [
    "build_compared", "build_variant", "built_within_memory", "direct_variant", "directly",
    "later_of", "notes_on",
    "order_that_pays", "quickly", "sensible", "within_memory",
]  # fmt: skip

# Inf and NaN among A's values, as a share of its rows, above which ``auto`` takes the exact system.
_NOT_FINITE_SHARE = 1e-3


def sensible(request: Request) -> tuple[list[str], dict[str, list[str]]]:
    """Return what ``candidates`` does, without systems that would recompute most of C each time."""
    able, rejected = candidates(request)
    exact = exact_system(request.csr.device.type).name
    if exact not in able or len(able) == 1 or not _often_not_finite(request):
        return able, rejected
    reason = f"A often has Inf or NaN in {dtype_name(request.dtype)}: most of C would be recomputed"
    return [exact], rejected | {name: [reason] for name in able if name != exact}


def _often_not_finite(request: Request) -> bool:
    """Whether many rows of A hold an Inf or NaN in the product's dtype.

    Systems with tiles or blocks recompute the rows that such a value reaches, entry by entry. With
    one in every window a product took 23 times the predicted time (bcsstk17, whose values overflow
    float16; development reading).
    """
    values = request.csr.values
    if values is None or values.numel() == 0:
        return False

    def often() -> bool:
        finite = int(torch.isfinite(values.to(request.dtype)).sum())
        return values.numel() - finite > _NOT_FINITE_SHARE * request.csr.shape[0]

    return request.once(("not finite", request.dtype), often)


def order_that_pays(request: Request, runs: int) -> tuple[Permutation, list[str]]:
    """Return the row order that pays, and why; the given one if there is nothing to choose."""
    able, _ = sensible(request)
    return choose_order(request, able, runs) if len(able) > 1 else (request.permutation, [])


def quickly(request: Request, runs: int | None) -> tuple[Choice, Account] | None:
    """Return the choice among systems that are planned quickly, and the account of comparing all;
    None if all of them are to be compared for ``runs`` products."""
    found = choose_quickly(request, runs)
    if found is None or (EXPECTED_RUNS if runs is None else runs) >= found[1].products:
        return None
    choice, account = found
    exact = exact_system(request.device.type).name
    if choice.system != exact and _often_not_finite(request):
        choice = Choice(exact, "model", choice.seconds)
    return choice, account


def directly(request: Request, choice: Choice, runs: int | None) -> Account | None:
    """Return the account of the exact system's schedule if ``runs`` products do not pay for it:
    they are computed from A's arrays; None if a schedule is built."""
    if runs is None or not multiplies_arrays(request):
        return None
    account = schedule_account(request, choice)
    return account if account is not None and runs < account.products else None


def direct_variant(
    request: Request, choice: Choice, account: Account, direct: Account, runs: int | None,
    report: Mapping[str, Any],
) -> DirectVariant:  # fmt: skip
    """Return the variant that multiplies from A's arrays and, unless bits must repeat, gets a
    schedule after as many products as would have paid for it."""
    made = DirectVariant(
        request.csr, request.n, request.dtype, request.permutation,
        deterministic=request.deterministic,
        report={
            "build": {}, "considered": dict(choice.seconds), "considered_by": choice.by,
            "measured": [], "rejected": {}, "notes": notes_on(request, choice),
            "account": account.report(runs), "direct": direct.report(None), **report,
        },
    )  # fmt: skip
    if not request.deterministic:
        made.later = Later(int(direct.products) + 1, False, schedules=True)
    return made


def later_of(
    account: Account, runs: int | None, reorders: bool, deterministic: bool
) -> Later | None:
    """Return when to compare all systems if the number of products is unknown; None for never.

    A comparison may change the bits of later products, so determinism keeps the first choice.
    """
    if runs is not None or deterministic or account.saves <= 0:
        return None
    return Later(int(account.products) + 1, reorders)


def within_memory(request: Request, choose: Callable[[], Choice], notes: list[str]) -> Choice:
    """Return the choice, or the exact system if comparing others takes more memory than there is.

    ``notes`` gets what a plan should say of that.
    """
    try:
        return choose()
    except torch.OutOfMemoryError:
        exact = exact_system(request.device.type).name
    notes.append(f"memory ran out while systems were compared: {exact} without a comparison")
    return Choice(exact, "none")


def built_within_memory(
    request: Request, choice: Choice, notes: list[str]
) -> tuple[Choice, BuiltSystem]:
    """Build what was chosen, or the exact system if that takes more memory than there is.

    A system that the caller named is not replaced.
    """
    exact = exact_system(request.device.type).name
    try:
        return choice, choice.build(request)
    except torch.OutOfMemoryError:
        if choice.by == "request" or choice.system == exact:
            raise
    # Here nothing refers to the traceback any more, and so to the memory of what failed.
    notes.append(f"memory ran out while {choice.system} was built: {exact} in its place")
    seconds = choice.seconds if exact in choice.seconds else {}
    instead = Choice(exact, choice.by if seconds else "none", seconds, choice.measured)
    return instead, instead.build(request)


def notes_on(request: Request, choice: Choice) -> list[str]:
    """Return what a plan should say of the constants that its choice was predicted with."""
    if choice.by != "model" or source_of(request.machine) != "scaled":
        return []
    return [
        f"predicted with constants of another GPU, scaled to {request.machine.name}: "
        "`sparsetile tune --fit` measures them"
    ]


def _guard(request: Request) -> contextlib.AbstractContextManager[Any]:
    device = request.device
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@outside_modes
def build_variant(
    function: str, request: Request, system: str, *, tune: str = "model",
    report: Mapping[str, Any] | None = None, runs: int | None = None,
) -> Variant:  # fmt: skip
    """Build with ``system`` if that can serve the request, else with the best.

    ``report`` is that of a plan which was made before: its system is known to run here.
    """
    started = time.perf_counter()
    with _guard(request):
        rejected, later, account, notes = dict[str, list[str]](), None, None, list[str]()
        by = "request"
        if system == "auto" and tune == "none":
            system, by = exact_system(request.device.type).name, "none"
        quick = quickly(request, runs) if system == "auto" and tune == "model" else None
        if quick is not None:
            choice, account = quick
            direct = directly(request, choice, runs)
            if direct is not None:
                spent = {"build": time.perf_counter() - started}
                return direct_variant(request, choice, account, direct, runs, {"seconds": spent})
            later = later_of(account, runs, False, request.deterministic)
        elif system != "auto" and (report is not None or not SYSTEMS[system].reasons(request)):
            choice = Choice(system, by)
        else:
            able, rejected = candidates(request)
            if not able:
                raise unsupported(function, rejected, "no system")
            expected = EXPECTED_RUNS if runs is None else runs
            choice = within_memory(
                request,
                lambda: choose_system(request, able, tune, expected_runs=expected),
                notes,
            )
        return _made(request, choice, rejected, report, started, later, account, notes=notes)


@outside_modes
def build_compared(old: Variant, later: Later) -> Variant:
    """Return the variant that comparing all systems finds for as many products again."""
    request = Request(
        old.csr.with_values(old.values), old.n, old.dtype, old.permutation, old.deterministic
    )
    started, orders = time.perf_counter(), list[str]()
    with _guard(request):
        if later.reorders:
            order, orders = order_that_pays(request, later.products)
            request = request if order is request.permutation else _ordered(request, order)
        able, rejected = sensible(request)
        choice = choose_system(request, able, "model", expected_runs=later.products)
        same = request.permutation is old.permutation
        made = _made(
            request, choice, rejected, None, started, exact=old.direction.exact if same else None
        )
    made.report |= {"orders": orders, "compared_after": later.products}
    return made


def _ordered(request: Request, order: Permutation) -> Request:
    """The request in another row order, of which nothing is counted yet."""
    return Request(request.csr, request.n, request.dtype, order, request.deterministic)


def _made(
    request: Request, choice: Choice, rejected: dict[str, list[str]],
    report: Mapping[str, Any] | None, started: float, later: Later | None = None,
    account: Account | None = None, exact: BuiltSystem | None = None,
    notes: Sequence[str] = (),
) -> Variant:  # fmt: skip
    csr, notes = request.csr, list(notes)
    choice, built = built_within_memory(request, choice, notes)
    work = runner(built.recipe)  # held until the variant holds it, with what it prepared
    work.prepare(request.n, request.dtype, csr.values is not None, csr.device)
    made = {
        "seconds": {"build": time.perf_counter() - started}, "build": dict(built.seconds),
        "considered": dict(choice.seconds), "considered_by": choice.by,
        "measured": sorted(choice.measured), "rejected": rejected,
        "notes": [*notes, *notes_on(request, choice)],
    }  # fmt: skip
    if account is not None:
        made["account"] = account.report(None)
    variant = Variant(
        csr, request.n, request.dtype, built, request.permutation,
        deterministic=request.deterministic, report=report or made,
        direction=None if exact is None else Direction(csr.indptr, built, exact),
    )  # fmt: skip
    variant.later = later
    return variant
