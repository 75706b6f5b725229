"""A product of several parts, each a runner of its own, that write disjoint rows of one C.

Tiles where rows share columns and CUDA cores where they do not: a hybrid system gives each row of
A to one part, which owns it entirely. The part stores the row after alpha, mean, beta, bias and
ReLU, and redoes it where it is not finite; no part zeroes C first. All parts read A's values in
canonical order or copies packed for them, and their launches follow each other in one bound
sequence, so that they overlap where the GPU lets them.

The tensors of part ``tiles`` are named ``tiles.items`` and so on, in the plan and in what
:meth:`HybridRunner.pack` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.systems.base import (
    PLAIN,
    BuiltSystem,
    Epilogue,
    Runner,
    Tensors,
    part,
    prefixed,
)
from sparsetile.systems.registry import runner
from sparsetile.systems.shared.bound import BoundProduct, Prepared

__all__ = ["HybridRunner", "join_parts"]


def join_parts(parts: Mapping[str, BuiltSystem]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the recipe's ``parts`` of a hybrid made of built parts."""
    tensors: dict[str, Tensor] = {}
    for name, built in parts.items():
        tensors |= prefixed(name, built.tensors)
    return tensors, {"parts": {name: built.recipe for name, built in parts.items()}}


class HybridRunner(Runner):
    """Runs each part's product; ``meta["parts"]`` names their recipes."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self.parts: dict[str, Runner] = {
            name: runner(str(recipe)) for name, recipe in meta["parts"].items()
        }
        self.packed_names = tuple(
            f"{name}.{packed}" for name, each in self.parts.items() for packed in each.packed_names
        )

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        packed: dict[str, Tensor] = {}
        for name, each in self.parts.items():
            if each.needs_packed_values:
                packed |= prefixed(name, each.pack(part(name, tensors), values, dtype))
        return packed

    def _packed_of(self, name: str, packed: Tensors | None) -> Tensors | None:
        if packed is None or not self.parts[name].needs_packed_values:
            return None
        return part(name, packed)

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        for each in self.parts.values():
            each.prepare(n, dtype, weighted, device)

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        for name, each in self.parts.items():
            mine = self._packed_of(name, packed)
            each.spmm(part(name, tensors), values, mine, B, out, epilogue)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor
    ) -> Sequence[Prepared] | None:
        """Return the launches of all parts; None where one of them needs scratch or copies."""
        launches: list[Prepared] = []
        for name, each in self.parts.items():
            mine = self._packed_of(name, packed)
            found = each.prepare_launches(part(name, tensors), values, mine, B)  # type: ignore[attr-defined]
            if found is None:
                return None
            launches += found
        return launches

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> Callable[[Tensor], Tensor] | None:
        bindable = all(hasattr(each, "prepare_launches") for each in self.parts.values())
        return BoundProduct(self, tensors, values, packed) if self.rows and bindable else None
