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

from sparsetile.formats import WCSR, BitTCF, BMat, RowBundles
from sparsetile.formats.base import Format
from sparsetile.formats.device_cells import CellKernels, offer_kernels, packed_on_device
from sparsetile.formats.pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.kernels import KernelSpec
from sparsetile.systems.shared import cell_packer, staged
from tests.emulator.build import HostKernel, host_compiler
from tests.formats.packed import FORMS, MATRICES, assert_same, matrix

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


def run_on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Launches of the packer run on the host."""

    def load(spec: KernelSpec, config: Any, *rest: Any) -> HostKernel:
        return HostKernel(spec, config, folder)

    monkeypatch.setattr(KernelSpec, "load", load)
    monkeypatch.setattr(staged, "device_index", lambda device: 0)
    monkeypatch.setattr(staged, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(staged, "ensure_cuda_context", lambda device: None)
    monkeypatch.setattr(staged, "current_stream_handle", lambda device: 0)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_on_host(monkeypatch, folder)


@contextlib.contextmanager
def kernels() -> Iterator[list[Any]]:
    """Kernels are offered for matrices on the host; yields what they were asked for."""
    asked = []

    def pack(csr: CSR, order: Tensor | None, shape: Any) -> Any:
        asked.append(shape)
        return cell_packer.pack_cells(csr, order, shape)

    def sort(csr: CSR, order: Tensor | None, height: int) -> Any:
        asked.append(height)
        return cell_packer.sort_pairs(csr, order, height)

    offer_kernels("cpu", CellKernels(pack, sort))
    try:
        yield asked
    finally:
        offer_kernels("cpu", None)


def both(
    form: type[Format], csr: CSR, order: Tensor | None, options: dict[str, Any]
) -> tuple[Format, Format]:
    """The format by tensor operations, and by kernels."""
    wanted = form.pack(csr, order, **options)
    with kernels() as asked:
        found = form.pack(csr, order, **options)
    assert bool(asked) == bool(csr.nnz)  # without entries there is nothing to launch for
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


def test_keys_of_32_and_of_64_bits_give_the_same(monkeypatch):
    csr = matrix("a few hundred rows")
    narrow = both(BMat, csr, None, {"stack": 2})[1]
    monkeypatch.setattr(cell_packer, "NARROW_KEYS", 0)
    assert_same(narrow, both(BMat, csr, None, {"stack": 2})[1])


def test_more_threads_than_the_device_holds_take_turns(monkeypatch):
    monkeypatch.setattr(staged, "processors", lambda device: 1)
    monkeypatch.setattr("sparsetile.kernels.stages._BLOCKS", 1)
    assert_same(*both(WCSR, matrix("a few hundred rows"), None, {"height": 16}))


def test_counts_of_bmat_that_come_with_its_tiles_are_those_of_its_bits():
    csr = matrix("a few hundred rows")
    for options in ({}, {"even": False}, {"stack": 2}):
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
            with kernels() as asked:
                assert distinct_pairs(csr, height, order) == wanted
            assert asked == ([height] if csr.nnz else [])


@pytest.mark.parametrize("options", RowBundles.variants.values(), ids=RowBundles.variants)
@pytest.mark.parametrize("name", [name for name in MATRICES if name != "far columns"])
def test_bundles_are_the_same(name, options):
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(6))):
        assert_same(*both(RowBundles, csr, order, options))


def test_an_offer_can_be_taken_back():
    csr = matrix("one row")
    with kernels():
        assert packed_on_device(csr, None, cell_packer.CellShape(8, 8)) is not None
    assert packed_on_device(csr, None, cell_packer.CellShape(8, 8)) is None
