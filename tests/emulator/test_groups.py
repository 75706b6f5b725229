"""Windows counted and packed by ``pack_groups``, run on the host, beside tensor operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.engines.tiles.hybrid_cost import long_windows
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from sparsetile.systems.brp import windows as module
from sparsetile.systems.brp.cost import CHOICES, best_groups, bound, every_group, predict_brp
from sparsetile.systems.brp.windows import KernelWindows, TensorWindows, windows_of
from tests.emulator.build import host_compiler
from tests.emulator.test_cells import run_on_host
from tests.host import built_by_kernels, launch_few_blocks
from tests.systems.windows import (
    ALL_MATRICES,
    any_matrix,
    assert_same_counts,
    assert_same_windows,
    orders,
)

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_on_host(monkeypatch, folder)


def request_of(csr: CSR, order: Tensor | None = None, **fields: object) -> Request:
    named = Permutation("given" if order is None else "drawn", order)
    return Request(csr, 128, torch.float32, named, ceilings=H200, **fields)  # type: ignore[arg-type]


def both(csr: CSR, order: Tensor | None) -> tuple[TensorWindows, KernelWindows]:
    return TensorWindows(request_of(csr, order)), KernelWindows(csr, order)


@pytest.mark.parametrize("name", ALL_MATRICES)
def test_windows_are_counted_as_by_tensor_operations(name):
    csr = any_matrix(name)
    for order in orders(csr):
        wanted, found = both(csr, order)
        assert_same_counts(wanted, found)
        assert int(found.short_pairs.sum()) == distinct_pairs(csr, 8, order)


@pytest.mark.parametrize("name", ALL_MATRICES)
def test_the_same_arrays_for_every_f_and_g(name):
    csr = any_matrix(name)
    for order in orders(csr):
        wanted, found = both(csr, order)
        for fixed, group in CHOICES:
            has_group = wanted.grouped(fixed, group)[0] > 0
            number = torch.arange(has_group.numel())
            for kept in (has_group, has_group & (number % 2 == 1), has_group & (number % 3 == 0)):
                assert_same_windows(wanted.pack(fixed, group, kept), found.pack(fixed, group, kept))


def test_the_matrices_have_windows_with_and_without_groups_and_entries_outside():
    found = {name: both(any_matrix(name), None)[1] for name in ALL_MATRICES}
    for fixed, group in CHOICES:
        grouped = [windows.grouped(fixed, group) for windows in found.values()]
        assert any(bool(((tiles > 0) & (outside > 0)).any()) for tiles, outside in grouped)
        assert any(bool(((tiles > 0) & (outside == 0)).any()) for tiles, outside in grouped)
        assert any(bool((tiles > 0).any() and (tiles == 0).any()) for tiles, outside in grouped)


def test_no_window_need_be_kept():
    csr = any_matrix("shared columns")
    found = KernelWindows(csr, None)
    assert found.pack(1, 4, torch.zeros_like(found.entries, dtype=torch.bool)) is None


def test_lists_may_stay_on_the_device(monkeypatch):
    csr = any_matrix("shared columns")
    for order in orders(csr):
        wanted = KernelWindows(csr, order)
        kept = wanted.grouped(2, 2)[0] > 0
        packed = wanted.pack(2, 2, kept)
        with monkeypatch.context() as patch:
            patch.setattr(module, "HOST_UNITS", 3)
            found = KernelWindows(csr, order)
            assert_same_counts(wanted, found)
            assert_same_windows(packed, found.pack(2, 2, kept))


def test_more_entries_than_the_device_has_threads_take_turns(monkeypatch):
    launch_few_blocks(monkeypatch)
    csr = any_matrix("shared columns")
    wanted, found = both(csr, None)
    assert_same_counts(wanted, found)
    kept = wanted.grouped(4, 2)[0] > 0
    assert_same_windows(wanted.pack(4, 2, kept), found.pack(4, 2, kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_choices_and_predictions_are_the_same(dtype):
    for name in ALL_MATRICES:
        csr = any_matrix(name)
        for order in orders(csr):
            wanted, found = request_of(csr, order), request_of(csr, order)
            wanted, found = wanted.changed(dtype=dtype), found.changed(dtype=dtype)
            of_wanted = bound(wanted), predict_brp(wanted)[1], long_windows(wanted)
            splits = [best_groups(wanted)]
            kept = [every_group(wanted, *choice) for choice in CHOICES]
            with built_by_kernels("cpu"):
                assert isinstance(windows_of(found), KernelWindows)
                assert (bound(found), predict_brp(found)[1], long_windows(found)) == of_wanted
                splits.append(best_groups(found))
                assert [split.seconds for split in splits] == [splits[0].seconds] * 2
                assert torch.equal(splits[0].kept, splits[1].kept)
                for choice, marked in zip(CHOICES, kept, strict=True):
                    assert torch.equal(every_group(found, *choice), marked)


@pytest.mark.parametrize("ablation", [None, "mixed", "1x4", "2x2", "8x2", "atomic"])
def test_a_build_has_the_same_tensors(ablation):
    for name in ("shared columns", "a hub", "full windows", "one row"):
        csr = any_matrix(name)
        for order in orders(csr):
            wanted = SYSTEMS["brp"].build(request_of(csr, order, ablation=ablation))
            with built_by_kernels("cpu"):
                found = SYSTEMS["brp"].build(request_of(csr, order, ablation=ablation))
            assert found.recipe == wanted.recipe and found.choices == wanted.choices
            for key, tensor in wanted.tensors.items():
                assert tensor.dtype is found.tensors[key].dtype, key
                assert torch.equal(tensor, found.tensors[key]), key


def test_a_matrix_without_entries_has_nothing_to_launch_for():
    csr = CSR(torch.zeros(21, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), None, (20, 9))
    with built_by_kernels("cpu"):
        assert isinstance(windows_of(request_of(csr)), TensorWindows)
        assert SYSTEMS["brp"].build(request_of(csr, ablation="1x4")).tensors


def test_pairs_are_left_uncounted_where_predictions_may_not_count():
    csr = any_matrix("shared columns")
    asked = request_of(csr, counts_pairs=False)
    estimate = asked.counted_pairs(8)
    with built_by_kernels("cpu"):
        windows_of(asked)
    assert asked.counted_pairs(8) == estimate != distinct_pairs(csr, 8)
