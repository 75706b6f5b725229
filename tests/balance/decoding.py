"""Every schedule with the options that its tests run it with, and its items read back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import (
    CoBalanced,
    LongestFirst,
    RowChunks,
    Schedule,
    SegmentSchedule,
    WindowSchedule,
    WindowShares,
)
from sparsetile.balance.tree import TreeSchedule, ranges
from sparsetile.intake.csr import owners

__all__ = ["SCHEDULES", "VARIANTS", "joined", "pieces_of", "slots_of"]

SCHEDULES: dict[str, type[Schedule]] = {
    "cobalanced": CoBalanced, "longest_first": LongestFirst, "row_chunks": RowChunks,
    "segments": SegmentSchedule, "shares": WindowShares, "windows": WindowSchedule,
}  # fmt: skip
VARIANTS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "cobalanced": {
        "7 workers": {"workers": 7, "width": 16},
        "3 workers in turn": {"workers": 3, "width": 8, "in_turn": True},
        "50 workers in turn": {"workers": 50, "width": 4, "in_turn": True, "step": 2},
        "40 workers, steps of 2": {"workers": 40, "width": 4, "step": 2, "least": 4},
        "greedy alone": {"workers": 9, "width": 16, "refine": False},
        "whole windows": {"workers": None, "width": 16},
    },
    "longest_first": {"default": {}},
    "row_chunks": {"3 chunks": {"chunks": 3}, "64 chunks": {"chunks": 64, "row_cost": 1.0}},
    "segments": {
        "items of 5": {"max_length": 5},
        "items of 128": {"max_length": 128},
        "blocks share items of 40": {"max_length": 40, "wide_length": 4, "shared_length": 9},
    },
    "shares": {
        "7 workers": {"workers": 7},
        "3 workers, dealt": {"workers": 3, "dealt": True},
        "40 workers, steps of 4": {"workers": 40, "step": 4, "min_tiles": 4},
    },
    "windows": {
        "7 workers": {"workers": 7.0},
        "1000 workers": {"workers": 1000.0},
        "whole windows": {"workers": 7.0, "balance": False},
        "shared windows": {"limit": 24, "shared": 6},
        "short runs": {"limit": 24, "shared": 6, "run": 2},
    },
}


def _leading(schedule: CoBalanced) -> Tensor:
    """Items with the first column of a window or piece: one for each."""
    return schedule.items[schedule.items[:, 4] == 0].long()


def _windows_of_items(schedule: WindowSchedule) -> Tensor:
    """Number of windows of each item: those of a run, one of a piece."""
    return torch.clamp(-schedule.items[:, 3].long(), min=1)


@functools.singledispatch
def pieces_of(schedule: Schedule) -> Tensor:
    """The parts of units in the items, in the order of the items, int64 [pieces, 4].

    Whether the unit is a bundle (0 or 1), its label, and begin and end in its list. An item of
    several units has a piece for each.
    """
    raise NotImplementedError


@pieces_of.register
def _(schedule: SegmentSchedule) -> Tensor:
    bundled = (owners(torch.tensor(schedule.sections)) % 2 == 1).long()
    return torch.cat([bundled.unsqueeze(1), schedule.items[:, :3].long()], 1)


@pieces_of.register
def _(schedule: LongestFirst) -> Tensor:
    label, begin, length, _ = schedule.items.long().unbind(1)
    return torch.stack([torch.zeros_like(label), label, begin, begin + length], 1)


@pieces_of.register
def _(schedule: RowChunks) -> Tensor:
    first, end = schedule.bounds[:-1], schedule.bounds[1:]
    chunk, number = ranges(end - first)
    row, ends = first[chunk] + number, schedule.offsets
    return torch.stack([torch.zeros_like(row), row, ends[row], ends[row + 1]], 1)


@pieces_of.register
def _(schedule: WindowShares) -> Tensor:
    window, begin, end, _ = schedule.items.long().unbind(1)
    return torch.stack([torch.zeros_like(window), window, begin, end], 1)


@pieces_of.register
def _(schedule: CoBalanced) -> Tensor:
    window, begin, end = _leading(schedule)[:, :3].unbind(1)
    return torch.stack([torch.zeros_like(window), window, begin, end], 1)


@pieces_of.register
def _(schedule: WindowSchedule) -> Tensor:
    count = _windows_of_items(schedule)
    item, number = ranges(count)
    first, begin, end, _ = schedule.items.long()[item].unbind(1)
    window = first + number
    # The item gives the ends of its run; the offsets give the ends of the windows inside.
    begin = torch.where(number == 0, begin, schedule.offsets[window])
    end = torch.where(number == count[item] - 1, end, schedule.offsets[window + 1])
    return torch.stack([torch.zeros_like(window), window, begin, end], 1)


def slots_of(schedule: Schedule) -> Tensor:
    """The slot of each piece's partial sum, int64 [pieces]; -1 for a whole unit."""
    if isinstance(schedule, CoBalanced):
        return _leading(schedule)[:, 3]
    if isinstance(schedule, WindowSchedule):
        held = torch.clamp(schedule.items[:, 3].long(), min=-1)
        return torch.repeat_interleave(held, _windows_of_items(schedule))
    if isinstance(schedule, (SegmentSchedule, WindowShares)):
        return schedule.items[:, 3].long()
    return torch.full((pieces_of(schedule).shape[0],), -1)


def joined(schedule: Schedule, sums: Tensor) -> Tensor:
    """The sum of each piece's unit, [pieces], from the ``sums`` [pieces] of the pieces.

    Partial sums of cut units are added in the order in which the device adds them.
    """
    if not isinstance(schedule, (TreeSchedule, WindowShares)):
        return sums
    held = slots_of(schedule)
    slot_sums = sums.new_zeros(schedule.slot_count)
    slot_sums[held[held >= 0]] = sums[held >= 0]
    found = sums.clone()
    if isinstance(schedule, WindowShares):
        total_of = {
            window: slot_sums[first : first + count].sum()
            for window, first, count, _ in schedule.cuts.tolist()
        }
        for at in torch.nonzero(held >= 0).flatten().tolist():
            found[at] = total_of[int(schedule.items[at, 0])]
        return found
    total = sums.new_zeros(schedule.node_count)
    # A node comes after its children.
    for node, (first, count, own, _) in enumerate(schedule.nodes.tolist()):
        total[node] = slot_sums[first : first + count].sum()
        if own >= 0:
            slot_sums[own] = total[node]
    # Own slots ascend, so the climb to the roots ends.
    parent, own_slot = schedule.parent_of_slot.long(), schedule.nodes[:, 2].long()
    root = parent[held[held >= 0]]
    while bool((own_slot[root] >= 0).any()):
        root = torch.where(own_slot[root] >= 0, parent[own_slot[root].clamp(min=0)], root)
    found[held >= 0] = total[root]
    return found
