"""What schedules have in common: items of work as tensors on a device.

A policy is one file in this package with one class, a frozen dataclass of tensors.
``tests/balance/decoding.py`` reads its items back as parts of units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from sparsetile.formats.units import Units

__all__ = ["Schedule"]


class Schedule(ABC):
    """Items of work that cover every unit once; subclasses are frozen dataclasses of tensors.

    Attributes
    ----------
    arrays : tuple of str
        Tensors that the kernels read, in :meth:`tensors`.
    dtype : torch.dtype
        Type of all of them.
    consecutive : bool
        Whether the policy joins neighbouring units of one list.
    items : Tensor [items, numbers of an item]
        Each policy defines the numbers.
    """

    arrays: ClassVar[tuple[str, ...]] = ("items",)
    dtype: ClassVar[torch.dtype] = torch.int32
    consecutive: ClassVar[bool] = False

    items: Tensor

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
