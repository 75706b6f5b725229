"""Rows in windows and rows outside: counts against brute force, both rules against plain walks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats.rstile import RSTile
from sparsetile.formats.window_split import (
    Counts,
    Partition,
    RowCosts,
    cheapest_partition,
    count_columns,
    split_by_cost,
    split_by_threshold,
)
from tests.contracts.cases import MATRICES, csr_of, equal_rows, random_matrix

HEIGHTS = (8, 16)


def packed(
    csr: CSR, order: Tensor | None = None, *, max_entries: int, max_new: int = 3, height: int = 8
) -> RSTile:
    """RS-Tile in the split of the paper's rule."""
    counts = count_columns(csr, order, height)
    return RSTile.pack(csr, order, split_by_threshold(counts, max_entries, max_new))


def columns_at(csr: CSR, order: Tensor | None = None) -> list[set[int]]:
    """Columns of the row at each position."""
    rows = range(csr.shape[0]) if order is None else order.tolist()
    ends, indices = csr.indptr.tolist(), csr.indices.tolist()
    return [set(indices[ends[row] : ends[row + 1]]) for row in rows]


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "one dense column"])
def test_counts_are_those_of_each_window(name, height):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0])
    counts, columns = count_columns(csr, order, height), columns_at(csr, order)
    for at, mine in enumerate(columns):
        others = set().union(*columns[at + 1 : at + height])
        assert int(counts.entries[at]) == len(mine)
        assert int(counts.delta[at]) == len(mine - others)
        assert int(counts.pairs[at]) == len(mine | others)


def check_whole(split: Partition, rows: int) -> None:
    """Every position is in one window or residual."""
    together = torch.cat([split.tiled, split.residual])
    assert torch.equal(together.sort().values, torch.arange(rows))


def walk(columns: list[set[int]], max_entries: int, max_new: int, height: int) -> list[int]:
    """Algorithm 1, row by row: where windows begin."""
    windows, row = [], 0
    while row < len(columns):
        new = columns[row] - set().union(*columns[row + 1 : row + height])
        few = len(columns[row]) <= max_entries and len(new) < max_new
        if not columns[row] or few:
            row += 1
        else:
            windows.append(row)
            row += height
    return windows


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("max_entries, max_new", [(0, 0), (2, 2), (6, 3), (6, 99), (99, 99)])
@pytest.mark.parametrize("name", ["odd sizes", "empty rows", "tall", "no rows", "no entries"])
def test_thresholds_open_the_windows_of_the_papers_walk(name, max_entries, max_new, height):
    csr = csr_of(MATRICES[name]())
    split = split_by_threshold(count_columns(csr, height=height), max_entries, max_new)
    assert split.windows.tolist() == walk(columns_at(csr), max_entries, max_new, height)
    check_whole(split, csr.shape[0])


def test_thresholds_below_zero_are_refused():
    counts = count_columns(csr_of(random_matrix(4, 4, 0.5)))
    with pytest.raises(ValueError) as caught:
        split_by_threshold(counts, -1, 0)
    assert str(caught.value) == (
        "split_by_threshold: thresholds must be at least 0, got (-1, 0). Raise them."
    )


def cost_of(split: Partition, counts: Counts, costs: RowCosts) -> float:
    windows, rows = costs.of_windows(counts), costs.of_rows(counts)
    return float(windows[split.windows].sum() + rows[split.residual].sum())


@pytest.mark.parametrize("seed", range(4))
def test_the_split_by_cost_is_the_cheapest_of_all(seed):
    """Of all ways to place windows of eight rows among twenty."""
    csr = csr_of(random_matrix(20, 30, 0.3, seed=seed))
    counts = count_columns(csr)
    costs = RowCosts(tile=4.0 + seed, window=1.0, entry=0.5, new=0.7, row=0.2)
    split = split_by_cost(counts, costs)
    check_whole(split, 20)
    starts = [
        chosen
        for number in range(4)
        for chosen in itertools.combinations(range(20), number)
        if all(b - a >= 8 for a, b in itertools.pairwise(chosen))
    ]
    rows, windows = costs.of_rows(counts).tolist(), costs.of_windows(counts).tolist()
    best = min(
        sum(windows[start] for start in chosen)
        + sum(
            cost
            for at, cost in enumerate(rows)
            if not any(start <= at < start + 8 for start in chosen)
        )
        for chosen in starts
    )
    assert cost_of(split, counts, costs) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_a_split_that_costs_too_much_is_seen_without_the_search(seed, monkeypatch):
    counts = count_columns(csr_of(random_matrix(60, 40, 0.1, seed=seed)))
    costs = RowCosts(tile=1.0 + seed, window=0.5, entry=0.5, new=0.7, row=0.2)
    rows, windows = costs.of_rows(counts), costs.of_windows(counts)
    least = cost_of(split_by_cost(counts, costs), counts, costs)
    found = cheapest_partition(counts, rows, windows, least)
    assert found is not None and cost_of(found, counts, costs) == least
    monkeypatch.setattr(
        "sparsetile.reorder.cheapest_windows.cheapest_windows", lambda *_: pytest.fail("searched")
    )
    assert cheapest_partition(counts, rows, windows, 0.5 * least) is None


def counts_of(columns: list[int]) -> Counts:
    """Windows with these many distinct columns."""
    pairs = torch.tensor(columns)
    return Counts(torch.ones_like(pairs), torch.ones_like(pairs), pairs, 16)


def test_each_piece_of_a_window_that_is_cut_costs_extra():
    counts = counts_of([0, 8, 16, 17, 32, 33, 800])  # 0, 1, 2, 3, 4, 5, 100 tiles
    plain = RowCosts(tile=2.0, window=1.0, entry=1.0, new=1.0, row=1.0)
    whole = plain.of_windows(counts)
    assert whole.tolist() == [1, 3, 5, 7, 9, 11, 201]
    cut = dataclasses.replace(plain, longest=2, piece=10.0).of_windows(counts)
    assert (cut - whole).tolist() == [0, 0, 0, 20, 20, 30, 500], "whole windows pay for none"


def test_pieces_keep_long_windows_from_being_opened():
    csr = csr_of(equal_rows(16, 700))  # 100 columns, 13 tiles
    counts = count_columns(csr, height=16)
    whole = RowCosts(tile=50.0, window=0.0, entry=1.0, new=0.0, row=0.0, longest=13, piece=500.0)
    assert split_by_cost(counts, whole).windows.tolist() == [0]
    cut = dataclasses.replace(whole, longest=12)
    split = split_by_cost(counts, cut)
    assert split.windows.tolist() == [] and split.residual.tolist() == list(range(16))


@pytest.mark.parametrize("name", MATRICES)
def test_windows_of_sixteen_rows_have_an_even_number_of_tiles(name):
    csr = csr_of(MATRICES[name]())
    tiles = packed(csr, max_entries=2, height=16).tiles
    assert tiles.even and not bool((tiles.row_window_offset % 2).any())
    eight = packed(csr, max_entries=2).tiles
    assert not eight.even and (eight.units().length > 0).all()


def test_rows_that_share_columns_are_windows_and_rows_that_do_not_are_left_out():
    shared, alone = equal_rows(16, 400).toarray(), random_matrix(10, 400, 0.02).toarray()
    csr = csr_of(sp.csr_array(np.concatenate([alone[:3], shared[:8], alone[3:], shared[8:]])))
    costs = RowCosts(tile=24.0, window=1.0, entry=1.0, new=1.0, row=0.1)
    split = split_by_cost(count_columns(csr), costs)
    assert split.windows.tolist() == [3, 18], "windows begin where equal rows begin"
    made = RSTile.pack(csr, None, split)
    assert made.tile_rows.tolist() == [*range(3, 11), *range(18, 26)]
    assert made.residual_rows.tolist() == [0, 1, 2, *range(11, 18)]
    assert made.tile_share == pytest.approx(16 * 58 / csr.nnz)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("height", [8, 16])
def test_each_entry_is_in_a_tile_or_in_a_residual_row(name, height):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0])
    made = packed(csr, order, max_entries=3, height=height)
    rows = torch.cat([made.tile_rows, made.residual_rows])
    assert torch.equal(rows.sort().values, torch.arange(csr.shape[0]))
    loose = torch.nonzero(torch.isin(csr.row_ids(), made.residual_rows)).flatten()
    entries = torch.cat([made.tiles.entries, loose])
    assert torch.equal(entries.sort().values, torch.arange(csr.nnz))


def test_no_window_is_needed():
    csr = csr_of(random_matrix(50, 40, 0.02))
    made = packed(csr, max_entries=99, max_new=99)
    assert made.tile_rows.numel() == 0 and made.tile_share == 0.0
    assert made.residual_rows.tolist() == list(range(50))
