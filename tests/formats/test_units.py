"""Units of work, made from offsets and from rows."""

from __future__ import annotations

import pytest
import torch

from sparsetile.formats import Units, row_units
from sparsetile.formats.units import RowUnits
from tests.contracts.cases import MATRICES, csr_of


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_give_consecutive_units(dtype):
    units = Units.from_offsets(torch.tensor([0, 3, 3, 7], dtype=dtype))
    assert units.count == 3 and units.label.tolist() == [0, 1, 2]
    assert units.begin.tolist() == [0, 3, 3] and units.length.tolist() == [3, 0, 4]
    assert not bool(units.bundled.any())
    assert units.offsets.dtype is units.begin.dtype is torch.int64


def test_units_that_are_chosen_are_not_consecutive():
    csr = csr_of(MATRICES["odd sizes"]())
    every, some = row_units(csr), row_units(csr, torch.tensor([4, 2]))
    assert every.offsets is csr.indptr and some.offsets is None
    assert some.label.tolist() == [4, 2]
    assert some.length.tolist() == csr.row_lengths()[[4, 2]].tolist()


@pytest.mark.parametrize(
    "offsets", [torch.zeros(0).long(), torch.zeros(2, 2).long(), torch.ones(3)]
)
def test_rejects_invalid_offsets(offsets):
    with pytest.raises(ValueError) as caught:
        Units.from_offsets(offsets)
    assert str(caught.value) == (
        f"Units.from_offsets: offsets must be integers [units + 1], got {offsets.dtype} of shape "
        f"{tuple(offsets.shape)}. Pass the offsets of a format."
    )


@pytest.mark.parametrize("limit", [0, 16, 31, 32, 256, 5000])
def test_the_tally_counts_lengths_and_knows_any_other(limit):
    length = torch.tensor([0, 3, 16, 17, 33, 96, 97, 300, 300, 2000])
    begin = torch.arange(10) * 7
    units = Units(torch.arange(10), begin, length, torch.arange(10) % 4 == 0)
    tally = units.tally
    assert (tally.longest, tally.total) == (2000, int(length.sum()))
    assert (tally.end, tally.bundled) == (2063, 3)
    assert units.longer(limit) == int((length > limit).sum())
    assert units.longer_total(limit) == int(length[length > limit].sum())
    assert units.longest_upto(limit) == int(length[length <= limit].max())


def test_rows_behind_bundles_are_listed_when_asked_for():
    csr = csr_of(MATRICES["odd sizes"]())
    rows, bundle_ptr = torch.tensor([4, 2, 0]), torch.tensor([0, 8, 8, 20])
    units = RowUnits(csr.indptr, rows, bundle_ptr)
    assert (units.count, units.bundle_count, units.row_count) == (6, 3, 3)
    parts = (Units.from_offsets(bundle_ptr), row_units(csr, rows))
    for name in ("label", "begin", "length"):
        wanted = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(getattr(units, name), wanted), name
    assert units.bundled.tolist() == [True] * 3 + [False] * 3 and units.offsets is None
    assert units.tally.bundled == 3 and units.near() is units


def test_the_tally_of_no_unit_is_zero():
    units = Units.from_offsets(torch.zeros(1, dtype=torch.int64))
    assert (units.tally.longest, units.tally.total, units.tally.end, units.tally.bundled) == (
        0,
    ) * 4
    assert units.longer(0) == units.longer_total(32) == 0
