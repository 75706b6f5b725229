"""The order by merging from a kernel on a GPU: that of tensor operations on the host.

Without a GPU the kernel runs on the host, thread by thread: tests/emulator/test_merging.py.
"""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.core.streams import settle
from sparsetile.launch import staged
from sparsetile.reorder.device_merging import key_bits, merged_on_device
from sparsetile.reorder.merging import merging
from tests.reorder.merge_matrices import MERGE_MATRICES, merge_matrix

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def large(rows: int, cols: int, entries: int, hub: int = 0) -> st.CSR:
    """Rows that resemble those near them in a random order; the first has ``hub`` entries."""
    draw = torch.Generator().manual_seed(rows)
    row = torch.randint(0, rows, (entries,), generator=draw)
    mixed = torch.randperm(rows, generator=draw)
    column = (mixed[row] + torch.randint(0, 60, (entries,), generator=draw)) % cols
    keys = torch.unique(torch.cat([row * cols + column, torch.arange(hub)]))
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // cols, minlength=rows), 0, out=indptr[1:])
    return st.CSR(indptr, (keys % cols).to(torch.int32), None, (rows, cols))


def test_matrices_on_the_host_are_ordered_by_tensor_operations():
    assert merged_on_device(merge_matrix("random")) is None


@pytest.mark.parametrize(
    ("groups", "bits"), [(2, 8), (128, 8), (129, 9), (1 << 20, 21), (1 << 26, 27), (1 << 29, 27)]
)
def test_a_key_has_bits_to_tell_first_values_apart(groups, bits):
    assert key_bits(groups) == bits


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", MERGE_MATRICES)
def test_the_same_order_as_on_the_host(name):
    csr = merge_matrix(name)
    assert torch.equal(merging(csr.to("cuda")).perm.cpu(), merging(csr).perm)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("rows", "cols", "entries", "hub"),
    [(50_000, 50_000, 400_000, 0), (100_003, 1_200_000, 300_000, 1_000_000),
     (20_000, 1_000, 900_000, 0)],
)  # fmt: skip
def test_the_same_order_of_a_large_matrix_each_time(rows, cols, entries, hub, monkeypatch):
    csr = large(rows, cols, entries, hub).to("cuda")
    found = [merging(csr).perm for _ in range(10)]
    monkeypatch.setattr(staged, "KERNEL_DEVICES", set())
    on_device, on_host = merging(csr).perm, merging(csr.to("cpu")).perm
    assert torch.equal(on_device.cpu(), on_host)
    assert all(torch.equal(each.cpu(), on_host) for each in found)


@pytest.mark.gpu
@needs_gpu
def test_memory_that_holds_anything_gives_the_same_order():
    csr = large(30_000, 30_000, 300_000).to("cuda")
    wanted = merging(csr).perm
    rubbish = torch.full((1 << 26,), -1, dtype=torch.int32, device="cuda")
    settle(rubbish.device)
    del rubbish
    assert torch.equal(merging(csr).perm, wanted)


@pytest.mark.gpu
@needs_gpu
def test_another_stream_gives_the_same_order():
    csr = large(30_000, 30_000, 300_000).to("cuda")
    wanted = merging(csr).perm
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = merging(csr).perm
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)
