"""The flat form of a plan, which torch's operators take: a list of tensors and a recipe text.

    indptr, forward tensors…, exact tensors…          what a product needs
    order, inverse, t_indptr, t_forward…, t_exact…    what its gradients need (may be missing)

*Forward* is the chosen system; *exact* is the exact system of the device (``csr`` or ``cpu``) that
serves max, min and the values' gradient, omitted when forward is that system already. The recipe
names every tensor, so that runners see them by name. ``order`` brings values from A's order to
Aᵀ's, ``inverse`` back; one of them is empty if A has too many entries to keep both. Swapping the
two directions gives the flat plan of Aᵀ: gradients of gradients need nothing more.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsetile.engines.request import BuiltSystem
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.launch.interface import Tensors
from sparsetile.reorder.permutation import positions
from sparsetile.systems import runner

__all__ = ["Direction", "FlatPlan", "flat_packed", "flatten", "parsed", "without_exact"]


@dataclass(frozen=True, eq=False)
class Direction:
    """A or its transpose: row pointers, the chosen system's build, the exact system's build."""

    indptr: Tensor
    forward: BuiltSystem
    exact: BuiltSystem

    def tensors(self) -> list[Tensor]:
        same = self.exact is self.forward
        exact = () if same else self.exact.tensors.values()
        return [self.indptr, *self.forward.tensors.values(), *exact]

    def recipes(self) -> list[str | None]:
        return [self.forward.recipe, None if self.exact is self.forward else self.exact.recipe]


def flatten(
    direction: Direction,
    transposed: Direction | None,
    order: Tensor | None,
    inverse: Tensor | None,
) -> tuple[list[Tensor], str]:
    """Return the operators' ``tensors`` and ``recipe``."""
    tensors = direction.tensors()
    recipes = [direction.recipes()]
    if transposed is not None and order is not None and inverse is not None:
        tensors += [order, inverse, *transposed.tensors()]
        recipes.append(transposed.recipes())
    return tensors, json.dumps(recipes)


def without_exact(indptr: Tensor, built: BuiltSystem) -> tuple[list[Tensor], str]:
    """The same of a plan that keeps nothing for max, min and gradients."""
    return [indptr, *built.tensors.values()], json.dumps([[built.recipe, ""]])


def flat_packed(packed: Tensors | None) -> list[Tensor]:
    """Return packed values as operators take them."""
    return [] if packed is None else list(packed.values())


class FlatPlan:
    """The parsed recipe: the place of each tensor in the flat list. One object per recipe text."""

    def __init__(self, recipe: str) -> None:
        recipes = json.loads(recipe)
        forward, exact = recipes[0]
        self.forward: Runner = runner(forward)
        exact_runner = self.forward if exact is None else runner(exact) if exact else None
        if exact_runner is not None and not isinstance(exact_runner, ExactRunner):
            raise TypeError(f"spmm: recipe must name an exact system, got {recipe}.")
        self._exact = exact_runner
        end = 1 + len(self.forward.tensor_names)
        self._forward_slice = slice(1, end)
        self._exact_slice = self._forward_slice
        if exact is not None:
            names = () if exact_runner is None else exact_runner.tensor_names
            self._exact_slice = slice(end, end + len(names))
        self.size = self._exact_slice.stop
        self.rows, self.cols, self.nnz = self.forward.rows, self.forward.cols, self.forward.nnz
        self.differentiable = len(recipes) == 2
        self.mirrored = json.dumps(recipes[::-1]) if self.differentiable else ""

    @property
    def exact(self) -> ExactRunner:
        """The exact system's runner."""
        if self._exact is None:
            raise RuntimeError(
                "spmm: tensors must hold A's entries for max, min and the values' gradient, got a "
                "plan of keep='inference'. Plan with keep='all'."
            )
        return self._exact

    def forward_tensors(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the chosen system's tensors by name."""
        return dict(zip(self.forward.tensor_names, tensors[self._forward_slice], strict=True))

    def exact_tensors(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the exact system's tensors by name."""
        return dict(zip(self.exact.tensor_names, tensors[self._exact_slice], strict=True))

    def packed(self, packed: Sequence[Tensor]) -> Tensors | None:
        """Return packed values by name; None if they are not packed."""
        if not packed:
            return None
        return dict(zip(self.forward.packed_names, packed, strict=True))

    def entry_order(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the entry of A that is each entry of its transpose."""
        order, inverse = tensors[self.size], tensors[self.size + 1]
        return order if order.shape[0] == self.nnz else positions(inverse)

    def mirror(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat list of the transpose."""
        order, inverse = tensors[self.size], tensors[self.size + 1]
        return [*tensors[self.size + 2 :], inverse, order, *tensors[: self.size]]


@functools.lru_cache(maxsize=4096)
def parsed(recipe: str) -> FlatPlan:
    """Return the parsed recipe."""
    return FlatPlan(recipe)
