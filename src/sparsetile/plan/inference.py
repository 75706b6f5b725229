"""InferencePlan: a plan that holds what its own products read, and nothing else.

A plan keeps A's entries beside what was made of them, for new values, gradients, max and min, and
files. A layer that only multiplies needs none of that: of ``bcsr`` its blocks and their indices.
See ``plan(keep="inference")``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake import CSR
from sparsetile.plan.dispatch import lasting
from sparsetile.plan.flat import Direction, without_exact
from sparsetile.plan.plan import Plan
from sparsetile.plan.report import held_parts
from sparsetile.systems import runner
from sparsetile.systems.base import BuiltSystem, Tensors, tensor_bytes

__all__ = ["InferencePlan"]


def _refuse(function: str, what: str) -> NoReturn:
    raise value_error(
        function, what, "omitted with a plan of keep='inference'", "a call that needs A's entries",
        "Plan with keep='all', which is the default",
    )  # fmt: skip


class InferencePlan(Plan):
    """What ``plan(keep="inference")`` returns; see there."""

    _castable = False  # a cast is a whole plan, which needs A's entries
    _floor: tuple[float, str]
    _entries: int
    _is_weighted: bool

    @classmethod
    @lasting
    def of(cls, full: Plan) -> InferencePlan:
        """Take over what products of ``full`` read; it is not to be used any more."""
        made = cls.__new__(cls)
        made.__dict__.update(full.__dict__)
        made._floor = full.floor()
        made._entries, made._is_weighted = full.nnz, full._weighted
        held, built = full._held, full._built
        dropped = full._runner.pack_only if held.packed is not None else ()
        if dropped:
            made._built = built = _without(built, dropped)
        made._runner = runner(built.recipe)
        held.release(made._runner, built.tensors)
        made._bound = made._runner.bind(built.tensors, held.held, held.packed)
        indptr = full._csr.indptr
        none = indptr.new_empty(0, dtype=torch.int32)
        made._csr = CSR(indptr, none, None, full.shape)
        made._direction = Direction(indptr, built, built)
        made._flat = without_exact(indptr, built)
        made._transposed = made._order = made._origin = None
        return made

    @property
    def nnz(self) -> int:
        return self._entries

    @property
    def _weighted(self) -> bool:
        return self._is_weighted

    @property
    def values(self) -> Tensor | None:
        _refuse("values", "values")

    def update_values(self, values: Tensor) -> Plan:
        _refuse("update_values", "values")

    def run(self, B: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        if options.get("values") is not None:
            _refuse("run", "values")
        if options.get("reduce", "sum") not in ("sum", "add", "mean"):
            _refuse("run", "max and min")
        return super().run(B, out, **options)

    def _transpose(self) -> Plan:
        _refuse("run", "gradients and transposes")

    def _prepare_gradients(self) -> bool:
        # A tracer asks for it before it knows whether gradients are wanted.
        if not torch.compiler.is_compiling():
            self._transpose()
        return True

    _prepare_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def floor(self) -> tuple[float, str]:
        return self._floor

    def save(self, path: str | os.PathLike[str]) -> None:
        _refuse("save", "saving")

    def _parts(self) -> dict[str, Tensors]:
        return held_parts(self)


def _without(built: BuiltSystem, names: tuple[str, ...]) -> BuiltSystem:
    """The same build without some of its tensors."""
    tensors = {name: tensor for name, tensor in built.tensors.items() if name not in names}
    name, _, body = built.recipe.partition(":")
    meta = json.loads(body) | {"tensors": list(tensors)}
    recipe = f"{name}:{json.dumps(meta, sort_keys=True)}"
    assert tensor_bytes(tensors.values()) <= built.bytes
    return replace(built, tensors=tensors, recipe=recipe)
