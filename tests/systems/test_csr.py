"""What the csr system decides: how long items are, and in which order slabs are walked."""

from __future__ import annotations

import json

import pytest
import torch

from sparsetile.formats.units import Units
from sparsetile.intake import as_csr
from sparsetile.kernels.csr import LOCAL, LOCAL_BUNDLES, RowShape
from sparsetile.reorder import Permutation
from sparsetile.systems.base import Request
from sparsetile.systems.csr.rows import (
    BUSY_WARPS,
    LONGEST_SEGMENT,
    MANY,
    MANY_NARROW,
    SHORT_SEGMENT,
    UNCUT,
    UNCUT_NARROW,
    segment_length,
)
from sparsetile.systems.csr.system import CSRSystem

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


@pytest.mark.parametrize("bundles, limit", [(False, LOCAL), (True, LOCAL_BUNDLES)])
def test_slabs_come_first_where_rows_of_b_are_used_near_each_other(bundles, limit):
    assert RowShape(whole=limit).slabs_first(bundles)
    assert not RowShape(whole=limit + 0.01).slabs_first(bundles)
    assert not RowShape(whole=0.0).slabs_first(bundles)  # B fits the cache: nothing to gain


def recipe_of(csr, n: int) -> dict:
    request = Request(csr, n, torch.float32, Permutation("identity", None))
    return json.loads(CSRSystem().build(request).recipe.partition(":")[2])


def band(rows: int):
    row = torch.arange(rows).repeat_interleave(3)
    col = (row + torch.tensor([-1, 0, 1]).repeat(rows)).clamp(0, rows - 1)
    coo = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(row.numel()), (rows, rows))
    return as_csr(coo.coalesce())


def test_a_band_is_walked_row_by_row_in_wide_products_only(monkeypatch):
    monkeypatch.setattr("sparsetile.balance.locality.CACHE_BYTES", 64 * 2048)
    matrix = band(3000)
    whole = RowShape(**recipe_of(matrix, 512)["shape"]).whole
    assert 1.0 <= whole <= LOCAL
    assert recipe_of(matrix, 128)["shape"]["whole"] == 0.0  # one slab


def test_rows_of_b_in_no_order_take_narrow_slabs_one_after_the_other(monkeypatch):
    monkeypatch.setattr("sparsetile.balance.locality.CACHE_BYTES", 64 * 512)
    generator = torch.Generator().manual_seed(1)
    col = torch.randint(0, 3000, (30_000,), generator=generator)
    row = torch.arange(3000).repeat_interleave(10)
    coo = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(30_000), (3000, 3000))
    shape = recipe_of(as_csr(coo.coalesce()), 512)["shape"]
    assert shape["spread"] > 2.5 and shape["whole"] == 0.0
