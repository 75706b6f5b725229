"""Tiles packed by ``pack_cells``, run on the host thread by thread, beside tensor operations."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.formats import WCSR, BitTCF, BMat, RowBundles, device_bundles, device_cells
from sparsetile.formats.base import Format
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.launch import staged
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.formats.decoding import VARIANTS
from tests.formats.packed import FORMS, MATRICES, assert_same, matrix
from tests.host import built_by_kernels, launch_few_blocks

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


def run_on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Launches of the packer run on the host."""

    load_on_host(monkeypatch, folder, staged)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_on_host(monkeypatch, folder)


@contextlib.contextmanager
def kernels() -> Iterator[list[int]]:
    """Kernels build formats of matrices on the host; yields the stages that were launched."""
    stages: list[int] = []
    launch = staged.StagedKernel.launch

    def noted(kernel: staged.StagedKernel, stage: int, work: int) -> None:
        stages.append(stage)
        launch(kernel, stage, work)

    with built_by_kernels("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged.StagedKernel, "launch", noted)
        yield stages


def both(
    form: type[Format], csr: CSR, order: Tensor | None, options: dict[str, Any]
) -> tuple[Format, Format]:
    """The format by tensor operations, and by kernels."""
    wanted = form.pack(csr, order, **options)
    with kernels() as stages:
        found = form.pack(csr, order, **options)
    assert bool(stages) == bool(csr.nnz)  # without entries there is nothing to launch for
    return wanted, found


@pytest.mark.parametrize(("form", "options"), FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_kernels_pack_the_same_bits(form, options, name):
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))):
        assert_same(*both(form, csr, order, options))


def test_columns_of_a_row_may_come_in_any_order():
    csr = matrix("a few hundred rows")
    row = csr.row_ids()
    mixed = torch.randperm(csr.nnz, generator=torch.Generator().manual_seed(5))
    mixed = mixed[torch.argsort(row[mixed], stable=True)]
    csr = dataclasses.replace(csr, indices=csr.indices[mixed].contiguous())
    for form, options in ((BitTCF, {"stack": 2, "even": True}), (WCSR, {}), (BMat, {})):
        assert_same(*both(form, csr, None, options))


def test_keys_of_32_and_of_64_bits_give_the_same(constants):
    csr = matrix("a few hundred rows")
    narrow = both(BMat, csr, None, {"stack": 2})[1]
    constants(device_cells, NARROW_KEYS=0)
    assert_same(narrow, both(BMat, csr, None, {"stack": 2})[1])


def test_more_threads_than_the_device_holds_take_turns(monkeypatch):
    launch_few_blocks(monkeypatch)
    assert_same(*both(WCSR, matrix("a few hundred rows"), None, {"height": 16}))


def test_counts_of_bmat_that_come_with_its_tiles_are_those_of_its_bits():
    csr = matrix("a few hundred rows")
    for options in ({}, {"stack": 2}):
        wanted, found = both(BMat, csr, None, options)
        assert isinstance(wanted, BMat) and isinstance(found, BMat)
        assert found.distinct == wanted.distinct
        assert found.word_ptr.dtype is wanted.word_ptr.dtype
        assert torch.equal(found.word_ptr, wanted.word_ptr)
        tile = torch.arange(found.tile_count + 1)
        assert torch.equal(found.first_values(tile), wanted.first_values(tile))


@pytest.mark.parametrize("name", MATRICES)
def test_pairs_are_counted_as_on_the_host(name):
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(4))):
        for height in (8, 64):
            wanted = distinct_pairs(csr, height, order)
            with kernels() as stages:
                assert distinct_pairs(csr, height, order) == wanted
            assert bool(stages) == bool(csr.nnz)


@pytest.mark.parametrize("options", VARIANTS["bundles"].values(), ids=VARIANTS["bundles"])
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "far columns"])
def test_bundles_of_sorted_pairs_are_the_same(name, options, constants):
    constants(device_bundles, MOST_BUNDLED=0)  # as if there were too many entries
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(6))):
        assert_same(*both(RowBundles, csr, order, options))
