"""Windows shared out between workers: nothing is lost, pieces are listed, loads are even."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetile.balance import WindowShares
from sparsetile.balance.window_shares import EVEN_ROUNDS, LONG_SHARE, MIN_TILES, WINDOW_COST
from sparsetile.formats import Units

WINDOWS = st.lists(st.integers(0, 90) | st.sampled_from([0, 0, 1, 7, 8, 400]), max_size=60)
WORKERS = st.sampled_from([1, 2, 3, 7, 40, 132])


def made(tiles: list[int], workers: int, **options) -> WindowShares:
    units = Units.from_offsets(torch.tensor([0, *tiles]).cumsum(0).to(torch.int32))
    return WindowShares.make(units, workers=workers, **options)


def loads(shares: WindowShares) -> list[int]:
    """Cost of each worker's items: tiles, and what an item costs beside them."""
    first = shares.first_of_worker.tolist()
    cost = (shares.items[:, 2] - shares.items[:, 1] + WINDOW_COST).tolist()
    return [sum(cost[begin:end]) for begin, end in itertools.pairwise(first)]


def pieces_of(shares: WindowShares) -> dict[int, list[tuple[int, int, int]]]:
    """(first tile, end, slot) of each window's items, by their first tiles."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for window, begin, end, slot in shares.items.tolist():
        found.setdefault(window, []).append((begin, end, slot))
    return {window: sorted(mine) for window, mine in found.items()}


@settings(max_examples=150, deadline=None)
@given(WINDOWS, WORKERS, st.booleans())
def test_every_tile_is_in_one_item_and_every_window_has_one(tiles, workers, dealt):
    shares = made(tiles, workers, dealt=dealt)
    offsets = torch.tensor([0, *tiles]).cumsum(0).tolist()
    found = pieces_of(shares)
    assert sorted(found) == list(range(len(tiles))), "empty windows are written, too"
    for window, mine in found.items():
        bounds = [begin for begin, _, _ in mine] + [mine[-1][1]]
        assert [end for _, end, _ in mine] == bounds[1:], "pieces follow each other"
        assert (bounds[0], bounds[-1]) == (offsets[window], offsets[window + 1])
        assert len(mine) == 1 or all(begin < end for begin, end, _ in mine)


@settings(max_examples=150, deadline=None)
@given(WINDOWS, WORKERS, st.booleans())
def test_cuts_list_the_windows_in_pieces_and_their_slots_in_order(tiles, workers, dealt):
    shares = made(tiles, workers, dealt=dealt)
    found = pieces_of(shares)
    cut = {w: [slot for _, _, slot in mine] for w, mine in found.items() if len(mine) > 1}
    whole = [mine[0] for mine in found.values() if len(mine) == 1]
    assert all(slot == -1 for _, _, slot in whole)
    listed = {
        window: list(range(first, first + slots))
        for window, first, slots, _ in shares.cuts.tolist()
    }
    assert listed == cut and len(listed) == shares.cut_count, "each once"
    slots = sorted(slot for mine in listed.values() for slot in mine)
    assert slots == list(range(shares.slot_count)), "no slot is left"
    assert not bool(shares.cuts[:, 3].any())


@settings(max_examples=150, deadline=None)
@given(WINDOWS, WORKERS, st.booleans())
def test_workers_have_neighbouring_items_in_the_order_of_their_windows(tiles, workers, dealt):
    shares = made(tiles, workers, dealt=dealt)
    first = shares.first_of_worker.tolist()
    assert len(first) == workers + 1 and first == sorted(first)
    assert (first[0], first[-1]) == (0, shares.item_count)
    for begin, end in itertools.pairwise(first):
        mine = [(window, at) for window, at, _, _ in shares.items[begin:end].tolist()]
        assert dealt or mine == sorted(mine)
    for part in (shares.items, shares.cuts, shares.first_of_worker):
        assert part.dtype is torch.int32 and part.is_contiguous()
    assert shares.items.shape == (shares.item_count, 4) and shares.cuts.shape[1] == 4


@settings(max_examples=200, deadline=None)
@given(WINDOWS, WORKERS)
def test_no_worker_has_much_more_than_the_mean(tiles, workers):
    """Both ends of a share may move by a piece, or past a window's end, and it may be cut."""
    shares = made(tiles, workers)
    mean = (sum(tiles) + WINDOW_COST * len(tiles)) / workers
    assert max(loads(shares)) <= mean + 2 * MIN_TILES + 2 * WINDOW_COST


@settings(max_examples=200, deadline=None)
@given(WINDOWS, WORKERS)
def test_the_last_windows_balance_the_dealt_shares(tiles, workers):
    shares = made(tiles, workers, dealt=True)
    mean = (sum(tiles) + WINDOW_COST * len(tiles)) / workers
    short = [each for each in tiles if each + WINDOW_COST <= LONG_SHARE * mean]
    rounds = max(len(short) // workers - EVEN_ROUNDS, 0)
    head = [short[w : rounds * workers : workers] for w in range(workers)]
    dealt = max(sum(mine) + WINDOW_COST * len(mine) for mine in head)
    assert max(loads(shares)) <= max(mean, dealt) + 2 * MIN_TILES + 2 * WINDOW_COST


def test_a_long_window_among_short_ones_is_cut_if_windows_are_dealt_out():
    random = torch.Generator().manual_seed(4)
    tiles = torch.randint(20, 90, (800,), generator=random).tolist()
    tiles[7] = tiles[500] = 600
    shares = made(tiles, 132, dealt=True)
    found, mean = loads(shares), (sum(tiles) + WINDOW_COST * len(tiles)) / 132
    assert max(found) <= 1.12 * mean
    assert {7, 500} <= set(shares.cuts[:, 0].tolist())


@settings(max_examples=100, deadline=None)
@given(WINDOWS, WORKERS, st.booleans(), st.sampled_from([1, 4, 8]))
def test_pieces_begin_at_whole_steps_of_their_windows(tiles, workers, dealt, step):
    shares = made(tiles, workers, dealt=dealt, step=step)
    offsets = torch.tensor([0, *tiles]).cumsum(0).tolist()
    for window, begin, _, _ in shares.items.tolist():
        assert (begin - offsets[window]) % step == 0


@pytest.mark.parametrize("dealt, least, most", [(False, 0, 200), (True, 70, 130)])
def test_enough_work_is_shared_within_two_percent(dealt, least, most):
    """Dealt windows must not differ more than the last two rounds make up for."""
    random = torch.Generator().manual_seed(4)
    tiles = torch.randint(least, most, (132 * 20,), generator=random).tolist()
    found = loads(made(tiles, 132, dealt=dealt))
    mean = sum(found) / len(found)
    assert max(found) <= 1.02 * mean and min(found) >= 0.97 * mean


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=20, max_size=80), st.integers(2, 6))
def test_a_deal_gives_neighbours_to_different_workers(tiles, workers):
    shares = made(tiles, workers, dealt=True)
    first = shares.first_of_worker
    worker = torch.searchsorted(first, torch.arange(shares.item_count), right=True) - 1
    owner = dict(zip(shares.items[:, 0].tolist(), worker.tolist(), strict=True))
    mean = (sum(tiles) + WINDOW_COST * len(tiles)) / workers
    short = [w for w, each in enumerate(tiles) if each + WINDOW_COST <= LONG_SHARE * mean]
    head = max(len(short) // workers - EVEN_ROUNDS, 0) * workers
    found = [owner[window] for window in short[:head]]
    assert found == [place % workers for place in range(head)]


def test_without_a_deal_a_share_is_a_run_of_windows():
    shares = made([10] * 12, 3)
    assert shares.items[:, 0].tolist() == list(range(12)) and shares.slot_count == 0
    assert shares.first_of_worker.tolist() == [0, 4, 8, 12]


def test_one_long_window_is_cut_evenly_and_one_worker_cuts_nothing():
    shares = made([400], 4)
    assert shares.items.tolist() == [[0, 0, 102, 0], [0, 102, 204, 1], [0, 204, 306, 2],
                                     [0, 306, 400, 3]]  # fmt: skip
    assert shares.cuts.tolist() == [[0, 0, 4, 0]]
    for dealt in (False, True):
        alone = made([400, 3, 0, 90], 1, dealt=dealt)
        assert alone.slot_count == 0 and alone.first_of_worker.tolist() == [0, 4]


def test_no_piece_at_a_windows_end_is_shorter_than_allowed():
    for tiles in range(1, 120):
        for workers in (2, 3, 5):
            mine = pieces_of(made([tiles], workers))[0]
            assert len(mine) == 1 or mine[-1][1] - mine[-1][0] >= MIN_TILES
            assert len(mine) == 1 or mine[0][1] - mine[0][0] >= MIN_TILES
    assert made([2 * MIN_TILES - 1], 2).slot_count == 0


@pytest.mark.parametrize("tiles", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("workers", [1, 5])
def test_nothing_to_multiply_is_still_something_to_write(tiles, dealt, workers):
    shares = made(tiles, workers, dealt=dealt)
    assert shares.items[:, 0].tolist() == list(range(len(tiles)))
    assert bool((shares.items[:, 1:3] == 0).all()) and shares.slot_count == shares.cut_count == 0
    assert shares.first_of_worker.numel() == workers + 1
    assert int(shares.first_of_worker[-1]) == len(tiles)
