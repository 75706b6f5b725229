"""Layers of few tokens, run on the host thread by thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.launch.interface import Epilogue
from sparsetile.systems.bcsr import few
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, few, machine=h200)


def weight(rows: int, cols: int, unit: int, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Lists and blocks of a weight with two of three blocks, and the same as a dense matrix."""
    high, wide = rows // unit, cols // unit
    kept = (torch.arange(high)[:, None] + torch.arange(wide)) % 3 != 1
    columns = kept.nonzero()[:, 1].to(torch.int32)
    pointers = torch.zeros(high + 1, dtype=torch.int32)
    pointers[1:] = kept.sum(1).cumsum(0)
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(-4, 5, (columns.numel(), unit, unit), generator=generator).to(dtype)
    dense = torch.zeros(high, wide, unit, unit, dtype=torch.float64)
    dense[kept] = blocks.double()
    return (pointers, columns), blocks, dense.permute(0, 2, 1, 3).reshape(rows, cols)


@pytest.mark.parametrize("unit, dtype, out", [(64, BF16, BF16), (64, F16, F32), (32, F16, F16)])
def test_up_to_sixteen_tokens_with_bias_and_relu(unit, dtype, out):
    rows, cols = 6 * unit, 7 * unit
    lists, blocks, dense = weight(rows, cols, unit, dtype)
    layer = few.FewTokens(rows, cols, blocks.shape[0], unit)
    bias = torch.arange(rows) % 64 / 8 - 3  # exact in every type
    for tokens, given in ((1, dtype), (5, F32), (16, out)):
        X = torch.randint(-2, 3, (tokens, cols)).to(dtype)
        Y = torch.full((tokens, rows), torch.nan, dtype=out)
        layer.run(lists, blocks, X, Y, Epilogue(alpha=0.5, row_bias=bias.to(given), relu=True))
        wanted = torch.relu(X.double() @ dense.T / 2 + bias)
        assert torch.equal(Y, wanted.to(out))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("paired", [False, True])
def test_blocks_of_fp8_are_multiplied_exactly(dtype, paired):
    unit, eight = 64, torch.float8_e4m3fn
    rows, cols = 4 * unit, 3 * unit
    lists, blocks, dense = weight(rows, cols, unit, F32)
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-10, 2, (len(blocks),), generator=generator).to(torch.int8)
    every = torch.arange(256, dtype=torch.uint8)  # numbers of E4M3, subnormal ones too
    every = every[(every & 127) < 64].view(eight)
    drawn = torch.randint(0, len(every), blocks.shape, generator=generator)
    blocks = every.view(torch.uint8)[drawn].view(eight)
    wide = torch.ldexp(blocks.double(), exponents.double().view(-1, 1, 1)).to(dtype).double()
    dense.zero_()
    for row in range(rows // unit):
        for at in range(int(lists[0][row]), int(lists[0][row + 1])):
            first = int(lists[1][at]) * unit
            dense[row * unit : (row + 1) * unit, first : first + unit] = wide[at]
    layer = few.FewTokens(rows, cols, len(blocks), unit, paired=paired)
    for tokens in (1, 16):
        X = torch.randint(-2, 3, (tokens, cols)).to(dtype)
        Y = torch.full((tokens, layer.rows), torch.nan, dtype=dtype)
        layer.run(lists, blocks, X, Y, Epilogue(), exponents=exponents)
        wanted = X.double() @ dense.T
        if paired:
            gate, up = wanted.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(Y, wanted.to(dtype), rtol=1e-2 if paired else 4e-3, atol=1e-6)


def test_gate_and_up_of_a_swiglu_in_one_product():
    unit, dtype = 64, BF16
    rows, cols = 2 * 4 * unit, 5 * unit
    lists, blocks, dense = weight(rows, cols, unit, dtype)
    layer = few.FewTokens(rows, cols, blocks.shape[0], unit, paired=True)
    X = torch.randint(-1, 2, (3, cols)).to(dtype)
    Y = torch.full((3, rows // 2), torch.nan, dtype=F32)
    layer.run(lists, blocks, X, Y, Epilogue(alpha=0.0625))
    gate, up = (X.double() @ dense.T / 16).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    assert torch.allclose(Y.double(), wanted, rtol=1e-5, atol=1e-5)
