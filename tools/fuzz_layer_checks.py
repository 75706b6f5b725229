"""Runs the layer cases of ``tools.fuzz`` and checks each call against the layer's current content.

Results and gradients must be within the package's error bound. Gradients through ReLU, maxima and
softmax are compared in float64 only: in other types rounding may take another branch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import pyg
from sparsetile.check.bound import error_bound
from sparsetile.nn import aggregate, clear_graph_cache
from tools.fuzz_checks import GRADIENT_ERROR, settings
from tools.fuzz_judge import Wrong, compare
from tools.fuzz_layer_edits import apply_edit
from tools.fuzz_layer_models import SUBJECTS
from tools.fuzz_layer_subjects import Named, Subject
from tools.fuzz_layers import LayerCase

# Roundings between x and the result: linear maps, normalised weights, products, biases.
STEPS = 8
_TF32 = 2.0**-10


def run_layer_case(case: LayerCase) -> None:
    """Call, edit and call again as the case says; raises :class:`Wrong` for wrong results."""
    with settings(case.tf32), torch.inference_mode(case.inference):
        _fresh_start(case)
        rng = np.random.default_rng([case.seed, case.number])
        subject = SUBJECTS[case.layer](case, rng)
        edited = "first call"
        for number, mode in enumerate(case.modes):
            if number:
                what, how = case.edits[number - 1]
                apply_edit(subject, what, how)
                edited = f"after {what}: {how}"
                if rng.random() < 0.5:
                    subject.x = subject.new_x()
            _call(subject, mode, f"call {number + 1} ({mode}, {edited})")


@contextlib.contextmanager
def own_pyg() -> Iterator[None]:
    """Restore PyG's own layers at the end. Patching is slow, so it is done once for all cases."""
    before = pyg.is_patched()
    try:
        yield
    finally:
        if pyg.is_patched() and not before:
            pyg.unpatch()


def _fresh_start(case: LayerCase) -> None:
    """Reset the caches, so that a replay does the same."""
    clear_graph_cache()
    st.clear_plan_cache()
    if case.short_lived:  # after a graph of one call, the next ones count as short-lived
        with torch.no_grad():
            aggregate(torch.ones(2, 1, device=case.device),
                      torch.tensor([[0, 1], [1, 0]], device=case.device))  # fmt: skip


def _call(subject: Subject, mode: str, where: str) -> None:
    named = subject.named()
    values = _current({"x": subject.x, **named}, tracked=mode == "grad")
    with _mode(mode):
        x = subject.x.detach().clone() if mode == "grad" else subject.x
        if mode == "grad":
            x.requires_grad_()
        out = subject.call(x)
        wanted = subject.result(values)
        _check_form(subject, out, wanted, where)
        with torch.no_grad():
            compare(out, wanted, _widened(subject, wanted, subject.magnitude(values)), where)
        if mode == "grad":
            _gradients(subject, {"x": x, **named}, values, out, wanted, where)


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if mode == "inference":
            stack.enter_context(torch.inference_mode())
        if mode == "no grad":
            stack.enter_context(torch.no_grad())
        yield


def _current(named: Named, tracked: bool) -> Named:
    """Copies of the current content in float64; a tensor under two names has one."""
    made: dict[int, Tensor] = {}
    for each in named.values():
        if id(each) not in made:
            own = made[id(each)] = each.detach().to(torch.float64, copy=True)
            own.requires_grad_(tracked)
    return {name: made[id(each)] for name, each in named.items()}


def _check_form(subject: Subject, out: Tensor, wanted: Tensor, where: str) -> None:
    if out.shape != wanted.shape:
        raise Wrong(f"{where}: shape {tuple(out.shape)} instead of {tuple(wanted.shape)}")
    if out.dtype is not subject.dtype:
        raise Wrong(f"{where}: {out.dtype} instead of {subject.dtype}")


def _widened(subject: Subject, result: Tensor, magnitude: Tensor) -> Tensor:
    dtype = subject.dtype
    tf32 = subject.case.device == "cuda" and subject.case.tf32 and dtype is torch.float32
    bound = error_bound(result, magnitude, subject.terms, dtype=dtype, tf32=tf32, worst_case=True)
    stored = torch.finfo(dtype)
    unit = stored.eps / 2 + (_TF32 if tf32 else 0.0)
    return bound + STEPS * unit * (magnitude + stored.tiny)


def _gradients(
    subject: Subject, given: Named, values: Named, out: Tensor, wanted: Tensor, where: str
) -> None:
    """Compare the gradients of x, edge weights and parameters."""
    names = list({id(each): name for name, each in given.items() if each.requires_grad}.values())
    if not out.requires_grad:
        raise Wrong(f"{where}: the result has no gradient")
    G = subject.normal(*out.shape)
    found = torch.autograd.grad(out, [given[name] for name in names], G, allow_unused=True)
    leaves = [values[name] for name in names]
    expected = torch.autograd.grad(wanted, leaves, G.double(), allow_unused=True)
    sizes = _sizes(subject, values, names, G) if subject.smooth else [None] * len(names)
    for name, first, second, size in zip(names, found, expected, sizes, strict=True):
        first = torch.zeros_like(given[name]) if first is None else first
        second = torch.zeros_like(values[name]) if second is None else second
        if first.shape != second.shape:
            raise Wrong(f"{where}: gradient of {name}: shape {tuple(first.shape)}")
        if size is not None:
            bound = _widened(subject, second, size)
        elif subject.dtype is torch.float64:
            largest = float(second.abs().max()) if second.numel() else 0.0
            bound = torch.full_like(second, GRADIENT_ERROR * (1 + largest))
        else:
            continue
        compare(first, second, bound, f"{where}: gradient of {name}")


def _sizes(subject: Subject, values: Named, names: list[str], G: Tensor) -> list[Tensor]:
    """Magnitudes of gradients: those of the layer of absolute values."""
    made: dict[int, Tensor] = {}
    for each in values.values():
        made.setdefault(id(each), each.detach().abs().requires_grad_())
    sizes = {name: made[id(each)] for name, each in values.items()}
    result = subject.result(sizes, absolute=True)
    leaves = [sizes[name] for name in names]
    found = torch.autograd.grad(result, leaves, G.double().abs(), allow_unused=True)
    return [
        torch.zeros_like(leaf) if each is None else each
        for leaf, each in zip(leaves, found, strict=True)
    ]
