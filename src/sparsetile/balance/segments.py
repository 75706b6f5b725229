"""Work items of the CUDA-core kernels: rows and bundles of rows, long ones cut and joined again.

The device side is ``kernels/cuda/segment.cuh``; its comment draws the arrays. Built with tensor
operations on whichever device holds the matrix. Every part of the library that walks rows on CUDA
cores (the ``csr`` system, residual rows of the hybrid ones, SDDMM) takes its items from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.bundles import LIST_STEP
from sparsetile.intake.csr import CSR

__all__ = [
    "SegmentSchedule",
    "Units",
    "WorkLists",
    "concat_units",
    "row_units",
    "schedule_segments",
]

# Children a node of the tree adds up. 16 keeps the climb of a row of 64 Ki entries at two steps
# while no single group reads more than 16 partial rows in sequence.
FAN_IN = 16
# Entries over which an item gets a whole warp where groups are narrower than that. Rows of about
# the same length fill their warps' groups evenly, so there the longer limit is better.
WIDE_LENGTH = 32
EVEN_WIDE_LENGTH = 96
# Cut units whose pieces are listed side by side.
INTERLEAVED = 16
# Items are sorted by length inside windows of this many, so that the groups of a warp have equal
# work while neighbours stay near each other.
SORT_WINDOW = 256


@dataclass(frozen=True, eq=False)
class Units:
    """What is to be scheduled: rows of A, or bundles of rows; all int64 [units].

    Attributes
    ----------
    label : Tensor
        Row of A, or number of the bundle.
    begin, length : Tensor
        Range in the unit's entry list.
    bundled : Tensor of bool
        Whether the unit is a bundle: its list is cut at multiples of ``LIST_STEP`` only.
    """

    label: Tensor
    begin: Tensor
    length: Tensor
    bundled: Tensor


def row_units(csr: CSR, rows: Tensor | None = None) -> Units:
    """Every row of A, or those given in ``rows`` in that order, as a unit of its own."""
    if rows is None:
        rows = torch.arange(csr.shape[0], device=csr.device)
    return Units(
        rows,
        csr.indptr[:-1][rows],
        csr.row_lengths()[rows],
        torch.zeros(rows.numel(), dtype=torch.bool, device=csr.device),
    )


def concat_units(first: Units, second: Units) -> Units:
    """Both lists, one after the other."""
    return Units(
        *(
            torch.cat([getattr(first, name), getattr(second, name)])
            for name in ("label", "begin", "length", "bundled")
        )
    )


@dataclass(frozen=True, eq=False)
class WorkLists:
    """Items of work and the tree that adds cut ones up; all int32.

    Attributes
    ----------
    items : Tensor [items, 4]
        What each kind of schedule says.
    parent_of_slot : Tensor [slots]
        Node that adds the slot's partial sum.
    nodes : Tensor [nodes, 4]
        ``first child slot, children, own slot or -1 at the root, 0``.
    """

    items: Tensor
    parent_of_slot: Tensor
    nodes: Tensor

    @property
    def item_count(self) -> int:
        return self.items.shape[0]

    @property
    def slot_count(self) -> int:
        return self.parent_of_slot.shape[0]

    @property
    def node_count(self) -> int:
        return self.nodes.shape[0]


@dataclass(frozen=True, eq=False)
class SegmentSchedule(WorkLists):
    """Items ``label, begin, end, slot``; ``slot`` is -1 for a unit that was not cut.

    Four sections follow each other: wide bundles, wide rows, bundles, rows; wide ones are long
    enough for a whole warp. In each wide section pieces of cut units come first, because their
    sums finish in several steps.

    Attributes
    ----------
    sections : tuple of int
        Items in each of the four sections.
    """

    sections: tuple[int, int, int, int]


def _exclusive_cumsum(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _ranges(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts [n]: owner of each of the sum(counts) elements, and its number in the owner."""
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    number = torch.arange(owner.numel(), device=counts.device) - _exclusive_cumsum(counts)[owner]
    return owner, number


def _tree(children: Tensor) -> tuple[Tensor, Tensor]:
    """Join each cut unit's pieces; ``children`` counts the pieces of each cut unit."""
    parents: list[Tensor] = []
    nodes: list[Tensor] = []
    first_slot = node_base = 0
    counts = children
    while counts.numel():
        groups = (counts + FAN_IN - 1) // FAN_IN
        unit, number = _ranges(counts)
        # Even groups: 17 children become 9 + 8, not 16 + 1.
        group_in_unit = number * groups[unit] // counts[unit]
        group = _exclusive_cumsum(groups)[unit] + group_in_unit
        parents.append(group + node_base)
        total = int(groups.sum())
        sizes = torch.bincount(group, minlength=total)
        group_unit, _ = _ranges(groups)
        is_root = groups[group_unit] == 1
        # Nodes that are not roots take the next slots, in order, as children of the next level.
        next_slot = first_slot + unit.numel()
        own = torch.where(is_root, -1, next_slot + torch.cumsum((~is_root).to(torch.int64), 0) - 1)
        first = first_slot + _exclusive_cumsum(sizes)
        nodes.append(torch.stack([first, sizes, own, torch.zeros_like(own)], 1))
        first_slot, node_base = next_slot, node_base + total
        counts = groups[groups > 1]
    if not nodes:
        empty = torch.empty(0, dtype=torch.int32, device=children.device)
        return empty, empty.reshape(0, 4)
    return torch.cat(parents).to(torch.int32), torch.cat(nodes).to(torch.int32)


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


def _wide_length(units: Units) -> int:
    """Return the length over which an item should have a whole warp."""
    length = units.length
    between = length[(length > WIDE_LENGTH) & (length <= EVEN_WIDE_LENGTH)]
    return EVEN_WIDE_LENGTH if 2 * int(between.sum()) >= int(length.sum()) else WIDE_LENGTH


def schedule_segments(units: Units, max_length: int) -> SegmentSchedule:
    """Cut units longer than ``max_length`` entries into even pieces and list all items.

    Parameters
    ----------
    units : Units
        What to schedule, in the order in which it should be visited.
    max_length : int
        Most entries an item may have, but for bundles at least one batch of their list.
    """
    if max_length < 1:
        raise value_error(
            "schedule_segments", "max_length", "at least 1", max_length, "Give a positive length"
        )
    if units.length.numel() and int((units.begin + units.length).max()) >= 2**31:
        raise value_error("schedule_segments", "A", "under 2^31 entries", "more", "Split A by rows")
    # Counted in grains, the least that a unit may be cut by.
    grain = torch.where(units.bundled, LIST_STEP, 1)
    most = torch.clamp(max_length // grain, min=1)
    pieces = torch.clamp((units.length // grain + most - 1) // most, min=1)
    unit, number = _ranges(pieces)
    count = pieces[unit]
    grain = grain[unit]
    grains = units.length[unit] // grain
    begin = units.begin[unit] + grains * number // count * grain
    end = units.begin[unit] + grains * (number + 1) // count * grain
    cut = count > 1
    slot = torch.where(cut, torch.cumsum(cut.to(torch.int64), 0) - 1, -1)
    items = torch.stack([units.label[unit], begin, end, slot], 1).to(torch.int32)
    length, bundled = end - begin, units.bundled[unit]
    wide = cut | (length > _wide_length(units))
    order, sections = [], []
    for is_wide in (True, False):
        for is_bundle in (True, False):
            mine = torch.nonzero((wide == is_wide) & (bundled == is_bundle)).squeeze(1)
            sections.append(mine.numel())
            order.append(
                torch.cat([_side_by_side(mine[cut[mine]], unit, number), mine[~cut[mine]]])
                if is_wide
                else _by_length(mine, length)
            )
    parent_of_slot, nodes = _tree(pieces[pieces > 1])
    return SegmentSchedule(
        items[torch.cat(order)].contiguous(),
        parent_of_slot.contiguous(),
        nodes.contiguous(),
        (sections[0], sections[1], sections[2], sections[3]),
    )
