"""The interface of all schedules, how their items are read, and the registry of policies.

A new policy is one file in this package with one class. Subclasses of ``Schedule`` register
themselves by their ``name``; ``balance/__init__.py`` imports every module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from sparsetile.core.packages import register
from sparsetile.formats.base import Variants
from sparsetile.formats.units import Units

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES: dict[str, type[Schedule]] = {}


class Schedule(ABC):
    """Items of work that cover every unit once; subclasses are frozen dataclasses of tensors.

    Attributes
    ----------
    name : str
        Key in ``SCHEDULES``. A class that does not set one is not registered.
    variants : mapping
        Named option sets of :meth:`make`, with which the contract suite runs the policy.
    arrays : tuple of str
        Tensors that the kernels read, in :meth:`tensors`.
    dtype : torch.dtype
        Type of all of them.
    consecutive : bool
        Whether the policy joins neighbouring units of one list.
    items : Tensor [items, numbers of an item]
        Each policy defines the numbers.
    """

    name: ClassVar[str]
    variants: ClassVar[Variants] = {"default": {}}
    arrays: ClassVar[tuple[str, ...]] = ("items",)
    dtype: ClassVar[torch.dtype] = torch.int32
    consecutive: ClassVar[bool] = False

    items: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls, SCHEDULES, "Schedule")

    @classmethod
    @abstractmethod
    def make(cls, units: Units, *args: Any, **options: Any) -> Self:
        """List the items of ``units``, in the order in which they should be visited."""

    @classmethod
    def reason(cls, units: Units) -> str | None:
        """Return why this policy cannot schedule ``units``; None if it can."""
        if cls.consecutive and units.offsets is None:
            return "units must follow each other in one list"
        return None

    @classmethod
    def _require(cls, units: Units) -> None:
        reason = cls.reason(units)
        if reason is not None:
            argument, _, expected = reason.partition(" must ")
            raise ValueError(
                f"{cls.__name__}.make: {argument} must {expected}. Use another schedule."
            )

    @property
    def item_count(self) -> int:
        return self.items.shape[0]

    def to(self, device: torch.device) -> Self:
        """Return the same schedule with its tensors on a device."""
        if self.items.device == device:
            return self
        found = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        # From the host, without waiting for the device: the copy reads pageable memory before the
        # call returns.
        moved = {
            name: value.to(device, non_blocking=device.type == "cuda")
            for name, value in found.items()
            if isinstance(value, Tensor)
        }
        return cast(Self, replace(cast(Any, self), **moved))

    def tensors(self) -> dict[str, Tensor]:
        """Return every array that the kernels read, by name."""
        return {name: getattr(self, name) for name in self.arrays}

    @abstractmethod
    def pieces(self) -> Tensor:
        """Return the parts of units in the items, in the order of the items, int64 [pieces, 4].

        Whether the unit is a bundle (0 or 1), its label, and begin and end in its list. An item of
        several units has a piece for each.
        """

    def slots(self) -> Tensor:
        """Return the slot of each piece's partial sum, int64 [pieces]; -1 for a whole unit."""
        return torch.full((self.pieces().shape[0],), -1, device=self.items.device)

    def joined(self, sums: Tensor) -> Tensor:
        """Return the sum of each piece's unit, [pieces], from the ``sums`` [pieces] of the pieces.

        Partial sums of cut units are added in the order in which the device adds them.
        """
        return sums
