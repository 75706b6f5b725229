"""InferencePlan: a plan that holds what its own products read, and nothing else.

A plan keeps A's entries beside what was made of them, for new values, gradients, max and min, and
files. A layer that only multiplies needs none of that: of ``bcsr`` its blocks and their indices.
See ``plan(keep="inference")``.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.plan.family import Family, Flat
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.plan import Plan
from sparsetile.plan.variant import Variant

__all__ = ["InferencePlan"]


def _refuse(function: str, what: str) -> NoReturn:
    raise value_error(
        function, what, "omitted with a plan of keep='inference'", "a call that needs A's entries",
        "Plan with keep='all', which is the default",
    )  # fmt: skip


class _InferenceFamily(Family):
    """One variant, and the same in autocast's type if values need not be packed."""

    complete = False

    def _transpose(self, forward: Variant) -> Variant:
        _refuse("run", "gradients and transposes")

    def for_gradients(self, variant: Variant) -> Variant:
        _refuse("run", "gradients and transposes")

    def differentiable(self, variant: Variant) -> Flat:
        # A tracer asks for it before it knows whether gradients are wanted.
        if not torch.compiler.is_compiling():
            _refuse("run", "gradients and transposes")
        return variant.flat


class InferencePlan(Plan):
    """What ``plan(keep="inference")`` returns; see there."""

    _floor: tuple[float, str]

    @classmethod
    @outside_modes
    def of(cls, full: Plan) -> InferencePlan:
        """Take over what products of ``full`` read; it is not to be used any more."""
        family = full._family
        made = cls(_InferenceFamily(family.forward.for_inference(), family.column_order))
        made._floor = full.floor()
        return made

    @property
    def values(self) -> Tensor | None:
        _refuse("values", "values")

    def to_csr(self) -> Tensor:
        _refuse("to_csr", "A's entries")

    def update_values(self, values: Tensor) -> Plan:
        _refuse("update_values", "values")

    def run(self, B: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        if options.get("values") is not None:
            _refuse("run", "values")
        if options.get("reduce", "sum") not in ("sum", "add", "mean"):
            _refuse("run", "max and min")
        return super().run(B, out, **options)

    def floor(self) -> tuple[float, str]:
        return self._floor

    def save(self, path: str | os.PathLike[str]) -> None:
        _refuse("save", "saving")
