"""Work items of the CUDA-core kernels: rows and bundles of rows, long ones cut and joined again.

The device side is ``kernels/cuda/segment.cuh``; its comment draws the arrays. Built with tensor
operations on whichever device holds the matrix. Every part of the library that walks rows on CUDA
cores (the ``csr`` system, residual rows of the hybrid ones, SDDMM) takes its items from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sparsetile.balance.tree import TreeSchedule, build_tree, ranges
from sparsetile.core.errors import value_error
from sparsetile.formats.base import Variants
from sparsetile.formats.bundles import LIST_STEP
from sparsetile.formats.units import Units

__all__ = ["SegmentSchedule", "default_wide_length"]

# Entries over which an item gets a whole warp where groups are narrower than that. Rows of about
# the same length fill their warps' groups evenly, so there the longer limit is better.
WIDE_LENGTH = 32
EVEN_WIDE_LENGTH = 96
# Sections of the item list, and those whose items have a warp or more.
SECTIONS, WIDE_SECTIONS = 5, 3
# Cut units whose pieces are listed side by side.
INTERLEAVED = 16
# Items are sorted by length inside windows of this many, so that the groups of a warp have equal
# work while neighbours stay near each other.
SORT_WINDOW = 256


def _by_length(positions: Tensor, length: Tensor) -> Tensor:
    """Sort positions longest first inside windows of ``SORT_WINDOW``, stably."""
    window = torch.arange(positions.numel(), device=positions.device) // SORT_WINDOW
    order = torch.argsort(-length[positions], stable=True)
    return positions[order[torch.argsort(window[order], stable=True)]]


def _side_by_side(mine: Tensor, unit: Tensor, number: Tensor) -> Tensor:
    """Order pieces so that equal parts of neighbouring cut units follow each other.

    Entries are sorted by column, so such pieces read about the same rows of B: the warps of a
    block then find them in the SM's own cache.
    """
    if not mine.numel():
        return mine
    _, rank = torch.unique_consecutive(unit[mine], return_inverse=True)
    by_number = torch.argsort(number[mine], stable=True)
    return mine[by_number[torch.argsort((rank // INTERLEAVED)[by_number], stable=True)]]


def default_wide_length(units: Units) -> int:
    """Return the length over which an item should have a whole warp."""
    length = units.length
    between = length[(length > WIDE_LENGTH) & (length <= EVEN_WIDE_LENGTH)]
    return EVEN_WIDE_LENGTH if 2 * int(between.sum()) >= int(length.sum()) else WIDE_LENGTH


@dataclass(frozen=True, eq=False)
class SegmentSchedule(TreeSchedule):
    """Items ``label, begin, end, slot``; ``slot`` is -1 for a unit that was not cut.

    Five sections follow each other: shared rows, wide bundles, wide rows, bundles, rows; wide ones
    are long enough for a whole warp, shared ones for a whole thread block. In the first three
    pieces of cut units come first, because their sums finish in several steps.

    Attributes
    ----------
    sections : tuple of int
        Items in each of the five sections.
    """

    name = "segments"
    variants: ClassVar[Variants] = {
        "items of 5": {"max_length": 5},
        "items of 128": {"max_length": 128},
        "blocks share items of 40": {"max_length": 40, "wide_length": 4, "shared_length": 9},
    }

    sections: tuple[int, int, int, int, int]

    @classmethod
    def make(
        cls,
        units: Units,
        *,
        max_length: int,
        wide_length: int | None = None,
        shared_length: int | None = None,
    ) -> Self:
        """Cut units longer than ``max_length`` entries into even pieces and list all items.

        Parameters
        ----------
        units : Units
            What to schedule, in the order in which it should be visited.
        max_length : int
            Most entries an item may have, but for bundles at least one batch of their list.
        wide_length : int, optional
            Give items of more entries a whole warp; chosen by the units' lengths when None.
        shared_length : int, optional
            Give rows and pieces of rows of more entries a whole thread block; none when None.
        """
        if max_length < 1:
            raise value_error(
                "SegmentSchedule.make", "max_length", "at least 1", max_length,
                "Give a positive length",
            )  # fmt: skip
        if units.count and int((units.begin + units.length).max()) >= 2**31:
            raise value_error(
                "SegmentSchedule.make", "units", "under 2^31 entries", "more", "Split A by rows"
            )
        # Counted in grains, the least that a unit may be cut by.
        grain = torch.where(units.bundled, LIST_STEP, 1)
        most = torch.clamp(max_length // grain, min=1)
        pieces = torch.clamp((units.length // grain + most - 1) // most, min=1)
        unit, number = ranges(pieces)
        count = pieces[unit]
        grain = grain[unit]
        grains = units.length[unit] // grain
        begin = units.begin[unit] + grains * number // count * grain
        end = units.begin[unit] + grains * (number + 1) // count * grain
        cut = count > 1
        slot = torch.where(cut, torch.cumsum(cut.to(torch.int64), 0) - 1, -1)
        items = torch.stack([units.label[unit], begin, end, slot], 1).to(torch.int32)
        length, bundled = end - begin, units.bundled[unit]
        shared = torch.zeros_like(cut)
        if shared_length is not None:
            shared = ~bundled & (length > shared_length)
        if wide_length is None:
            wide_length = default_wide_length(units)
        wide = cut | (length > wide_length)
        section = torch.where(wide, 1, 3) + (~bundled).to(torch.int64)
        section[shared] = 0
        order, sections = [], []
        for each in range(SECTIONS):
            mine = torch.nonzero(section == each).squeeze(1)
            sections.append(mine.numel())
            order.append(
                torch.cat([_side_by_side(mine[cut[mine]], unit, number), mine[~cut[mine]]])
                if each < WIDE_SECTIONS
                else _by_length(mine, length)
            )
        parent_of_slot, nodes = build_tree(pieces[pieces > 1])
        return cls(
            items[torch.cat(order)].contiguous(),
            parent_of_slot.contiguous(),
            nodes.contiguous(),
            (sections[0], sections[1], sections[2], sections[3], sections[4]),
        )

    def pieces(self) -> Tensor:
        """Return one piece for each item."""
        sections = torch.tensor(self.sections, device=self.items.device)
        section = torch.repeat_interleave(
            torch.arange(SECTIONS, device=self.items.device), sections
        )
        bundled = (section % 2 == 1).to(torch.int64)
        return torch.cat([bundled.unsqueeze(1), self.items[:, :3].to(torch.int64)], 1)

    def slots(self) -> Tensor:
        return self.items[:, 3].to(torch.int64)

    def _check_items(self, units: Units) -> None:
        if sum(self.sections) != self.item_count or min(self.sections) < 0:
            raise self._fault("sections", f"of {self.item_count} items", self.sections)
