"""What every schedule must be: each entry in exactly one item, cut sums joined by a tree."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from sparsetile import CSR
from sparsetile.balance import (
    SegmentSchedule,
    Units,
    concat_units,
    row_units,
    schedule_segments,
)
from sparsetile.balance import segments as module
from sparsetile.formats import LIST_STEP, pack_bittcf, pack_bundles
from tests.contracts.cases import MATRICES, csr_of


def rows_in_order(csr: CSR) -> Units:
    return row_units(csr)


def rows_shuffled(csr: CSR) -> Units:
    return row_units(csr, torch.randperm(csr.shape[0]))


def bundles_and_rows(min_sharing: float) -> Callable[[CSR], Units]:
    def units(csr: CSR) -> Units:
        bundles = pack_bundles(csr, None, min_sharing)
        count = bundles.bundle_count
        bundled = Units(
            torch.arange(count),
            bundles.indptr[:-1],
            bundles.indptr[1:] - bundles.indptr[:-1],
            torch.ones(count, dtype=torch.bool),
        )
        return concat_units(bundled, row_units(csr, bundles.loose))

    return units


def windows_of_tiles(csr: CSR) -> Units:
    offsets = pack_bittcf(csr).row_window_offset.long()
    count = offsets.numel() - 1
    return Units(
        torch.arange(count), offsets[:-1], offsets[1:] - offsets[:-1],
        torch.zeros(count, dtype=torch.bool),
    )  # fmt: skip


UNITS: dict[str, Callable[[CSR], Units]] = {
    "windows of tiles": windows_of_tiles,
    "rows": rows_in_order,
    "shuffled rows": rows_shuffled,
    "bundles": bundles_and_rows(0.0),
    "bundles and rows": bundles_and_rows(1.5),
}
LENGTHS = (5, 128)


@functools.cache
def schedule_of(kind: str, name: str, max_length: int) -> tuple[Units, SegmentSchedule, int]:
    units = UNITS[kind](csr_of(MATRICES[name]()))
    return units, schedule_segments(units, max_length), max_length


@pytest.fixture(params=[(u, m) for u in UNITS for m in MATRICES], ids=" of ".join)
def of_matrix(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=LENGTHS)
def scheduled(
    request: pytest.FixtureRequest, of_matrix: tuple[str, str]
) -> tuple[Units, SegmentSchedule, int]:
    return schedule_of(*of_matrix, request.param)


def section_of_items(schedule: SegmentSchedule) -> np.ndarray:
    return np.repeat(np.arange(4), schedule.sections)


@functools.cache
def pieces_of_unit(schedule: SegmentSchedule) -> dict[tuple[bool, int], list[tuple[int, int, int]]]:
    """(bundled, label) -> its pieces (begin, end, slot), sorted."""
    found: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}
    sections = section_of_items(schedule).tolist()
    for section, (label, begin, end, slot) in zip(sections, schedule.items.tolist(), strict=True):
        found.setdefault((section % 2 == 0, label), []).append((begin, end, slot))
    return {unit: sorted(pieces) for unit, pieces in found.items()}


def test_every_entry_of_every_unit_is_in_exactly_one_item(scheduled):
    units, schedule, _ = scheduled
    pieces = pieces_of_unit(schedule)
    listed = zip(
        units.bundled.tolist(), units.label.tolist(), units.begin.tolist(), units.length.tolist(),
        strict=True,
    )  # fmt: skip
    expected = {
        (bundled, label): (begin, begin + length) for bundled, label, begin, length in listed
    }
    assert pieces.keys() == expected.keys()
    for unit, (begin, end) in expected.items():
        at = begin
        for piece_begin, piece_end, _ in pieces[unit]:
            assert piece_begin == at
            at = piece_end
        assert at == end


def test_no_item_is_longer_than_allowed_and_pieces_are_even(scheduled):
    _, schedule, max_length = scheduled
    lengths = schedule.items[:, 2] - schedule.items[:, 1]
    bundled = torch.from_numpy(section_of_items(schedule)) % 2 == 0
    assert bool((lengths >= 0).all())
    assert bool((lengths <= torch.where(bundled, max(max_length, LIST_STEP), max_length)).all())
    assert not bool((schedule.items[bundled, 1:3] % LIST_STEP).any()), "whole batches of a list"
    for (bundle, _), pieces in pieces_of_unit(schedule).items():
        sizes = [end - begin for begin, end, _ in pieces]
        assert max(sizes) - min(sizes) <= (LIST_STEP if bundle else 1)


def test_only_pieces_of_cut_units_have_slots_and_each_its_own(scheduled):
    _, schedule, _ = scheduled
    slots = []
    for pieces in pieces_of_unit(schedule).values():
        mine = [slot for _, _, slot in pieces]
        if len(pieces) == 1:
            assert mine == [-1]
        else:
            assert mine == list(range(mine[0], mine[0] + len(mine))), "in the order of the entries"
            slots += mine
    assert sorted(slots) == list(range(len(slots)))
    assert schedule.slot_count >= len(slots)


def test_sections_follow_each_other_as_documented(scheduled):
    units, schedule, _ = scheduled
    assert sum(schedule.sections) == schedule.item_count
    items, sections = schedule.items.numpy(), section_of_items(schedule)
    length, cut = items[:, 2] - items[:, 1], items[:, 3] >= 0
    lengths = units.length.numpy()
    between = lengths[(lengths > module.WIDE_LENGTH) & (lengths <= module.EVEN_WIDE_LENGTH)]
    even = 2 * between.sum() >= lengths.sum()
    wide = cut | (length > (module.EVEN_WIDE_LENGTH if even else module.WIDE_LENGTH))
    assert np.array_equal(wide, sections < 2)
    for section in (0, 1):
        mine = cut[sections == section]
        assert np.array_equal(mine, np.sort(mine)[::-1]), "cut pieces come first"
    for section in (2, 3):
        mine = length[sections == section]
        for at in range(0, mine.size, module.SORT_WINDOW):
            window = mine[at : at + module.SORT_WINDOW]
            assert np.array_equal(window, np.sort(window)[::-1]), "longest first"


def test_every_array_is_int32_and_contiguous(scheduled):
    _, schedule, _ = scheduled
    for part in (schedule.items, schedule.parent_of_slot, schedule.nodes):
        assert part.dtype is torch.int32 and part.is_contiguous()
    assert schedule.items.shape == (schedule.item_count, 4)
    assert schedule.nodes.shape == (schedule.node_count, 4)


def test_the_tree_has_one_root_per_cut_unit_and_one_parent_per_slot(scheduled):
    _, schedule, _ = scheduled
    nodes, parents = schedule.nodes.numpy(), schedule.parent_of_slot.numpy()
    cut = [pieces for pieces in pieces_of_unit(schedule).values() if len(pieces) > 1]
    assert int((nodes[:, 2] == -1).sum()) == len(cut)
    children = [slot for first, count, _, _ in nodes for slot in range(first, first + count)]
    assert sorted(children) == list(range(schedule.slot_count)), "each slot is a child once"
    for node, (first, count, own, zero) in enumerate(nodes.tolist()):
        assert 2 <= count <= module.FAN_IN and zero == 0
        assert (parents[first : first + count] == node).all(), "contiguous and counted"
        assert own == -1 or own >= first + count, "a node comes after its children"
    own = [slot for slot in nodes[:, 2].tolist() if slot >= 0]
    leaves = [slot for pieces in cut for _, _, slot in pieces]
    assert sorted(own + leaves) == list(range(schedule.slot_count)), "each slot is written once"


def climb(schedule: SegmentSchedule, partial: dict[int, object]) -> dict[int, object]:
    """Join the leaves' sums node by node; return leaf slot -> what its unit's root holds."""
    held, members = dict(partial), {slot: [slot] for slot in partial}
    roots: dict[int, object] = {}
    for first, count, own, _ in schedule.nodes.tolist():  # a node comes after its children
        slots = range(first, first + count)
        total = sum((held[slot] for slot in slots[1:]), held[first])
        below = [leaf for slot in slots for leaf in members[slot]]
        if own >= 0:
            held[own], members[own] = total, below
        else:
            roots.update(dict.fromkeys(below, total))
    return roots


def test_sums_through_the_tree_equal_the_direct_sums(scheduled):
    units, schedule, _ = scheduled
    top = int((units.begin + units.length).max()) if units.label.numel() else 0
    entries = np.random.default_rng(0).integers(-1000, 1000, top)
    sums = lambda begin, end: int(entries[begin:end].sum())  # noqa: E731
    roots = climb(
        schedule,
        {slot: sums(b, e) for _, b, e, slot in schedule.items.tolist() if slot >= 0},
    )
    for pieces in pieces_of_unit(schedule).values():
        if len(pieces) > 1:
            direct = sums(pieces[0][0], pieces[-1][1])
            assert {roots[slot] for _, _, slot in pieces} == {direct}


def test_narrow_items_stay_near_their_place_in_the_order():
    csr = csr_of(MATRICES["one dense column"]())
    order = torch.randperm(csr.shape[0])
    schedule = schedule_segments(row_units(csr, order), 256)
    rows = schedule.items[sum(schedule.sections[:3]) :, 0].tolist()
    narrow = [row for row in order.tolist() if row in set(rows)]
    step = module.SORT_WINDOW
    assert len(rows) > step, "the case must have more than one window"
    for at in range(0, len(rows), step):
        assert set(rows[at : at + step]) == set(narrow[at : at + step])


def test_equal_lengths_keep_the_order_they_were_given_in():
    csr = csr_of(MATRICES["one dense column"](), pattern=True)
    order = torch.randperm(csr.shape[0])
    schedule = schedule_segments(row_units(csr, order), 256)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    items = schedule.items[sum(schedule.sections[:3]) :][: module.SORT_WINDOW]
    length = items[:, 2] - items[:, 1]
    for value in length.unique().tolist():
        places = position[items[length == value, 0].long()]
        assert torch.equal(places, places.sort().values)


@pytest.mark.parametrize("pieces", [2, 16, 17, 256, 257, 5000])
def test_a_tree_of_any_size_is_as_low_as_its_fan_in_allows(pieces):
    units = Units(
        torch.tensor([7]), torch.tensor([0]), torch.tensor([pieces]), torch.tensor([False])
    )
    schedule = schedule_segments(units, 1)
    parents, nodes = schedule.parent_of_slot.tolist(), schedule.nodes.tolist()
    depths = set()
    for slot in schedule.items[:, 3].tolist():
        depth = 0
        while slot >= 0:
            slot = nodes[parents[slot]][2]
            depth += 1
        depths.add(depth)
    expected = 1
    while module.FAN_IN**expected < pieces:
        expected += 1
    assert depths == {expected}


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_is_refused(length):
    with pytest.raises(ValueError) as caught:
        schedule_segments(row_units(csr_of(MATRICES["odd sizes"]())), length)
    assert str(caught.value) == (
        f"schedule_segments: max_length must be at least 1, got {length}. Give a positive length."
    )


def test_entries_past_32_bits_are_refused():
    far = Units(
        torch.tensor([0]), torch.tensor([2**31 - 1]), torch.tensor([1]), torch.tensor([False])
    )
    with pytest.raises(ValueError) as caught:
        schedule_segments(far, 128)
    assert str(caught.value) == (
        "schedule_segments: A must be under 2^31 entries, got more. Split A by rows."
    )


def test_equal_parts_of_neighbouring_cut_rows_follow_each_other():
    """They read about the same rows of B, so that warps of a block find them in the SM's cache."""
    rows, pieces = module.INTERLEAVED + 2, 3
    indptr = torch.arange(rows + 1) * 30
    csr = CSR(indptr, torch.arange(30, dtype=torch.int32).repeat(rows), None, (rows, 30))
    items = schedule_segments(row_units(csr), 10).items
    first = module.INTERLEAVED * pieces
    parts = ((items[:, 1] % 30) // 10).tolist()
    assert parts[:first] == [part for part in range(pieces) for _ in range(module.INTERLEAVED)]
    assert items[: module.INTERLEAVED, 0].tolist() == list(range(module.INTERLEAVED))
    assert parts[first:] == [0, 0, 1, 1, 2, 2]
