"""Whole units, longest first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.cases import MATRICES, csr_of

from sparsetile.balance import LongestFirst
from sparsetile.formats import BCSR, Units


def made(lengths: list[int]) -> LongestFirst:
    return LongestFirst.make(Units.from_offsets(torch.tensor([0, *lengths]).cumsum(0)))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_items_are_sorted_and_equal_ones_keep_their_order(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda unit: -lengths[unit])  # stable
    items = made(lengths).items
    assert items.tolist() == [[unit, offsets[unit], lengths[unit], 0] for unit in order]
    assert items.dtype is torch.int32 and items.shape == (len(lengths), 4)


def test_block_rows_are_listed_with_their_first_block_and_how_many_they_have():
    blocks = BCSR.pack(csr_of(MATRICES["one dense row"]()), block=32)
    items = LongestFirst.make(blocks.units()).items.long()
    assert torch.equal(items[:, 1], blocks.block_row_ptr.long()[items[:, 0]])
    assert torch.equal(items[:, 2], blocks.block_row_ptr.diff().long()[items[:, 0]])


def test_the_longest_is_known_and_is_0_without_units():
    assert made([2, 7, 3]).longest == 7
    assert made([]).longest == 0
