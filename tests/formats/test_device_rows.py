"""Rows that kernels count, list and bundle on a GPU: the same bits as by tensor operations there.

Without a GPU the kernels run on the host, thread by thread: tests/emulator/test_rows.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsetile.balance import SegmentSchedule
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.rows.lengths import first_columns
from sparsetile.formats import RowBundles
from sparsetile.formats.device_bundles import bundled_on_device
from sparsetile.formats.units import row_units
from sparsetile.intake.csr import CSR
from sparsetile.launch import staged
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from tests.formats.packed import assert_same
from tests.formats.row_lists import (
    LIMITS,
    LISTS,
    assert_same_schedule,
    assert_same_tally,
    matrix,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def test_gpus_have_kernels_and_hosts_have_none():
    assert set(staged.KERNEL_DEVICES) == {"cuda"}
    csr = matrix("short")
    assert row_units(csr).count_shared(csr.indices, 1.3) is None
    assert bundled_on_device(csr, None, 1.0, 1, 1) is None


def orders(csr: CSR) -> tuple[Tensor | None, ...]:
    draw = torch.Generator().manual_seed(2)
    return None, torch.randperm(csr.shape[0], generator=draw).to(csr.device)


@pytest.fixture
def without(constants) -> Callable[[bool], None]:
    """Build by tensor operations, or by kernels again."""

    def switch(away: bool) -> None:
        constants(staged, KERNEL_DEVICES=set() if away else {"cuda"})

    return switch


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", LISTS)
def test_counts_are_the_same(name, without):
    csr = matrix(name).to("cuda")
    for order in orders(csr):
        without(True)
        wanted = row_units(csr, order)
        assert wanted.tally is not None
        bundles = RowBundles.pack(csr, order, min_sharing=1.3)
        without(False)
        found = row_units(csr, order)
        shared = found.count_shared(csr.indices, 1.3)
        assert_same_tally(wanted.tally, found.tally)
        if csr.nnz:
            assert shared == (bundles.bundle_count, bundles.entries.numel(), bundles.distinct)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_items_and_first_columns_are_the_same(name, limits, without):
    csr = matrix(name).to("cuda")
    for order in orders(csr):
        without(True)
        wanted = SegmentSchedule.make(row_units(csr, order), **limits)
        heads = first_columns(wanted, csr.indices)
        without(False)
        found = SegmentSchedule.make(row_units(csr, order), **limits)
        assert_same_schedule(wanted, found)
        assert torch.equal(heads, first_columns(found, csr.indices))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("min_sharing", [1.0, 1.02, 1.3, 100.0])
@pytest.mark.parametrize("name", LISTS)
def test_bundles_and_their_items_are_the_same(name, min_sharing, without):
    csr = matrix(name).to("cuda")
    for order in orders(csr):
        without(True)
        wanted = RowBundles.pack(csr, order, min_sharing=min_sharing)
        items = [SegmentSchedule.make(wanted.units(), **limits) for limits in LIMITS]
        without(False)
        found = RowBundles.pack(csr, order, min_sharing=min_sharing)
        assert_same(wanted, found)
        for schedule, limits in zip(items, LIMITS, strict=True):
            assert_same_schedule(schedule, SegmentSchedule.make(found.units(), **limits))


def large(rows: int, cols: int, entries: int, power: float, near: int) -> CSR:
    """Rows of all lengths; columns at random, or near each other in four rows."""
    draw = torch.Generator().manual_seed(rows)
    row = (rows * torch.rand(entries, generator=draw) ** power).long().clamp_(max=rows - 1)
    row = torch.randperm(rows, generator=draw)[row]
    column = torch.randint(0, near or cols, (entries,), generator=draw)
    keys = torch.unique(row * cols + (column + (row // 4 * 7 if near else 0)) % cols)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    return CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols)).to("cuda")


def assert_same_build(wanted: BuiltSystem, found: BuiltSystem) -> None:
    assert wanted.recipe == found.recipe and wanted.choices == found.choices
    assert wanted.tensors.keys() == found.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert tensor.dtype is found.tensors[name].dtype, name
        assert torch.equal(tensor, found.tensors[name]), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("system", ["csr", "brp"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((20_003, 20_000, 200_000, 6.0, 0), id="hubs"),
        pytest.param((8191, 9000, 500_000, 1.0, 90), id="bundles"),
        pytest.param((6000, 6000, 2_000_000, 1.0, 700), id="long bundles"),
        pytest.param((300_000, 1000, 900_000, 2.0, 0), id="many rows"),
        pytest.param((1500, 1500, 9000, 1.0, 0), id="few rows"),
    ],
)
def test_builds_are_the_same_each_time(system, shape, without):
    csr = large(*shape)
    for order in orders(csr):
        for n, dtype in ((32, torch.float32), (128, torch.float32), (64, torch.float16)):
            request = Request(csr, n, dtype, Permutation("given", order))
            without(True)
            wanted = SYSTEMS[system].build(request)
            without(False)
            for _ in range(2):
                assert_same_build(wanted, SYSTEMS[system].build(dataclasses.replace(request)))
