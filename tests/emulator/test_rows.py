"""Rows counted and listed by ``list_rows``, run on the host thread by thread, beside tensor
operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.balance import SegmentSchedule, segments
from sparsetile.engines.rows.lengths import first_columns
from sparsetile.formats import RowBundles, units
from sparsetile.formats.units import RowUnits, row_units
from sparsetile.intake.csr import CSR
from tests.emulator.build import host_compiler
from tests.emulator.test_cells import run_on_host
from tests.formats.packed import assert_same
from tests.formats.row_lists import (
    LIMITS,
    LISTS,
    assert_same_schedule,
    assert_same_tally,
    matrix,
)
from tests.host import built_by_kernels, launch_few_blocks

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path, constants) -> None:
    run_on_host(monkeypatch, folder)
    constants(units, HOST_UNITS=-1)  # lists stay where A is


def orders(csr: CSR) -> tuple[Tensor | None, ...]:
    return None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", LISTS)
def test_kernels_count_lengths_as_tensor_operations_do(name):
    csr = matrix(name)
    for order in orders(csr):
        wanted = row_units(csr, order).tally
        with built_by_kernels("cpu"):
            assert_same_tally(wanted, row_units(csr, order).tally)


@pytest.mark.parametrize("min_sharing", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("name", LISTS)
def test_kernels_count_the_windows_that_share_columns(name, min_sharing):
    for cols in (4096, 64) if name in ("short", "around a window") else (4096,):
        csr = matrix(name, cols)
        for order in orders(csr):
            bundles = RowBundles.pack(csr, order, min_sharing=min_sharing)
            wanted = (bundles.bundle_count, bundles.entries.numel(), bundles.distinct)
            with built_by_kernels("cpu"):
                rows = row_units(csr, order)
                found = rows.count_shared(csr.indices, min_sharing)
            assert found == (wanted if csr.nnz else None)
            if csr.nnz:
                assert_same_tally(row_units(csr, order).tally, rows.tally)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_kernels_list_the_same_items(name, limits):
    csr = matrix(name)
    for order in orders(csr):
        wanted = SegmentSchedule.make(row_units(csr, order), **limits)
        with built_by_kernels("cpu"):
            found = SegmentSchedule.make(row_units(csr, order), **limits)
        assert_same_schedule(wanted, found)
        assert (found.longest is None) == (not csr.shape[0])


@pytest.mark.parametrize("min_sharing", [1.0, 1.02, 1.3, 100.0])
@pytest.mark.parametrize("name", LISTS)
def test_kernels_pack_the_same_bundles(name, min_sharing):
    for cols in (4096, 64) if name in ("short", "around a window") else (4096,):
        csr = matrix(name, cols)
        for order in orders(csr):
            wanted = RowBundles.pack(csr, order, min_sharing=min_sharing)
            with built_by_kernels("cpu"):
                found = RowBundles.pack(csr, order, min_sharing=min_sharing)
            assert_same(wanted, found)


SHARING = (1.0, 1.02, 100.0)


# Every pair of two of the three is met: the third changes along.
@pytest.mark.parametrize("number", range(len(LIMITS)), ids=lambda number: str(LIMITS[number]))
@pytest.mark.parametrize(
    "shift, name", enumerate(["no row", "one hub", "short", "hubs", "shared columns"])
)
def test_kernels_list_bundles_and_rows(shift, name, number):
    limits, min_sharing = LIMITS[number], SHARING[(shift + number) % len(SHARING)]
    bundles = RowBundles.pack(matrix(name), min_sharing=min_sharing)
    wanted = SegmentSchedule.make(bundles.units(), **limits)
    with built_by_kernels("cpu"):
        found = SegmentSchedule.make(bundles.units(), **limits)
    assert_same_schedule(wanted, found)
    alone = (bundles.row_indptr, bundles.loose[:0], bundles.indptr)
    wanted = SegmentSchedule.make(RowUnits(*alone), **limits)
    with built_by_kernels("cpu"):
        found = SegmentSchedule.make(RowUnits(*alone), **limits)
    assert_same_schedule(wanted, found)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_kernels_find_the_same_first_columns(name, limits):
    csr = matrix(name)
    schedule = SegmentSchedule.make(row_units(csr), **limits)
    wanted = first_columns(schedule, csr.indices)
    with built_by_kernels("cpu"):
        found = first_columns(schedule, csr.indices)
    assert found.dtype is wanted.dtype and torch.equal(found, wanted)


def test_more_threads_than_the_device_holds_take_turns(monkeypatch):
    launch_few_blocks(monkeypatch, 2)
    csr = matrix("hubs")
    wanted = SegmentSchedule.make(row_units(csr), **LIMITS[4])
    bundles = RowBundles.pack(csr, min_sharing=1.02)
    heads = first_columns(wanted, csr.indices)
    with built_by_kernels("cpu"):
        rows = row_units(csr)
        counted = rows.count_shared(csr.indices, 1.02)
        assert_same_schedule(wanted, SegmentSchedule.make(rows, **LIMITS[4]))
        assert torch.equal(heads, first_columns(wanted, csr.indices))
    assert counted == (bundles.bundle_count, bundles.entries.numel(), bundles.distinct)
    assert_same_tally(row_units(csr).tally, rows.tally)


def test_many_pieces_are_listed_without_kernels_if_they_are_not_counted(constants):
    csr = matrix("hubs")
    with built_by_kernels("cpu"):
        constants(segments, HOST_PIECES=3)
        assert SegmentSchedule.make(row_units(csr), max_length=40).longest is None
        for counted in (64, 4096):
            assert SegmentSchedule.make(row_units(csr), max_length=counted).longest is not None


def test_a_tree_of_several_levels_is_made_by_kernels():
    lengths = torch.tensor([3, 70_000, 0, 64 * 16, 64 * 16 + 1, 64, 65, 200_000, 1000])
    csr = CSR(
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        torch.arange(int(lengths.sum()), dtype=torch.int32), None, (9, int(lengths.sum())),
    )  # fmt: skip
    for limits in ({"max_length": 64}, {"max_length": 64, "wide_length": 16, "shared_length": 24}):
        wanted = SegmentSchedule.make(row_units(csr), **limits)
        with built_by_kernels("cpu"):
            rows = row_units(csr)
            found = SegmentSchedule.make(rows, **limits)
        assert rows.cut_at(64) is not None
        assert_same_schedule(wanted, found)


@pytest.mark.parametrize("shared", [32, 40, 64])
def test_pieces_of_rows_that_may_be_in_two_sections_are_made_on_the_host(shared):
    csr = matrix("hubs")
    limits = {"max_length": 64, "wide_length": 16, "shared_length": shared}
    wanted = SegmentSchedule.make(row_units(csr), **limits)
    with built_by_kernels("cpu"):
        assert_same_schedule(wanted, SegmentSchedule.make(row_units(csr), **limits))
