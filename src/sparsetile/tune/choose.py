"""Which system serves a request: by each system's own model, or by measuring each."""

from __future__ import annotations

import functools

import torch

from sparsetile.core.timer import measure
from sparsetile.systems import BuiltSystem, Request
from sparsetile.systems.registry import SYSTEMS, runner

__all__ = ["measure_systems", "predict_systems"]


def predict_systems(request: Request, able: list[str]) -> dict[str, float]:
    """Return the predicted seconds of each able system.

    Distinct (window, column) pairs are counted only where a candidate's model needs them: counting
    sorts all entries.
    """
    counts = any(SYSTEMS[name].counts_pairs for name in able)
    asked = request.changed(counts_pairs=counts)
    return {name: SYSTEMS[name].predict(asked) for name in able}


def measure_systems(
    request: Request, able: list[str]
) -> tuple[dict[str, float], dict[str, BuiltSystem]]:
    """Build and time every able system on random input; return seconds and builds by name."""
    csr = request.csr
    values = None if csr.values is None else csr.values.detach().to(request.dtype)
    B = torch.randn(csr.shape[1], request.n, device=request.device).to(request.dtype)
    out = torch.empty((csr.shape[0], request.n), dtype=request.dtype, device=request.device)
    seconds: dict[str, float] = {}
    builds: dict[str, BuiltSystem] = {}
    for name in able:
        built = builds[name] = SYSTEMS[name].build(request)
        work = runner(built.recipe)
        packed = work.pack(built.tensors, values, request.dtype)
        product = functools.partial(work.spmm, built.tensors, values, packed, B, out)
        seconds[name] = measure(product, request.device)
    return seconds, builds
