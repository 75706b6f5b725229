"""Windows of ``brp`` that the kernel counts and packs on a GPU: the same bits as on the host.

Without a GPU the kernel runs on the host, thread by thread: tests/emulator/test_groups.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.launch import staged
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from sparsetile.systems.brp.cost import CHOICES
from sparsetile.systems.brp.windows import KernelWindows, TensorWindows, windows_of
from tests.systems.windows import (
    ALL_MATRICES,
    any_matrix,
    assert_same_counts,
    assert_same_windows,
    orders,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def request_of(csr: st.CSR, order: Tensor | None = None, ablation: str | None = None) -> Request:
    named = Permutation("given", order)
    return Request(csr, 32, torch.float32, named, ablation=ablation, ceilings=H200)


def there(order: Tensor | None) -> Tensor | None:
    return None if order is None else order.cuda()


def test_the_kernel_is_for_gpus_alone():
    assert set(staged.KERNEL_DEVICES) == {"cuda"}
    assert isinstance(windows_of(request_of(any_matrix("full"))), TensorWindows)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ALL_MATRICES)
def test_the_same_bits_as_on_the_host(name):
    csr = any_matrix(name)
    for order in orders(csr):
        wanted = TensorWindows(request_of(csr, order))
        found = windows_of(request_of(csr.to("cuda"), there(order)))
        assert isinstance(found, KernelWindows)
        assert_same_counts(wanted, found)
        for fixed, group in CHOICES:
            has_group = wanted.grouped(fixed, group)[0] > 0
            for kept in (has_group, has_group & (torch.arange(has_group.numel()) % 2 == 1)):
                assert_same_windows(wanted.pack(fixed, group, kept), found.pack(fixed, group, kept))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [40_001, 120_003], ids=["lists on the host", "on the device"])
def test_the_same_bits_of_a_large_matrix_each_time(rows):
    draw, cols = torch.Generator().manual_seed(7), 70_000
    row = torch.randint(0, rows, (1_500_000,), generator=draw)
    row[:90_000] = 777  # a row that is longer than all others
    near = (row + torch.randint(0, 400, row.shape, generator=draw)) % cols
    column = torch.where(row == 777, torch.randint(0, cols, row.shape, generator=draw), near)
    keys = torch.unique(row * cols + column)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    csr = st.CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols)).to("cuda")
    for order in (None, torch.randperm(rows, generator=draw).cuda()):
        wanted = TensorWindows(request_of(csr, order))
        for _ in range(3):
            found = KernelWindows(csr, order)
            assert_same_counts(wanted, found)
            for fixed, group in ((1, 4), (2, 2), (4, 2)):
                kept = found.grouped(fixed, group)[0] > 0
                assert_same_windows(
                    wanted.pack(fixed, group, kept.cuda()), found.pack(fixed, group, kept)
                )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ablation", [None, "mixed", "1x4", "2x2", "8x2", "atomic"])
def test_a_build_has_the_tensors_of_tensor_operations(ablation, monkeypatch):
    for name in ("shared columns", "a hub", "half full", "full windows"):
        csr = any_matrix(name).to("cuda")
        for order in orders(csr):
            found = SYSTEMS["brp"].build(request_of(csr, there(order), ablation))
            with monkeypatch.context() as patch:
                patch.setattr(staged, "KERNEL_DEVICES", set())
                wanted = SYSTEMS["brp"].build(request_of(csr, there(order), ablation))
            assert found.recipe == wanted.recipe and found.choices == wanted.choices
            for key, tensor in wanted.tensors.items():
                assert found.tensors[key].is_cuda and tensor.dtype is found.tensors[key].dtype, key
                assert torch.equal(tensor, found.tensors[key]), key
