"""A's values as a plan holds them: in its type, packed for its kernel, cast where autocast asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsetile.systems.base import Runner

__all__ = ["HeldValues"]


class HeldValues:
    """Canonical values, one per stored entry; None for a pattern.

    Attributes
    ----------
    held, packed : Tensor or None
        The values in the plan's type, and what the runner made of them.
    follow : callable or None
        Values that require grad are not copied but followed: each run asks for them anew, so that
        an optimiser's step is seen and each run has an autograd graph of its own.
    """

    def __init__(self, runner: Runner, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._runner = runner
        self._parts = parts
        self._dtype = dtype
        self._casts: dict[torch.dtype, tuple[Tensor | None, Tensor | None]] = {}
        self.held: Tensor | None = None
        self.packed: Tensor | None = None
        self.follow: Callable[[], Tensor | None] | None = None

    @property
    def now(self) -> Tensor | None:
        """The values that a product would take."""
        return self.held if self.follow is None else self.follow()

    def set(self, values: Tensor | None) -> bool:
        """Take over canonical values; in place where there are some, for graphs and bindings.

        Returns whether what was bound to the tensors before must be bound anew.
        """
        if values is not None:
            values = values.to(self._dtype)
        first = self.held is None or values is None
        if self.held is not None and values is not None:
            self.held.copy_(values)
        else:
            self.held = values
        self._casts.clear()
        if self._runner.packs:
            packed = self._runner.pack(self._parts, self.held, self._dtype)
            if self.packed is None or self.packed.shape != packed.shape:
                self.packed = packed
            else:
                self.packed.copy_(packed)
        return first

    def _cast(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Values and packed values in another dtype (autocast); kept until they change."""
        if dtype is self._dtype:
            return self.held, self.packed
        if dtype not in self._casts:
            cast = None if self.held is None else self.held.to(dtype)
            packs = self._runner.packs
            packed = self._runner.pack(self._parts, cast, dtype) if packs else None
            self._casts[dtype] = (cast, packed)
        return self._casts[dtype]

    def operands(
        self, dtype: torch.dtype, given: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the values, or ``given`` ones, in ``dtype``, and their packed copy."""
        if given is None and self.follow is not None:
            given = self.follow()
        return self._cast(dtype) if given is None else (given.to(dtype), None)
