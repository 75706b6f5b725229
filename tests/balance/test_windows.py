"""The schedule of windows: runs, cut windows, IBD, the time model's choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.balance.cover import check_cover
from tests.balance.decoding import pieces_of
from torch import Tensor

from sparsetile.balance.windows import (
    LENGTHS,
    LONG_SHARE,
    MAX_TILES,
    RUN_TILES,
    TileTimes,
    WindowSchedule,
    imbalance,
)
from sparsetile.formats import Units


def offsets_of(tiles: list[int]) -> Tensor:
    offsets = torch.zeros(len(tiles) + 1, dtype=torch.int32)
    offsets[1:] = torch.cumsum(torch.tensor(tiles, dtype=torch.int32), 0)
    return offsets


def made(tiles: list[int], **options) -> WindowSchedule:
    units = Units.from_offsets(offsets_of(tiles))
    return WindowSchedule.make(units, **{"workers": 2112, **options})


def runs_of(schedule: WindowSchedule) -> list[list[int]]:
    return [item for item in schedule.items.tolist() if item[3] < 0]


def check(tiles: list[int], schedule: WindowSchedule) -> None:
    """Every window is in one run, or is cut into pieces that have slots; all is int32."""
    offsets = offsets_of(tiles).tolist()
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    whole: list[int] = []
    for window, begin, end, last in schedule.items.tolist():
        if last >= 0:
            assert 0 < end - begin <= schedule.longest
            pieces.setdefault(window, []).append((begin, end, last))
        else:
            assert (begin, end) == (offsets[window], offsets[window - last])
            whole += range(window, window - last)
    assert sorted([*pieces, *whole]) == list(range(len(tiles))), "empty windows are written too"
    for window, mine in pieces.items():
        assert len(mine) > 1
        at = offsets[window]
        for begin, end, _ in sorted(mine):
            assert begin == at
            at = end
        assert at == offsets[window + 1]
    slots = sorted(slot for mine in pieces.values() for _, _, slot in mine)
    assert slots == list(range(len(slots)))
    roots = sum(own < 0 for _, _, own, _ in schedule.nodes.tolist())
    assert roots == len(pieces)
    for part in (schedule.items, schedule.parent_of_slot, schedule.nodes):
        assert part.dtype is torch.int32 and part.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=60), st.sampled_from([1, 10, 2112]))
def test_every_tile_of_every_window_is_in_exactly_one_item(tiles, workers):
    check(tiles, made(tiles, workers=workers))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 2, 5, 9, 40]), max_size=60))
def test_a_run_has_about_as_many_tiles_as_wanted_and_few_enough_windows(tiles):
    schedule = made(tiles)
    for window, _, _, last in runs_of(schedule):
        mine = [max(count, 1) for count in tiles[window : window - last]]
        assert sum(mine[:-1]) < RUN_TILES, "it ends with the window that makes it long enough"
        assert max(mine) <= min(2 * schedule.longest, MAX_TILES), "longer windows are cut"
        assert -last <= 32, "the kernel remembers 32 windows"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=40))
def test_without_balance_windows_stay_whole(tiles):
    schedule = made(tiles, balance=False)
    check(tiles, schedule)
    assert schedule.slot_count == 0 and schedule.item_count == len(tiles)


def test_ibd_is_the_mean_distance_from_the_average():
    assert imbalance(torch.tensor([4, 4, 4])) == 0
    assert imbalance(torch.tensor([0, 10])) == 5
    assert imbalance(torch.tensor([], dtype=torch.int32)) == 0
    assert made([0, 10]).imbalance == 5


def test_short_windows_are_concatenated_in_their_order():
    schedule = made([2] * 12, workers=1)
    assert RUN_TILES == 8 and schedule.slot_count == 0
    assert schedule.items.tolist() == [[0, 0, 8, -4], [4, 8, 16, -4], [8, 16, 24, -4]]


def test_an_empty_window_counts_as_one_tile_of_a_run():
    dear = {"workers": 1, "times": TileTimes(start=100.0)}
    assert made([0] * 17, **dear).items.tolist() == [
        [0, 0, 0, -8],
        [8, 0, 0, -8],
        [16, 0, 0, -1],
    ]
    assert made([0, 3, 0, 0, 2, 4], **dear).items.tolist() == [[0, 0, 5, -5], [5, 5, 9, -1]]


def test_no_run_reaches_across_a_cut_window():
    schedule = made([1, 1, 200, 1, 0, 200, 0])
    assert {item[0] for item in schedule.items.tolist() if item[3] >= 0} == {2, 5}
    assert runs_of(schedule) == [[0, 0, 2, -2], [3, 202, 203, -2], [6, 403, 403, -1]]


def test_a_window_is_cut_only_when_it_is_twice_as_long_as_a_piece():
    longest = made([4] * 10 + [100]).longest
    assert longest == min(LENGTHS)
    kept = made([4] * 10 + [100, 2 * longest])
    assert kept.longest == longest and runs_of(kept)[-1][0] == 11
    cut = made([4] * 10 + [100, 2 * longest + 1])
    assert cut.longest == longest and max(item[0] for item in runs_of(cut)) < 10
    assert cut.slot_count > kept.slot_count


def test_no_window_over_the_limit_stays_whole_however_many_there_are():
    many = [MAX_TILES] * 5000
    assert made([*many, MAX_TILES], workers=1).slot_count == 0
    assert made([*many, MAX_TILES + 1], workers=1).slot_count > 0


def test_few_long_windows_are_cut_finer_than_many():
    few = made([0] * 20 + [300] * 20)
    many = made([0] * 20_000 + [300] * 20_000, workers=64)
    assert few.longest < many.longest == MAX_TILES


@pytest.mark.parametrize("term", ["write_back", "start"])
def test_a_higher_start_cost_makes_items_longer(term):
    tiles = [0] * 50 + [200] * 50
    cheap = made(tiles, times=TileTimes(**{"write_back": 0.01, "start": 0.01, term: 0.01}))
    dear = made(tiles, times=TileTimes(**{"write_back": 0.01, "start": 0.01, term: 100.0}))
    assert cheap.longest < dear.longest
    assert {cheap.longest, dear.longest} <= set(LENGTHS)


def test_pieces_come_first_and_runs_keep_the_order_of_their_windows():
    tiles = [2, 1, 90, 2, 0, 1, 70, 2] + [1] * 40
    schedule = made(tiles)
    last = schedule.items[:, 3].tolist()
    assert last == sorted(last, key=lambda x: x < 0)
    assert [item[0] for item in runs_of(schedule)] == sorted(i[0] for i in runs_of(schedule))
    pieces = [item for item in schedule.items.tolist() if item[3] >= 0]
    for window in (2, 6):
        begins = [begin for w, begin, _, _ in pieces if w == window]
        assert begins == sorted(begins)


@pytest.mark.parametrize("tiles", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("balance", [True, False])
def test_nothing_to_multiply_is_still_something_to_write(tiles, balance):
    schedule = made(tiles, balance=balance)
    check(tiles, schedule)
    assert schedule.items.shape == (schedule.item_count, 4)
    assert sum(-item[3] for item in runs_of(schedule)) == len(tiles)


# -- steps of several tiles, and a limit in place of the time model


EVEN = st.lists(st.integers(0, 60).map(lambda half: 2 * half), max_size=50)


@settings(max_examples=100, deadline=None)
@given(EVEN, st.sampled_from([None, 8, 64]), st.booleans())
def test_items_of_even_windows_begin_and_end_at_whole_steps(tiles, limit, balance):
    schedule = made(tiles, step=2, limit=limit, balance=balance)
    check(tiles, schedule)
    check_cover(Units.from_offsets(offsets_of(tiles)), pieces_of(schedule))
    assert not bool((schedule.items[:, 1:3] % 2).any()) and schedule.longest % 2 == 0


@settings(max_examples=60, deadline=None)
@given(EVEN, st.sampled_from([1, 2112]))
def test_steps_are_scheduled_as_tiles_are(tiles, workers):
    steps = made([count // 2 for count in tiles], workers=workers)
    schedule = made(tiles, workers=workers, step=2)
    doubled = steps.items.clone()
    doubled[:, 1:3] *= 2
    assert torch.equal(schedule.items, doubled) and schedule.longest == 2 * steps.longest
    assert torch.equal(schedule.nodes, steps.nodes)
    assert schedule.imbalance == pytest.approx(2 * steps.imbalance), "in tiles"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=50), st.sampled_from([5, 16, 64]))
def test_a_limit_cuts_longer_windows_and_no_others(tiles, limit):
    schedule = made(tiles, limit=limit)
    check(tiles, schedule)
    check_cover(Units.from_offsets(offsets_of(tiles)), pieces_of(schedule))
    cut = {item[0] for item in schedule.items.tolist() if item[3] >= 0}
    assert cut == {window for window, count in enumerate(tiles) if count > limit}
    assert schedule.longest == limit
    lengths = [end - begin for _, begin, end, last in schedule.items.tolist() if last >= 0]
    assert all(length <= limit for length in lengths)


def test_with_a_limit_the_workers_decide_nothing():
    tiles = [3, 40, 70, 0, 64, 65]
    few, many = made(tiles, limit=64, workers=1), made(tiles, limit=64, workers=10**6)
    assert torch.equal(few.items, many.items) and few.longest == many.longest == 64
    assert few.slot_count == 4, "two pieces of either window over the limit"


@settings(max_examples=60, deadline=None)
@given(EVEN, st.sampled_from([16, 64]))
def test_with_a_limit_long_runs_come_first_and_the_others_keep_their_order(tiles, limit):
    schedule = made(tiles, step=2, limit=limit)
    last = schedule.items[:, 3].tolist()
    assert last == sorted(last, key=lambda x: x < 0), "behind all pieces"
    runs = runs_of(schedule)
    lengths = [end - begin for _, begin, end, _ in runs]
    number = sum(length > limit // LONG_SHARE for length in lengths)
    assert lengths[:number] == sorted(lengths, reverse=True)[:number]
    firsts = [window for window, *_ in runs[number:]]
    assert firsts == sorted(firsts)


def test_the_longest_window_starts_first():
    tiles = [16, 16, 40, 16, 64, 16, 50]
    runs = runs_of(made(tiles, step=2, limit=64))
    assert [window for window, *_ in runs] == [4, 6, 2, 0, 1, 3, 5]
    assert [window for window, *_ in runs_of(made(tiles, step=2, balance=False))] == [*range(7)]


def test_a_limit_below_a_step_leaves_pieces_of_one_step():
    schedule = made([6, 2, 0], step=2, limit=1)
    check([6, 2, 0], schedule)
    assert schedule.longest == 2 and schedule.slot_count == 3


# -- windows that warps share


@given(
    tiles=st.lists(st.integers(0, 60).map(lambda n: 2 * n), min_size=1, max_size=40),
    shared=st.integers(0, 40),
    limit=st.integers(2, 60),
)
def test_shared_items_are_pieces_and_long_windows_longest_first(tiles, shared, limit):
    schedule = made(tiles, step=2, limit=limit, shared=shared)
    most = max(limit // 2, 1) * 2
    long = [count for count in tiles if count > min(shared // 2, most // 2) * 2]
    cut = [count for count in long if count > most]
    front = schedule.items[: schedule.shared_count].tolist()
    pieces, whole = [i for i in front if i[3] >= 0], [i for i in front if i[3] < 0]
    assert front == pieces + whole
    assert sum(end - begin for _, begin, end, _ in pieces) == sum(cut)
    lengths = [end - begin for _, begin, end, _ in whole]
    assert lengths == sorted((c for c in long if c <= most), reverse=True)
    assert all(windows == -1 for *_, windows in whole)
    rest = schedule.items[schedule.shared_count :, 3]
    assert bool((rest < 0).all()), "nothing else is cut"


def test_nothing_is_shared_unless_asked():
    assert made([8, 600, 40], limit=32).shared_count == 0
    assert made([8, 600, 40], workers=3).shared_count == 0


@pytest.mark.parametrize("run", [0, -1, MAX_TILES + 1])
def test_runs_of_more_windows_than_the_kernel_remembers_are_refused(run: int):
    expected = f"WindowSchedule.make: run must be from 1 to 32 steps, got {run}. The kernel"
    with pytest.raises(ValueError, match=expected):
        made([1] * 100, limit=200, run=run)


def test_the_longest_runs_hold_as_many_windows_as_the_kernel_remembers():
    for tiles in ([0] * 100, [1] * 100):
        schedule = made(tiles, limit=200, run=MAX_TILES)
        assert min(item[3] for item in runs_of(schedule)) == -MAX_TILES
        check(tiles, schedule)
        check_cover(Units.from_offsets(offsets_of(tiles)), pieces_of(schedule))
