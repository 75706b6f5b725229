"""Segments: rows and bundles cut into even pieces, listed in sections, joined by a low tree."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.balance.cover import check_cover
from tests.balance.decoding import pieces_of
from tests.contracts.cases import MATRICES, csr_of

from sparsetile import CSR
from sparsetile.balance import SegmentSchedule
from sparsetile.balance import segments as module
from sparsetile.balance.segments import cut_on_host
from sparsetile.balance.tree import FAN_IN
from sparsetile.formats import LIST_STEP, BitTCF, RowBundles, Units, row_units

UNITS: dict[str, Callable[[CSR], Units]] = {
    "windows of tiles": lambda csr: BitTCF.pack(csr).units(),
    "shuffled rows": lambda csr: row_units(csr, torch.randperm(csr.shape[0])),
    "bundles and rows": lambda csr: RowBundles.pack(csr, min_sharing=1.5).units(),
}
LENGTHS = (5, 128)


@functools.cache
def schedule_of(kind: str, name: str, max_length: int) -> tuple[Units, SegmentSchedule, int]:
    units = UNITS[kind](csr_of(MATRICES[name]()))
    return units, SegmentSchedule.make(units, max_length=max_length), max_length


@pytest.fixture(params=[(u, m) for u in UNITS for m in MATRICES], ids=" of ".join)
def of_matrix(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=LENGTHS)
def scheduled(
    request: pytest.FixtureRequest, of_matrix: tuple[str, str]
) -> tuple[Units, SegmentSchedule, int]:
    return schedule_of(*of_matrix, request.param)


def section_of_items(schedule: SegmentSchedule) -> np.ndarray:
    return np.repeat(np.arange(5), schedule.sections)


@functools.cache
def pieces_of_unit(schedule: SegmentSchedule) -> dict[tuple[bool, int], list[tuple[int, int, int]]]:
    """(bundled, label) -> its pieces (begin, end, slot), sorted."""
    found: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}
    sections = section_of_items(schedule).tolist()
    for section, (label, begin, end, slot) in zip(sections, schedule.items.tolist(), strict=True):
        found.setdefault((section % 2 == 1, label), []).append((begin, end, slot))
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
    bundled = torch.from_numpy(section_of_items(schedule)) % 2 == 1
    assert bool((lengths >= 0).all())
    assert bool((lengths <= torch.where(bundled, max(max_length, LIST_STEP), max_length)).all())
    assert not bool((schedule.items[bundled, 1:3] % LIST_STEP).any()), "whole batches of a list"
    for (bundle, _), pieces in pieces_of_unit(schedule).items():
        sizes = [end - begin for begin, end, _ in pieces]
        assert max(sizes) - min(sizes) <= (LIST_STEP if bundle else 1)


def test_sections_follow_each_other_as_documented(scheduled):
    units, schedule, _ = scheduled
    assert sum(schedule.sections) == schedule.item_count
    items, sections = schedule.items.numpy(), section_of_items(schedule)
    length, cut = items[:, 2] - items[:, 1], items[:, 3] >= 0
    lengths = units.length.numpy()
    between = lengths[(lengths > module.WIDE_LENGTH) & (lengths <= module.EVEN_WIDE_LENGTH)]
    even = 2 * between.sum() >= lengths.sum()
    wide = cut | (length > (module.EVEN_WIDE_LENGTH if even else module.WIDE_LENGTH))
    assert np.array_equal(wide, sections < 3) and not schedule.sections[0]
    for section in (1, 2):
        mine = cut[sections == section]
        assert np.array_equal(mine, np.sort(mine)[::-1]), "cut pieces come first"
    for section in (3, 4):
        mine = length[sections == section]
        for at in range(0, mine.size, module.SORT_WINDOW):
            window = mine[at : at + module.SORT_WINDOW]
            assert np.array_equal(window, np.sort(window)[::-1]), "longest first"


def test_the_tree_has_one_root_per_cut_unit_and_one_parent_per_slot(scheduled):
    _, schedule, _ = scheduled
    nodes, parents = schedule.nodes.numpy(), schedule.parent_of_slot.numpy()
    cut = [pieces for pieces in pieces_of_unit(schedule).values() if len(pieces) > 1]
    assert int((nodes[:, 2] == -1).sum()) == len(cut)
    children = [slot for first, count, _, _ in nodes for slot in range(first, first + count)]
    assert sorted(children) == list(range(schedule.slot_count)), "each slot is a child once"
    for node, (first, count, own, zero) in enumerate(nodes.tolist()):
        assert 2 <= count <= FAN_IN and zero == 0
        assert (parents[first : first + count] == node).all(), "contiguous and counted"
        assert own == -1 or own >= first + count, "a node comes after its children"
    own = [slot for slot in nodes[:, 2].tolist() if slot >= 0]
    leaves = [slot for pieces in cut for _, _, slot in pieces]
    assert sorted(own + leaves) == list(range(schedule.slot_count)), "each slot is written once"


def test_narrow_items_stay_near_their_place_in_the_order():
    csr = csr_of(MATRICES["one dense column"]())
    order = torch.randperm(csr.shape[0])
    schedule = SegmentSchedule.make(row_units(csr, order), max_length=256)
    rows = schedule.items[sum(schedule.sections[:4]) :, 0].tolist()
    narrow = [row for row in order.tolist() if row in set(rows)]
    step = module.SORT_WINDOW
    assert len(rows) > step, "the case must have more than one window"
    for at in range(0, len(rows), step):
        assert set(rows[at : at + step]) == set(narrow[at : at + step])


def test_equal_lengths_keep_the_order_they_were_given_in():
    csr = csr_of(MATRICES["one dense column"](), pattern=True)
    order = torch.randperm(csr.shape[0])
    schedule = SegmentSchedule.make(row_units(csr, order), max_length=256)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel())
    items = schedule.items[sum(schedule.sections[:4]) :][: module.SORT_WINDOW]
    length = items[:, 2] - items[:, 1]
    for value in length.unique().tolist():
        places = position[items[length == value, 0].long()]
        assert torch.equal(places, places.sort().values)


@pytest.mark.parametrize("pieces", [2, 16, 17, 256, 257, 5000])
def test_a_tree_of_any_size_is_as_low_as_its_fan_in_allows(pieces):
    units = Units(
        torch.tensor([7]), torch.tensor([0]), torch.tensor([pieces]), torch.tensor([False])
    )
    schedule = SegmentSchedule.make(units, max_length=1)
    parents, nodes = schedule.parent_of_slot.tolist(), schedule.nodes.tolist()
    depths = set()
    for slot in schedule.items[:, 3].tolist():
        depth = 0
        while slot >= 0:
            slot = nodes[parents[slot]][2]
            depth += 1
        depths.add(depth)
    expected = 1
    while FAN_IN**expected < pieces:
        expected += 1
    assert depths == {expected}


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_is_refused(length):
    with pytest.raises(ValueError) as caught:
        SegmentSchedule.make(row_units(csr_of(MATRICES["odd sizes"]())), max_length=length)
    assert str(caught.value) == (
        "SegmentSchedule.make: max_length must be at least 1, "
        f"got {length}. Give a positive length."
    )


def test_entries_past_32_bits_are_refused():
    far = Units(
        torch.tensor([0]), torch.tensor([2**31 - 1]), torch.tensor([1]), torch.tensor([False])
    )
    with pytest.raises(ValueError) as caught:
        SegmentSchedule.make(far, max_length=128)
    assert str(caught.value) == (
        "SegmentSchedule.make: units must be under 2^31 entries, got more. Split A by rows."
    )


def test_longer_rows_have_a_warp_and_the_longest_a_thread_block():
    csr = csr_of(MATRICES["odd sizes"]())
    units = row_units(csr)
    schedule = SegmentSchedule.make(units, max_length=9, wide_length=2, shared_length=5)
    sections, items = section_of_items(schedule), schedule.items.numpy()
    length, cut = items[:, 2] - items[:, 1], items[:, 3] >= 0
    assert np.array_equal(sections == 0, length > 5)
    assert np.array_equal(sections == 2, (length <= 5) & (cut | (length > 2)))
    check_cover(units, pieces_of(schedule))


def test_bundles_are_not_shared_by_warps():
    units = RowBundles.pack(csr_of(MATRICES["odd sizes"]()), min_sharing=1.0).units()
    schedule = SegmentSchedule.make(units, max_length=128, wide_length=0, shared_length=0)
    rows = int((~units.bundled & (units.length > 0)).sum())
    assert schedule.sections[0] == rows and schedule.sections[1] == int(units.bundled.sum())


def test_equal_parts_of_neighbouring_cut_rows_follow_each_other():
    """They read about the same rows of B, so that warps of a block find them in the SM's cache."""
    rows, pieces = module.INTERLEAVED + 2, 3
    indptr = torch.arange(rows + 1) * 30
    csr = CSR(indptr, torch.arange(30, dtype=torch.int32).repeat(rows), None, (rows, 30))
    items = SegmentSchedule.make(row_units(csr), max_length=10).items
    first = module.INTERLEAVED * pieces
    parts = ((items[:, 1] % 30) // 10).tolist()
    assert parts[:first] == [part for part in range(pieces) for _ in range(module.INTERLEAVED)]
    assert items[: module.INTERLEAVED, 0].tolist() == list(range(module.INTERLEAVED))
    assert parts[first:] == [0, 0, 1, 1, 2, 2]


def test_pieces_that_the_host_lists_are_those_of_tensor_operations():
    draw = torch.Generator().manual_seed(9)
    length = torch.randint(200, 3000, (45,), generator=draw)
    offsets = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    for bundled in (False, True):
        units = Units(torch.arange(45), offsets[:-1] * 4, length * 4, torch.full((45,), bundled))
        columns = (units.label, units.begin, units.length, units.bundled.long())
        for max_length in (8, 32, 128, 600):
            wanted = SegmentSchedule.make(units, max_length=max_length)
            lists, tree = cut_on_host(torch.stack(columns, 1).numpy(), max_length)
            assert wanted.items.tolist() == np.concatenate(lists).tolist()
            assert lists[1 if bundled else 2].shape[0] == wanted.item_count
            assert torch.equal(tree[0], wanted.parent_of_slot)
            assert torch.equal(tree[1], wanted.nodes)
