"""The order by merging from ``merge_rows``, run on the host, beside tensor operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsetile.intake.csr import CSR
from sparsetile.launch import staged
from sparsetile.reorder import device_merging
from sparsetile.reorder.device_merging import merged_on_device
from sparsetile.reorder.merging import merging
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import built_by_kernels, launch_few_blocks
from tests.reorder.merge_matrices import MERGE_MATRICES, merge_matrix

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, staged)


def assert_same(csr: CSR) -> None:
    """Kernels give the order that tensor operations give, unless there is nothing to merge."""
    wanted = merging(csr).perm
    with built_by_kernels("cpu"):
        found = merged_on_device(csr)
        assert (found is None) == (int((csr.row_lengths() > 0).sum()) < 2)
        order = merging(csr).perm
    assert wanted is not None and order is not None
    assert torch.equal(order, wanted) and (found is None or torch.equal(found, wanted))


@pytest.mark.parametrize("name", MERGE_MATRICES)
def test_kernels_give_the_same_order(name: str):
    assert_same(merge_matrix(name))


@pytest.mark.parametrize("rows", [4, 31, 32, 33, 63, 64, 65, 127, 1023, 1024, 1025])
def test_groups_of_any_number_are_merged(rows: int):
    draw = torch.Generator().manual_seed(rows)
    columns = torch.randint(0, 40, (rows, 3), generator=draw).sort(1).values.to(torch.int32)
    columns += torch.arange(3, dtype=torch.int32) * 40
    assert_same(CSR(torch.arange(rows + 1) * 3, columns.flatten(), None, (rows, 120)))


def test_more_threads_than_the_device_holds_take_turns(monkeypatch: pytest.MonkeyPatch):
    launch_few_blocks(monkeypatch)
    for name in ("random", "equal rows", "rows of a thousand"):
        assert_same(merge_matrix(name))


def test_too_many_keys_are_sorted_by_tensor_operations(constants):
    constants(device_merging, MOST_KEYS=6 * 1201)
    with built_by_kernels("cpu"):
        assert merged_on_device(merge_matrix("random")) is not None
        constants(device_merging, MOST_KEYS=6 * 1100)
        assert merged_on_device(merge_matrix("random")) is None
