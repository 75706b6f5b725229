"""Tiles that kernels pack on a GPU: the same bits as by tensor operations on the host.

Without a GPU the kernel runs on the host, thread by thread: tests/emulator/test_cells.py.
"""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.formats import WCSR, BitTCF, BMat, RowBundles
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.formats.device_cells import CellShape, packed_on_device
from sparsetile.launch import staged
from tests.formats.packed import FORMS, MATRICES, assert_same, matrix

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def test_gpus_have_kernels_and_hosts_have_none():
    assert set(staged.KERNEL_DEVICES) == {"cuda"}
    assert packed_on_device(matrix("full"), None, CellShape(8, 8)) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("form", "options"), FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_the_same_bits_as_on_the_host(form, options, name):
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))):
        there = None if order is None else order.cuda()
        wanted = form.pack(csr, order, **options)
        assert_same(wanted, form.pack(csr.to("cuda"), there, **options))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "form", [BitTCF, WCSR, BMat, RowBundles], ids=["bittcf", "wcsr", "bmat", "bundles"]
)
def test_the_same_bits_of_a_large_matrix_each_time(form, monkeypatch):
    draw = torch.Generator().manual_seed(7)
    rows, cols = 40_001, 70_000
    row = torch.randint(0, rows, (1_500_000,), generator=draw)
    column = (row + torch.randint(0, 400, row.shape, generator=draw)) % cols
    keys = torch.unique(row * cols + column)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    csr = st.CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols)).to("cuda")
    found = [form.pack(csr) for _ in range(3)]
    monkeypatch.setattr(staged, "KERNEL_DEVICES", set())
    wanted = form.pack(csr)  # by tensor operations on the same device
    for each in found:
        assert_same(wanted, each)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MATRICES)
def test_pairs_are_counted_as_on_the_host(name):
    csr = matrix(name)
    for order in (None, torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(3))):
        there = None if order is None else order.cuda()
        for height in (8, 16, 64):
            wanted = distinct_pairs(csr, height, order)
            assert distinct_pairs(csr.to("cuda"), height, there) == wanted
