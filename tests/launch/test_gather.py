"""Rows of a dense matrix that ranks pack: on a GPU, and on the host thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.launch import gather
from sparsetile.launch.gather import gather_rows, gathers
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host

BYTES = (16, 32, 48, 256, 512, 1040)


def rows_of(count: int, of: int) -> Tensor:
    return torch.randint(of, (count,), generator=torch.Generator().manual_seed(count)).int()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, gather)


@pytest.mark.skipif(host_compiler() is None, reason="no g++ here")
@pytest.mark.parametrize("size", BYTES)
@pytest.mark.parametrize("count", [1, 31, 33, 130])
def test_rows_come_in_their_order(on_host: None, size: int, count: int):
    B = torch.randint(0, 255, (40, size), dtype=torch.uint8)
    ids = rows_of(count, 40)
    out = torch.full((count + 1, size), 7, dtype=torch.uint8)
    gather_rows(B, ids, out[:count])
    assert torch.equal(out[:count], B[ids.long()]) and bool((out[count] == 7).all())


@pytest.mark.skipif(host_compiler() is None, reason="no g++ here")
def test_strided_matrices_and_nothing_to_do(on_host: None):
    wide = torch.randn(40, 64)
    B, out = wide[:, 16:48], torch.full((9, 96), torch.nan)
    ids = rows_of(9, 40)
    gather_rows(B, ids, out[:, 32:64])
    assert torch.equal(out[:, 32:64], B[ids.long()]) and bool(out[:, :32].isnan().all())
    gather_rows(B, ids[:0], out[:0, :32])
    gather_rows(B[:, :0], ids, out[:, :0])


def test_what_it_takes():
    B, out = torch.randn(4, 8), torch.empty(2, 8)
    assert not gathers(B, out), "a GPU's matrices alone"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [8, 24, 128, 130, 512])
def test_rows_on_a_gpu(dtype: torch.dtype, n: int):
    B = torch.randn(1000, n, device="cuda").to(dtype)
    ids = rows_of(777, 1000).cuda()
    larger = torch.full((778, n), torch.nan, dtype=dtype, device="cuda")
    out = larger[:777]
    if n * dtype.itemsize % 16:
        assert not gathers(B, out)
        return
    assert gathers(B, out) and not gathers(B[:, 1:], out[:, 1:])
    gather_rows(B, ids, out)
    assert torch.equal(out, B[ids.long()]) and bool(larger[777].isnan().all())
