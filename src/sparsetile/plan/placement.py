"""Plans on another device or in another type, and plans as objects that pickle can carry.

A plan is rebuilt from A's pattern, its values and its row order. The row order, which takes most
of the planning, is kept; tiles and schedules are made again where the device or the type differs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error
from sparsetile.intake import CSR
from sparsetile.intake.csr import FP8
from sparsetile.plan.dispatch import lasting
from sparsetile.plan.plan import Plan
from sparsetile.plan.saved import SavedPlan, saved_plan
from sparsetile.plan.values import canonical
from sparsetile.plan.widths import Widths
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, BuiltSystem, Request, candidates, runner
from sparsetile.systems.registry import exact_system, unsupported
from sparsetile.tune import Choice, choose_system

__all__ = ["copied", "move", "on_file", "place", "placed", "reduced", "restored"]

# What every module has: hooks and the like stay where they are when a plan moves.
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


@lasting
def place(
    function: str,
    csr: CSR,
    n: int,
    dtype: torch.dtype,
    permutation: Permutation,
    *,
    system: str,
    deterministic: bool,
    column_order: Tensor | None,
    tune: str = "model",
    ablation: str | None = None,
    report: Mapping[str, Any] | None = None,
) -> Plan:
    """Build a plan where ``csr`` lies, with ``system`` if that can run there, else the best.

    ``report`` is that of a plan which was made before: its system is known to run here.
    """
    started = time.perf_counter()
    request = Request(csr, n, dtype, permutation, deterministic, ablation)
    guard = torch.cuda.device(csr.device) if csr.device.type == "cuda" else contextlib.nullcontext()
    with guard:
        able, rejected = ([system], {}) if report is not None else candidates(request)
        if not able:
            raise unsupported(function, rejected, "no system")
        if system == "auto" and tune == "none":
            choice = Choice(exact_system(csr.device.type).name, "none")
        elif system in able:
            choice = Choice(system, "request")
        else:
            choice = choose_system(request, able, tune)
        built = choice.build(request)
        work = runner(built.recipe)  # held until the plan holds it, with what it prepared
        work.prepare(n, dtype, csr.values is not None, csr.device)
    made = {
        "seconds": {"build": time.perf_counter() - started},
        "build": dict(built.seconds),
        "considered": dict(choice.seconds),
        "considered_by": choice.by,
        "measured": sorted(choice.measured),
        "rejected": rejected,
    }
    return Plan(
        csr, n, dtype, built, permutation, deterministic=deterministic, report=report or made,
        column_order=column_order,
    )  # fmt: skip


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _follow_on(
    follow: Callable[[], Tensor | None] | None, device: torch.device
) -> Callable[[], Tensor | None] | None:
    """The same trainable values, brought to the new device; they themselves stay where they are."""
    if not isinstance(follow, functools.partial):
        return follow

    def there(argument: Any) -> Any:
        if isinstance(argument, CSR):
            return argument.to(device)
        fixed = isinstance(argument, Tensor) and not argument.requires_grad
        return argument.to(device) if fixed else argument

    return functools.partial(follow.func, *(there(each) for each in follow.args))


@lasting
def move(plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
    """Bring a plan and its transpose to another device or type, in place."""
    if (plan.device, plan.dtype) == (device, dtype):
        return
    csr = plan._csr.with_values(_on(plan._held.held, device)).to(device)
    permutation = Permutation(plan.reorder, _on(plan._permutation.perm, device))
    order = _on(plan.column_order, device)
    options = {"deterministic": plan.deterministic, "column_order": order}
    request = Request(csr, plan.n, dtype, permutation, plan.deterministic)
    same_kind = plan.device.type == device.type and plan.dtype is dtype
    if same_kind and not SYSTEMS[plan.system].reasons(request):
        old = plan._built
        tensors = {name: tensor.to(device) for name, tensor in old.tensors.items()}
        built = BuiltSystem(old.system, tensors, old.recipe, old.choices)
        made = Plan(csr, plan.n, dtype, built, permutation, report=plan._report, **options)  # type: ignore[arg-type]
    else:
        made = place("to", csr, plan.n, dtype, permutation, system=plan.system, **options)  # type: ignore[arg-type]
    made._held.follow = _follow_on(plan._held.follow, device)
    if plan._widths is not None:
        made._keep_widths(Widths(plan._widths.system, plan._widths.tune))
    transposed = plan._transposed
    version = plan._value_version + 1
    _become(plan, made)
    plan._value_version = version
    if transposed is not None:
        _become(transposed, plan._transpose())
        plan.__dict__["_transposed"] = transposed


def _become(plan: Plan, made: Plan) -> None:
    plan.__dict__.update(
        {name: value for name, value in made.__dict__.items() if name not in _OF_MODULES}
    )


def _fields(plan: Plan) -> dict[str, Any]:
    return {
        "shape": list(plan.shape),
        "n": plan.n,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "system": plan.system,
        "reorder": plan.reorder,
        "deterministic": plan.deterministic,
        "ablation": plan._built.choices.get("ablation"),
        "widths": plan._widths and [plan._widths.system, plan._widths.tune],
    }


def _tensors(plan: Plan, values: Tensor | None) -> dict[str, Tensor | None]:
    return {
        "indptr": plan._csr.indptr,
        "indices": plan._csr.indices,
        "entry_map": plan._csr.entry_map,
        "values": values,
        "perm": plan._permutation.perm,
        "column_order": plan.column_order,
    }


def _parts(plan: Plan) -> tuple[str, dict[str, Tensor | None]]:
    values = plan._held.held
    if values is not None and values.dtype is FP8:  # which torch cannot pickle; exact in this type
        values = values.to(torch.bfloat16)
    return json.dumps(_fields(plan), sort_keys=True), _tensors(plan, values)


def on_file(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """What ``Plan.save`` writes: the header's fields and the tensors, but not what was built."""
    fields = _fields(plan) | {"device": plan.device.type, "report": plan._report}
    return fields, _tensors(plan, plan.values)


def reduced(plan: Plan) -> tuple[Any, ...]:
    """What pickle writes: a text, tensors, and the tensor whose values are followed, if any."""
    follow = plan._held.follow
    if follow is None:
        return restored, (*_parts(plan), None)
    leaf = follow.args[0] if isinstance(follow, functools.partial) else None
    if not (isinstance(follow, functools.partial) and follow.func is canonical):
        raise type_error(
            "pickle", "plan", "one that holds its own values or follows those of update_values",
            "one that follows its matrix", "Call plan.update_values, or use plan.save",
        )  # fmt: skip
    return restored, (*_parts(plan), leaf)


def restored(header: str, tensors: Mapping[str, Tensor | None], followed: Tensor | None) -> Plan:
    """Build the plan that :func:`reduced` wrote, where its tensors lie now."""
    plan = placed("load", saved_plan(json.loads(header), tensors))
    return plan if followed is None else plan.update_values(followed)


def placed(function: str, saved: SavedPlan, report: Mapping[str, Any] | None = None) -> Plan:
    """Build a saved plan where its tensors lie; ``report`` as in :func:`place`."""
    request = saved.request
    plan = place(
        function, request.csr, request.n, request.dtype, request.permutation,
        system=saved.system, deterministic=request.deterministic,
        column_order=saved.column_order, ablation=request.ablation, report=report,
    )  # fmt: skip
    if saved.widths is not None:
        plan._keep_widths(saved.widths)
    return plan


@lasting
def copied(plan: Plan, memo: dict[int, Any]) -> Plan:
    """Copy a plan. It follows the copy of what the plan follows, where that is copied with it."""
    header, tensors = _parts(plan)
    own = {name: None if each is None else each.clone() for name, each in tensors.items()}
    made = restored(header, own, None)
    made._held.follow = copy.deepcopy(plan._held.follow, memo)
    return made


torch.serialization.add_safe_globals([restored])
