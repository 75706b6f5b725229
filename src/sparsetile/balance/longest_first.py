"""Whole units, longest first, so that the last ones are short.

For persistent thread blocks that take items one by one, such as the block rows of ``bcsr``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.balance.base import Schedule
from sparsetile.formats.units import Units

__all__ = ["LongestFirst"]


@dataclass(frozen=True, eq=False)
class LongestFirst(Schedule):
    """Items ``label, begin, length, 0``, int32, longest first; equal ones keep their order."""

    items: Tensor

    @classmethod
    def make(cls, units: Units) -> Self:
        """List every unit as one item."""
        cls._require(units)
        order = torch.argsort(units.length.to(torch.int32), descending=True, stable=True)
        columns = (units.label[order], units.begin[order], units.length[order])
        items = torch.stack([*columns, torch.zeros_like(order)], 1)
        return cls(items.to(torch.int32).contiguous())

    @classmethod
    def reason(cls, units: Units) -> str | None:
        """Items do not tell bundles from rows."""
        return "units must not be bundles of rows" if bool(units.bundled.any()) else None

    @property
    def longest(self) -> int:
        return int(self.items[0, 2]) if self.item_count else 0
