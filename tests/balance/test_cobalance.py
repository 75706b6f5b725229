"""Tasks of windows and columns shared out between persistent workers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.balance.cover import check_cover
from tests.balance.decoding import pieces_of

from sparsetile.balance import CoBalanced
from sparsetile.balance.cobalance import MIN_TILES
from sparsetile.balance.cost_model import CostModel
from sparsetile.balance.partition_points import (
    SNAP,
    greedy_points,
    refined_points,
    share_costs,
)
from sparsetile.formats import Units

MODEL = CostModel(tile=1.0, window=4.0)
WINDOWS = st.lists(st.integers(0, 90) | st.sampled_from([0, 0, 1, 8, 900]), max_size=60)
WORKERS = st.sampled_from([1, 2, 3, 7, 40, 132])
WIDTHS = st.sampled_from([1, 4, 8, 16, 32])


def units_of(tiles: list[int]) -> Units:
    return Units.from_offsets(torch.tensor([0, *tiles]).cumsum(0).to(torch.int32))


def made(tiles: list[int], workers: int | None, width: int = 16, **options) -> CoBalanced:
    return CoBalanced.make(units_of(tiles), workers=workers, width=width, model=MODEL, **options)


def loads(schedule: CoBalanced) -> list[float]:
    """Cost of each worker's items by Equation 1, in windows of all columns."""
    first = schedule.first_of_worker.tolist()
    item = schedule.items.double()
    cost = (item[:, 2] - item[:, 1] + MODEL.window) * (item[:, 5] - item[:, 4]) / schedule.width
    return [sum(cost[begin:end].tolist()) for begin, end in itertools.pairwise(first)]


@settings(max_examples=150, deadline=None)
@given(WINDOWS, WORKERS, WIDTHS, st.booleans(), st.sampled_from([1, 2, 4]))
def test_every_tile_of_every_unit_of_columns_is_in_one_item(tiles, workers, width, in_turn, least):
    schedule = made(tiles, workers, width, in_turn=in_turn, least=least, step=2)
    check_cover(units_of(tiles), pieces_of(schedule))
    first = schedule.first_of_worker.tolist()
    assert first == sorted(first) and (first[0], first[-1]) == (0, schedule.item_count)
    assert not bool(schedule.items[:, 6:].any())
    offsets = [0, *itertools.accumulate(tiles)]
    held = np.zeros((max(sum(tiles), 1), width), dtype=int)
    written = np.zeros((len(tiles), width), dtype=int)
    for window, begin, end, slot, first, last, *_ in schedule.items.tolist():
        assert offsets[window] <= begin <= end <= offsets[window + 1]
        held[begin:end, first:last] += 1
        written[window, first:last] += slot < 0
        assert slot < 0 or begin < end
    assert (held[: sum(tiles)] == 1).all()
    cut = torch.unique(schedule.items[schedule.items[:, 3] >= 0, 0]).tolist()
    whole = [w for w in range(len(tiles)) if w not in cut]
    assert (written[whole] == 1).all() and not written[cut].any()


def test_windows_are_split_along_n_if_shares_are_wide_enough():
    schedule = made([400, 400], workers=4, least=4)
    assert schedule.slot_count == 0 and schedule.shared_windows == 2
    assert schedule.largest == 1.0
    assert schedule.items[:, 4:6].tolist() == [[0, 8], [8, 16]] * 2


def test_hub_windows_are_cut_along_their_tiles_if_n_is_too_narrow():
    schedule = made([4000, 40, 40], workers=40, width=4, least=4)
    pieces = schedule.items[schedule.items[:, 0] == 0]
    assert schedule.slot_count >= 39 and len(pieces) >= 39
    lengths = pieces[:, 2] - pieces[:, 1]
    assert int(lengths.min()) >= MIN_TILES and schedule.largest < 1.15
    check_cover(units_of([4000, 40, 40]), pieces_of(schedule))


@pytest.mark.parametrize("deviation", [0, 64, 128, 192])
@pytest.mark.parametrize("width, in_turn", [(8, False), (16, False), (4, True)])
def test_uneven_windows_are_balanced_within_a_few_percent(deviation, width, in_turn):
    """The paper's Gamma-distributed windows: mean 256, deviation up to 192."""
    random = np.random.default_rng(7)
    tiles = np.full(2000, 256.0)
    if deviation:
        shape = (256 / deviation) ** 2
        tiles = random.gamma(shape, 256 / shape, 2000)
    lengths = np.rint(tiles).astype(int).tolist()
    schedule = made(lengths, 132, width, least=4, in_turn=in_turn)
    mean = sum(loads(schedule)) / 132
    assert max(loads(schedule)) / mean < (1.03 if in_turn else 1.02)
    assert schedule.largest == pytest.approx(max(loads(schedule)) / mean)


def test_without_persistent_workers_each_window_is_a_worker_of_its_own():
    schedule = made([3, 0, 900], None)
    assert schedule.worker_count == 3 and schedule.first_of_worker.tolist() == [0, 1, 2, 3]
    assert schedule.items[:, 0].tolist() == [0, 1, 2] and schedule.slot_count == 0
    assert schedule.largest == pytest.approx(904 / (915 / 3))


def shares_of(schedule: CoBalanced) -> list[list[int]]:
    """Windows of each worker, in its order."""
    first = schedule.first_of_worker.tolist()
    return [schedule.items[a:b, 0].tolist() for a, b in itertools.pairwise(first)]


def test_windows_in_turn_go_to_different_workers():
    shares = shares_of(made([8] * 40, 4, width=1, in_turn=True))
    assert [share[:7] for share in shares] == [list(range(w, 28, 4)) for w in range(4)]


def test_a_window_goes_to_the_worker_that_has_the_least():
    tiles = [100, 10, 10, *[10] * 400]
    shares = shares_of(made(tiles, 3, width=1, in_turn=True))
    assert shares[0][0] == 0 and shares[0][1] > 14, "others have reached it by then"
    assert shares[1][:3] == [1, 3, 5] and shares[2][:3] == [2, 4, 6]


def test_windows_that_are_left_are_split_along_n_so_that_all_end_together():
    schedule = made([16] * 12, 8, width=8, in_turn=True)
    split = schedule.items[schedule.items[:, 5] - schedule.items[:, 4] < 8]
    assert len(split) > 0 and schedule.slot_count == 0
    assert max(loads(schedule)) == pytest.approx(min(loads(schedule)))


HUB = [2000] + [40] * 50


def test_hub_windows_in_turn_are_split_along_n_without_partial_sums():
    schedule = made(HUB, 10, width=16, in_turn=True)
    hub = schedule.items[schedule.items[:, 0] == 0]
    assert schedule.slot_count == 0 and len(hub) >= 5
    assert (hub[:, 2] - hub[:, 1] == 2000).all(), "each part reads all tiles"
    assert max(loads(schedule)) < 1.1 * sum(loads(schedule)) / 10


def test_hub_windows_in_turn_are_cut_along_their_tiles_if_n_has_one_unit():
    schedule = made(HUB, 10, width=1, in_turn=True)
    hub = schedule.items[schedule.items[:, 0] == 0]
    assert schedule.slot_count == len(hub) >= 5
    check_cover(units_of(HUB), pieces_of(schedule))
    assert max(loads(schedule)) < 1.15 * sum(loads(schedule)) / 10


def test_fewer_windows_are_cut_if_partial_sums_cost_more():
    counts = [
        made([300] * 12, 10, width=1, in_turn=True, partial=partial).slot_count
        for partial in (0, 20, 100, 1000)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


@settings(max_examples=100, deadline=None)
@given(WINDOWS.filter(len), WORKERS, WIDTHS)
def test_points_snap_to_windows_and_refinement_is_never_worse(tiles, workers, width):
    prefix = np.concatenate([[0.0], np.cumsum(np.array(tiles) + 4.0)])
    points = greedy_points(prefix, width, workers)
    better = refined_points(points, prefix, width)
    for found in (points, better):
        assert (np.diff(found) >= 0).all() and (found[0], found[-1]) == (0, len(tiles) * width)
        column = found % width
        inside = column[column > 0]
        assert ((inside >= width / SNAP) & (inside <= width - width / SNAP)).all()
    largest = [share_costs(found, prefix, width).max() for found in (points, better)]
    assert largest[1] <= largest[0] + 0.003 * prefix[-1] / workers
    assert (refined_points(points, prefix, width) == better).all(), "seeded"


def test_refinement_improves_on_the_greedy_points_if_windows_are_few():
    tiles = [(37 * i * i + 11 * i) % 97 for i in range(40)]
    greedy, refined = (made(tiles, 9, 8, refine=refine).largest for refine in (False, True))
    assert refined < greedy


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"workers": 0},
            "CoBalanced.make: workers must be at least 1, got 0. Choose a larger one.",
        ),
        ({"width": 0}, "CoBalanced.make: width must be at least 1, got 0. Choose a larger one."),
    ],
)
def test_rejects_no_workers_and_no_width(options, text):
    with pytest.raises(ValueError) as caught:
        CoBalanced.make(units_of([3]), **{"workers": 1, "width": 1, **options})
    assert str(caught.value) == text
