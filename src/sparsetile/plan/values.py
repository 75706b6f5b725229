"""A's values as a plan holds them: in its type, packed for its kernel, cast where autocast asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.streams import capturing, settle
from sparsetile.intake import CSR
from sparsetile.plan.dispatch import lasting
from sparsetile.systems.base import Runner, Tensors

__all__ = ["HeldValues", "canonical", "picked"]


def canonical(values: Tensor, csr: CSR) -> Tensor:
    """Return the caller's values in the order of the pattern's entries, where the pattern lies."""
    return csr.canonical_values(values.to(csr.device))


def picked(values: Tensor, order: Tensor) -> Tensor:
    """Return values in another order, where the order lies."""
    return values.to(order.device)[order]


class HeldValues:
    """Canonical values, one per stored entry; None for a pattern.

    Attributes
    ----------
    held : Tensor or None
        The values in the plan's type.
    packed : mapping of Tensor or None
        What the runner made of them, by name; None where it reads the values themselves.
    follow : callable or None
        Values that require grad are not copied but followed: each run asks for them again, so that
        an optimiser's step is seen and each run has an autograd graph of its own.
    """

    def __init__(self, runner: Runner, tensors: Tensors, dtype: torch.dtype) -> None:
        self._runner = runner
        self._tensors = tensors
        self._dtype = dtype
        self._casts: dict[torch.dtype, tuple[Tensor | None, Tensors | None]] = {}
        self.released = False  # only what is packed is left
        self.held: Tensor | None = None
        self.packed: Tensors | None = None
        self.follow: Callable[[], Tensor | None] | None = None

    @property
    def now(self) -> Tensor | None:
        """The values that a product would take."""
        return self.held if self.follow is None else self.follow()

    @property
    def cast_count(self) -> int:
        """In how many other types the values are kept."""
        return len(self._casts)

    def prepare(self, values: Tensor | None) -> tuple[Tensor | None, Tensors | None]:
        """Return canonical values as :meth:`take` wants them: all that needs memory is done here,
        and nothing that is held has changed where there was none."""
        if values is not None:
            values = values.to(self._dtype).resolve_neg()
        return values, self._pack(values, self._dtype)

    def take(self, values: Tensor | None, packed: Tensors | None) -> bool:
        """Take over what :meth:`prepare` returned; in place where there is some, for graphs and
        bindings.

        Returns whether what was bound to the tensors before must be bound again.
        """
        first = self.held is None or values is None
        if self.held is not None and values is not None:
            self.held.copy_(values)
        else:
            self.held = values
        self._casts.clear()
        if packed is None or self.packed is None or not _same_shapes(self.packed, packed):
            self.packed = packed
        else:
            for name, tensor in packed.items():
                self.packed[name].copy_(tensor)
        return first

    def _pack(self, values: Tensor | None, dtype: torch.dtype) -> Tensors | None:
        if not self._runner.needs_packed_values:
            return None
        return self._runner.pack(self._tensors, values, dtype)

    @lasting
    def _cast(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensors | None]:
        """Values and packed values in another dtype (autocast); kept until they change."""
        if dtype is self._dtype:
            return self.held, self.packed
        if self.released:
            raise value_error(
                "run", "B", f"{self._dtype} with a plan of keep='inference'", dtype,
                "Plan in that type, or with keep='all'",
            )  # fmt: skip
        found = self._casts.get(dtype)
        if found is None:
            cast = None if self.held is None else self.held.to(dtype)
            found = (cast, self._pack(cast, dtype))
            parts = (self.held, *self._tensors.values())
            device = next(each.device for each in parts if each is not None)
            if not capturing(device):  # a graph's memory is filled by replays alone
                settle(device)
                # Another thread may have been first: what it made may be in use, and stays.
                found = self._casts.setdefault(dtype, found)
        return found

    def release(self, runner: Runner, tensors: Tensors) -> None:
        """Drop what products of the plan's own type do not read; no new values come after this."""
        self._runner, self._tensors = runner, tensors
        self._casts.clear()
        self.follow = None
        if self.packed is not None and not runner.reads_values:
            self.held = None
            self.released = True

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept here."""
        kept = [(self.held, self.packed), *self._casts.values()]
        return [
            tensor
            for values, packed in kept
            for tensor in (values, *({} if packed is None else packed).values())
            if tensor is not None
        ]

    def operands(
        self, dtype: torch.dtype, given: Tensor | None = None
    ) -> tuple[Tensor | None, Tensors | None]:
        """Return the values, or ``given`` ones, in ``dtype``, and their packed copies."""
        if given is None and self.follow is not None:
            given = self.follow()
        return self._cast(dtype) if given is None else (given.to(dtype), None)


def _same_shapes(held: Tensors, fresh: Tensors) -> bool:
    return all(held[name].shape == tensor.shape for name, tensor in fresh.items())
