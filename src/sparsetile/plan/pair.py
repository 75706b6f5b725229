"""A product and its gradient, for nodes of autograd's graph that compute more than a product.

A layer whose linear maps and product are one node needs fewer operations of the host than one node
for each. A pair is looked up once; as long as it is ``current`` nothing has to be asked again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsetile.core.streams import capturing
from sparsetile.intake.csr import FP8
from sparsetile.plan.eager import (
    differentiable_product,
    extremum_product,
    gradient_product,
    plain_product,
    same_values,
    tracked_extremum,
)
from sparsetile.plan.family import Family, Flat
from sparsetile.plan.plan import Plan
from sparsetile.plan.traced import gradients, operators
from sparsetile.plan.variant import Variant

__all__ = ["Pair", "Reduction", "pair_of"]


class Reduction(Protocol):
    """What such a node needs of a product, planned or not; see :class:`Pair`."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of operands."""

    def product(self, B: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the reduction of B and, of maxima and minima, which have no bias, the winners."""

    def gradient(self, grad: Tensor, winners: Tensor | None) -> Tensor:
        """Return the gradient of B; differentiable if autograd records it."""

    def tracked(self, B: Tensor) -> Tensor:
        """Return the reduction as nodes of its own, which autograd differentiates again."""


class Pair(NamedTuple):
    """The variants that a product and its gradient use. Operands are matrices of their type."""

    family: Family
    variant: Variant
    other: Variant | None  # of the gradient of a sum or mean, if there is one
    flat: Flat | None  # of a maximum or minimum
    differentiable: bool  # in B
    version: int
    reduce: str

    @property
    def dtype(self) -> torch.dtype:
        """The type of operands."""
        return self.variant.dtype

    def current(self) -> bool:
        """Count a product, and return whether the pair still computes it: values and system are
        those that it was made with."""
        family, variant = self.family, self.variant
        if family.version != self.version or family.follow is not None:
            return False
        if variant.later is not None:
            return family.counted(variant) is variant
        return family.forward is variant

    def product(self, B: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the reduction of B and, of maxima and minima, which have no bias, the winners."""
        if self.flat is not None:
            return extremum_product(self.variant, self.flat, B, self.reduce, self.differentiable)
        # A CUDA graph may take the symmetry for granted from now on.
        if self.differentiable and self.family.symmetric:
            self.family.for_gradients(self.variant)
        return plain_product(self.variant, B, bias, self.reduce, 1.0, False), None

    def gradient(self, grad: Tensor, winners: Tensor | None) -> Tensor:
        """Return the gradient of B; differentiable if autograd records it."""
        same_values(self.family, self.version)
        if self.flat is not None:
            again = torch.is_grad_enabled() and grad.requires_grad
            won: Any = torch.ops.sparsetile.spmm_won if again else operators.spmm_won
            tensors, recipe = self.flat
            return won(tensors, self.variant.values, grad, winners, recipe)  # type: ignore[no-any-return]
        if self.reduce == "mean":
            scale = self.family.row_scale(self.variant)
            self.variant.note_stream()
            grad = gradients.scaled_rows(grad, scale)
        assert self.other is not None
        return gradient_product(self.family, self.variant, self.other, grad, 1.0)

    def tracked(self, B: Tensor) -> Tensor:
        """Return the reduction as nodes of its own, which autograd differentiates again."""
        if self.flat is not None:
            return tracked_extremum(self.family, self.variant, B, self.reduce)
        return differentiable_product(self.family, self.variant, B, None, self.reduce, 1.0, False)


def pair_of(plan: Plan, reduce: str, differentiable: bool) -> Pair | None:
    """Return the pair of a plan for one width; None if products have to ask the plan each time.

    What the gradient of B needs is built now, if it is ``differentiable``.
    """
    family, variant = plan._family, plan._variant
    if variant.later is not None:
        variant = family.counted(variant)
    if (
        variant.transposed
        or variant is not family.forward
        or variant.dtype is FP8
        or family.widths is not None
        or family.follow is not None
        or not family.complete
    ):
        return None
    other, flat = None, None
    if reduce in ("max", "min"):
        flat = family.differentiable(variant) if differentiable else variant.flat
    elif differentiable:
        other = family.for_gradients(variant)
        if reduce == "mean" and not capturing(variant.device):
            family.row_scale(variant)
    return Pair(family, variant, other, flat, differentiable, family.version, reduce)
