"""What the csr system decides: how long items are."""

from __future__ import annotations

import pytest
import torch

from sparsetile.balance import Units
from sparsetile.systems.csr import (
    BUSY_WARPS,
    LONGEST_SEGMENT,
    MANY,
    MANY_NARROW,
    SHORT_SEGMENT,
    UNCUT,
    UNCUT_NARROW,
    segment_length,
)

NARROW, WIDE = 128, 512  # bytes of a row of B


def rows_of(*lengths: int) -> Units:
    length = torch.tensor(lengths)
    begin = torch.cumsum(length, 0) - length
    return Units(torch.arange(len(lengths)), begin, length, torch.zeros(len(lengths)).bool())


@pytest.mark.parametrize("row_bytes, limit", [(NARROW, UNCUT_NARROW), (WIDE, UNCUT)])
def test_no_row_is_cut_where_none_is_very_long(row_bytes, limit):
    assert segment_length(rows_of(3, limit, 40), row_bytes) >= limit
    assert segment_length(rows_of(3, limit + 1, 40), row_bytes) == SHORT_SEGMENT


@pytest.mark.parametrize("row_bytes, many", [(NARROW, MANY_NARROW), (WIDE, MANY)])
def test_items_are_longer_where_entries_are_many(row_bytes, many):
    short_rows = [20] * (many // 20 - 100)
    few, enough = rows_of(1000, *short_rows[:-1000]), rows_of(1000, *short_rows, *[20] * 100)
    assert segment_length(few, row_bytes) == SHORT_SEGMENT
    assert segment_length(enough, row_bytes) == 2 * SHORT_SEGMENT


def test_rows_that_are_nearly_all_long_give_each_warp_one_item():
    entries = 512 * BUSY_WARPS
    assert segment_length(rows_of(*[entries // 100] * 100), WIDE) == 512


@pytest.mark.parametrize("total, expected", [(10**8, LONGEST_SEGMENT), (10**5, SHORT_SEGMENT)])
def test_the_share_of_a_warp_has_limits(total, expected):
    assert segment_length(rows_of(*[total // 20] * 20), WIDE) == expected


def test_a_matrix_without_rows_has_an_item_length_all_the_same():
    assert segment_length(rows_of(), WIDE) == SHORT_SEGMENT
