"""Builds a variant on the matrix's device, by a system that is given or chosen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.engines.request import Request
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.variant import Variant
from sparsetile.systems import SYSTEMS, candidates, runner
from sparsetile.systems.registry import exact_system, unsupported
from sparsetile.tune import Choice, choose_system

__all__ = ["build_variant"]


@outside_modes
def build_variant(
    function: str, request: Request, system: str, *, tune: str = "model",
    report: Mapping[str, Any] | None = None,
) -> Variant:  # fmt: skip
    """Build with ``system`` if that can serve the request, else with the best.

    ``report`` is that of a plan which was made before: its system is known to run here.
    """
    started = time.perf_counter()
    csr = request.csr
    guard = torch.cuda.device(csr.device) if csr.device.type == "cuda" else contextlib.nullcontext()
    with guard:
        by, rejected = "request", dict[str, list[str]]()
        if system == "auto" and tune == "none":
            system, by = exact_system(csr.device.type).name, "none"
        if system != "auto" and (report is not None or not SYSTEMS[system].reasons(request)):
            choice = Choice(system, by)
        else:
            able, rejected = candidates(request)
            if not able:
                raise unsupported(function, rejected, "no system")
            choice = choose_system(request, able, tune)
        built = choice.build(request)
        work = runner(built.recipe)  # held until the variant holds it, with what it prepared
        work.prepare(request.n, request.dtype, csr.values is not None, csr.device)
    made = {
        "seconds": {"build": time.perf_counter() - started}, "build": dict(built.seconds),
        "considered": dict(choice.seconds), "considered_by": choice.by,
        "measured": sorted(choice.measured), "rejected": rejected,
    }  # fmt: skip
    return Variant(
        csr, request.n, request.dtype, built, request.permutation,
        deterministic=request.deterministic, report=report or made,
    )  # fmt: skip
