"""``validate`` names the fault of a schedule that was damaged, whatever the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.balance import (
    LongestFirst,
    RowChunks,
    Schedule,
    SegmentSchedule,
    WindowSchedule,
    WindowShares,
)
from sparsetile.formats import Units, concat_units

WINDOWS = Units.from_offsets(torch.tensor([0, 3, 3, 5, 705, 708, 1100]))
BUNDLES = Units(
    torch.arange(2), torch.tensor([0, 40]), torch.tensor([40, 8]), torch.ones(2, dtype=torch.bool)
)
MIXED = concat_units(BUNDLES, WINDOWS)

MADE: dict[str, tuple[Units, Callable[[Units], Schedule]]] = {
    "segments": (MIXED, lambda units: SegmentSchedule.make(units, max_length=10)),
    "windows": (WINDOWS, lambda units: WindowSchedule.make(units, workers=1000)),
    "shares": (WINDOWS, lambda units: WindowShares.make(units, workers=7)),
    "row_chunks": (WINDOWS, lambda units: RowChunks.make(units, chunks=4)),
    "longest_first": (WINDOWS, LongestFirst.make),
}

Damage = Callable[[Any], dict[str, Any]]


def put(name: str, *changes: tuple[Any, int]) -> Damage:
    """Set elements of an array: (place, value) each."""

    def damage(schedule: Schedule) -> dict[str, Tensor]:
        array = getattr(schedule, name).clone()
        for place, value in changes:
            array[place] = value
        return {name: array}

    return damage


def row_of(schedule: Schedule, label: int) -> int:
    """First item of a unit."""
    return int(torch.nonzero(schedule.items[:, 0] == label)[0])


def swap_slots(schedule: Any) -> dict[str, Tensor]:
    """Exchange the first and the last slot."""
    slots = schedule.items[:, 3]
    first, last = int((slots == 0).nonzero()), int(slots.argmax())
    items = schedule.items.clone()
    items[first, 3], items[last, 3] = slots[last], slots[first]
    return {"items": items}


def drop_item(schedule: Any) -> dict[str, Any]:
    sections = list(schedule.sections)
    sections[4] -= 1
    return {"items": schedule.items[:-1], "sections": tuple(sections)}


def repeat_item(label: int) -> Damage:
    """List a whole row once more."""

    def damage(schedule: Any) -> dict[str, Any]:
        rows = schedule.items[-schedule.sections[4] :]
        items = torch.cat([schedule.items, rows[rows[:, 0] == label]])
        return {"items": items, "sections": (*schedule.sections[:4], schedule.sections[4] + 1)}

    return damage


def halves(schedule: LongestFirst) -> dict[str, Tensor]:
    """Cut the longest unit, number 3, into two."""
    first = torch.tensor([[5, 708, 392, 0], [3, 5, 350, 0], [3, 355, 350, 0]], dtype=torch.int32)
    return {"items": torch.cat([first, schedule.items[2:]])}


def two_cuts_of_one(schedule: WindowShares) -> dict[str, Tensor]:
    """List a cut as two, each with a part of the slots."""
    window, first, slots, _ = schedule.cuts[0].tolist()
    parts = [[window, first, 2, 0], [window, first + 2, slots - 2, 0]]
    return {"cuts": torch.cat([torch.tensor(parts, dtype=torch.int32), schedule.cuts[1:]])}


def swap_roots(schedule: Any) -> dict[str, Tensor]:
    """Give a node of one unit's tree to the other unit's: both still have a root."""
    nodes = schedule.nodes.clone()
    inner = (nodes[:, 2] >= 0).nonzero().flatten()
    first, last = int(inner[0]), int(inner[-1])
    nodes[first, 2], nodes[last, 2] = schedule.nodes[last, 2], schedule.nodes[first, 2]
    return {"nodes": nodes}


def root_below_its_child(schedule: Any) -> dict[str, Tensor]:
    """Let a root write a slot that it adds, and the node that wrote it be the root."""
    nodes = schedule.nodes.clone()
    child = int((nodes[:, 2] >= 0).nonzero()[0])
    root = int(schedule.parent_of_slot[nodes[child, 2]])
    nodes[root, 2], nodes[child, 2] = schedule.nodes[child, 2], schedule.nodes[root, 2]
    return {"nodes": nodes}


def own_of_first(schedule: Any) -> dict[str, Tensor]:
    """Let the first node add up into the slot of the second."""
    nodes = schedule.nodes.clone()
    nodes[0, 2] = nodes[1, 2]
    return {"nodes": nodes}


FAULTS: dict[str, tuple[str, Damage, str]] = {
    "another dtype": (
        "segments",
        lambda s: {"items": s.items.long()},
        "items must be contiguous torch.int32, got torch.int64",
    ),
    "strided": (
        "shares",
        lambda s: {"items": s.items.t().contiguous().t()},
        "items must be contiguous torch.int32, got torch.int32, not contiguous",
    ),
    "flat items": (
        "longest_first",
        lambda s: {"items": s.items.flatten()},
        r"items must be \[items, 4\], got shape \(24,\)",
    ),
    "a unit in no item": ("segments", drop_item, "unit . must be in an item, got in none"),
    "a unit in two items": (
        "segments", repeat_item(4), "unit 4 must be covered once, got entries in two items"
    ),
    "an empty unit in two items": (
        "segments", repeat_item(1), "unit 1 must be covered once, got a piece without entries"
    ),
    "an unknown unit": ("segments", put("items", (-1, 99)), "items must be of these units, got un"),
    "an unknown window": (
        "shares", put("items", ((0, 0), 6)), "items must be of these units, got unit 6"
    ),
    "a bundle that is none": (
        "segments",
        lambda s: {
            "sections": (s.sections[0], s.sections[1] + 1, s.sections[2] - 1, *s.sections[3:])
        },
        "items must be of these units, got bundle 3",
    ),
    "an end too early": (
        "shares", lambda s: put("items", ((row_of(s, 0), 2), 2))(s), "unit 0 .* entries in no item"
    ),
    "a begin too late": (
        "shares", lambda s: put("items", ((row_of(s, 0), 1), 1))(s), "unit 0 .* entries in no item"
    ),
    "a piece that overlaps the one before": (
        "shares",
        lambda s: put("items", ((row_of(s, 3) + 1, 1), int(s.items[row_of(s, 3), 2]) - 1))(s),
        "unit 3 must be covered once, got entries in two items",
    ),
    "a piece past the end": (
        "shares",
        lambda s: put("items", ((row_of(s, 0), 2), 9))(s),
        "unit 0 must be covered once, got a piece outside its list",
    ),
    "a piece without entries": (
        "shares",
        lambda s: put(
            "items",
            ((row_of(s, 3), 2), int(s.items[row_of(s, 3), 1])),
            ((row_of(s, 3) + 1, 1), int(s.items[row_of(s, 3), 1])),
        )(s),
        "unit 3 must be covered once, got a piece without entries",
    ),
    "a run of too many windows": (
        "windows",
        lambda s: put("items", ((-1, 3), -9))(s),
        "items must be of windows 0 to 5, got others",
    ),
    "a run that ends early": (
        "windows", put("items", ((-1, 2), 706)), "unit 4 .* got entries in no item"
    ),
    "sections that do not add up": (
        "segments", lambda s: {"sections": (0, 0, 0, 0)}, "sections must be of .* items"
    ),
    "a whole unit with a slot": (
        "shares", lambda s: put("items", ((row_of(s, 0), 3), 0))(s), "unit 0 must be without a slot"
    ),
    "a piece without a slot": (
        "shares", lambda s: put("items", ((row_of(s, 3), 3), -1))(s), "unit 3 .* got a -1"
    ),
    "a slot used twice": (
        "segments",
        lambda s: put("items", (((s.items[:, 3] == 1), 3), 0))(s),
        "slots must be 0 to .*, each once",
    ),
    "slots out of order": ("segments", swap_slots, "bundle 0 must be in slots side by side"),
    "a node of too many children": (
        "segments", put("nodes", ((0, 1), 40)), "nodes must be of 2 to 16 children and a 0"
    ),
    "a node that lists other slots": (
        "windows", put("nodes", ((0, 0), 1)), "nodes must be parents of each of .* slots once"
    ),
    "a slot with another parent": (
        "windows",
        put("parent_of_slot", (0, 1)),
        "parent_of_slot must be the node that lists the slot, got another",
    ),
    "a slot that two nodes write": (
        "windows", own_of_first, "nodes must be writers of each of .* slots once"
    ),
    "trees that mix units": ("windows", swap_roots, "nodes must be a tree for each cut unit"),
    "a node that adds its own slot": (
        "windows", root_below_its_child, "nodes must be after their children, got a node before"
    ),
    "nodes of another shape": (
        "windows", lambda s: {"nodes": s.nodes.flatten()}, r"nodes must be \[nodes, 4\], got shape"
    ),
    "a cut that is not listed": (
        "shares", lambda s: {"cuts": s.cuts[:-1]}, "cuts must be of each of .* slots once"
    ),
    "a cut of another window": (
        "shares", put("cuts", ((0, 0), 2)), "cuts must be of the windows whose pieces"
    ),
    "a cut of one slot": (
        "shares", put("cuts", ((0, 1), 1)), "cuts must be of each of .* slots once"
    ),
    "a cut with too few slots": (
        "shares", put("cuts", ((0, 2), 1)), "cuts must be of two slots or more and a 0"
    ),
    "a worker without its last item": (
        "shares",
        lambda s: put("first_of_worker", (-1, s.item_count - 1))(s),
        "first_of_worker must be from 0 to",
    ),
    "workers out of order": (
        "shares",
        lambda s: put("first_of_worker", (1, s.item_count))(s),
        "first_of_worker must be never decreasing",
    ),
    "bounds that end early": ("row_chunks", put("bounds", (-1, 5)), "bounds must be from 0 to 6"),
    "bounds that go back": (
        "row_chunks", put("bounds", (1, 6), (2, 5)), "bounds must be never decreasing"
    ),
    "items beside the bounds": (
        "row_chunks", put("items", ((0, 1), 0)), "items must be what the bounds say"
    ),
    "items out of order": (
        "longest_first", lambda s: {"items": s.items.flip(0)}, "items must be sorted longest first"
    ),
    "a field that must be 0": (
        "longest_first", put("items", ((0, 3), 1)), "items must be label, begin, length and 0"
    ),
    "a unit cut where nothing has slots": (
        "longest_first", halves, "unit 3 must be in pieces with slots, got a -1"
    ),
    "a window with two cuts": ("shares", two_cuts_of_one, "cuts must be one for each window"),
    "cuts of another shape": (
        "shares", lambda s: {"cuts": s.cuts.flatten()}, r"cuts must be \[cuts, 4\], got shape"
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", MADE)
def test_a_schedule_as_it_was_made_is_valid(policy):
    units, make = MADE[policy]
    make(units).validate(units)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    policy, damage, text = FAULTS[fault]
    units, make = MADE[policy]
    schedule = make(units)
    damaged = dataclasses.replace(schedule, **damage(schedule))
    with pytest.raises(ValueError, match=f"{type(schedule).__name__}.validate: {text}") as caught:
        damaged.validate(units)
    assert str(caught.value).endswith(". Make the schedule again from these units.")


@pytest.mark.parametrize("policy", MADE)
def test_the_units_of_another_matrix_are_not_covered(policy):
    units, make = MADE[policy]
    other = dataclasses.replace(units, length=units.length + 1)
    with pytest.raises(ValueError, match=r"validate: .* entries in no item"):
        make(units).validate(other)
    fewer = Units(*(part[:-1] for part in (units.label, units.begin, units.length, units.bundled)))
    with pytest.raises(ValueError, match="validate: items must be of these units, got unit 5"):
        make(units).validate(fewer)


def test_slots_that_nothing_adds_up_are_a_fault():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Forgetful(LongestFirst):
        def slots(self) -> Tensor:
            return torch.tensor([-1, 0, 1, *[-1] * (self.item_count - 3)])

    schedule = LongestFirst.make(WINDOWS)
    cut = Forgetful(**halves(schedule))
    with pytest.raises(ValueError, match=r"Forgetful\.validate: items must be whole units"):
        cut.validate(WINDOWS)
