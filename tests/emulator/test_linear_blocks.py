"""Layers of kept blocks on mma.sync, run on the host thread by thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.formats.block_pattern import BlockPattern, dense_of_blocks
from sparsetile.launch.interface import Epilogue
from sparsetile.layers.block_layer import work_of
from sparsetile.layers.block_linear import flat_pattern
from sparsetile.systems.bcsr import layer_blocks
from sparsetile.systems.bcsr.layer_blocks import LayerBlocks
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.guarded import guarded
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, layer_blocks, machine=h200)


def weight(rows: int, cols: int, unit: int, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Lists and blocks of a weight whose second block row is empty, and the same as a matrix."""
    high, wide = -(-rows // unit), -(-cols // unit)
    keep = (torch.arange(high)[:, None] * 5 + torch.arange(wide)) % 3 != 1
    keep[1:2] = False
    pattern = BlockPattern.from_mask(keep, (rows, cols), unit)
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(-4, 5, (pattern.count, unit, unit), generator=generator).to(dtype)
    dense = dense_of_blocks(blocks, pattern.row_ptr, pattern.col_idx, (high * unit, wide * unit))
    dense[rows:] = 0
    dense[:, cols:] = 0
    cells = dense.reshape(high, unit, wide, unit).transpose(1, 2)
    blocks = cells[keep].contiguous()  # zeros past the end
    flat = flat_pattern(pattern)
    return (flat[0], flat[1], flat[2]), blocks, dense[:rows, :cols].double()


@pytest.mark.parametrize(
    "unit, dtype, tokens, cut",
    [
        (64, BF16, 5, 0),
        (64, F16, 130, 24),
        (32, BF16, 70, 8),
        (16, F16, 33, 8),
        (16, F32, 20, 4),
        (64, F32, 70, 12),
    ],
)
def test_any_number_of_tokens_with_bias_and_relu(unit, dtype, tokens, cut):
    rows, cols = 4 * unit - cut // 2, 7 * unit - cut
    lists, blocks, dense = weight(rows, cols, unit, dtype)
    layer = LayerBlocks(rows, cols, unit)
    bias = torch.arange(rows) % 64 / 8 - 3  # exact in every type
    around = torch.randint(-2, 3, (tokens, cols + 16)).to(dtype)
    Y = torch.full((tokens, rows), torch.nan, dtype=dtype)
    X = around[:, :cols]  # rows further apart than they are long
    if X.stride(0) * X.element_size() % 16:
        X = X.contiguous()
    epilogue = Epilogue(alpha=0.5, row_bias=bias.to(dtype), relu=True)
    layer.run(lists[2], lists[1], blocks, X, Y, epilogue)
    wanted = torch.relu(X.double() @ dense.T / 2 + bias)
    assert torch.equal(Y, wanted.to(dtype))


@pytest.mark.parametrize("unit, cut", [(64, 0), (32, 8), (16, 0)])
def test_gate_and_up_of_a_swiglu_in_one_product(unit, cut):
    rows, cols, dtype = 4 * unit, 5 * unit - cut, BF16
    lists, blocks, dense = weight(rows, cols, unit, dtype)
    layer = LayerBlocks(rows, cols, unit, paired=True)
    X = torch.randint(-1, 2, (3, cols)).to(dtype)
    bias = torch.arange(rows) % 5 / 4 - 0.5
    Y = torch.full((3, rows // 2), torch.nan, dtype=dtype)
    work = work_of(lists, "swiglu", dtype)
    layer.run(work, lists[1], blocks, X, Y, Epilogue(alpha=0.0625, row_bias=bias))
    gate, up = (X.double() @ dense.T / 16 + bias).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    assert torch.allclose(Y.double(), wanted, rtol=2**-7, atol=1e-6)


def test_silu_follows_the_bias_and_no_block_at_all_leaves_it():
    unit, dtype = 32, F32
    pattern = BlockPattern.from_mask(torch.zeros(2, 3).bool(), (64, 96), unit)
    flat = flat_pattern(pattern)
    X, Y = torch.full((9, 96), torch.nan), torch.full((9, 64), torch.nan)
    bias = torch.linspace(-2, 2, 64)
    blocks = torch.zeros(0, unit, unit, dtype=dtype)
    layer = LayerBlocks(64, 96, unit)
    layer.run(flat[2], flat[1], blocks, X, Y, Epilogue(row_bias=bias), silu=True)
    assert torch.allclose(Y, torch.nn.functional.silu(bias).expand(9, 64), atol=1e-6)


def test_x_is_rounded_to_the_nearest_tf32():
    """Truncated, 1 + 2^-11 + 2^-12 would be 1 + 2^-10 less than it is rounded to."""
    unit = 16
    pattern = BlockPattern.from_mask(torch.ones(1, 1).bool(), (16, 16), unit)
    flat = flat_pattern(pattern)
    X = torch.full((8, 16), 1 + 2.0**-11 + 2.0**-12)
    Y = torch.full((8, 16), torch.nan)
    LayerBlocks(16, 16, unit).run(flat[2], flat[1], torch.ones(1, 16, 16), X, Y, Epilogue())
    assert torch.equal(Y, torch.full((8, 16), 16 * (1 + 2.0**-10)))


def test_inputs_that_no_block_meets_are_not_read():
    unit, cols = 64, 192
    lists, blocks, dense = weight(64, cols, unit, BF16)
    X = torch.randint(-2, 3, (4, cols)).to(BF16)
    X[:, 64:128] = torch.nan  # block column 1 is dropped in block row 0
    Y = torch.full((4, 64), torch.nan, dtype=BF16)
    LayerBlocks(64, cols, unit).run(lists[2], lists[1], blocks, X, Y, Epilogue())
    assert torch.equal(Y, (X.nan_to_num().double() @ dense.T).to(BF16))


@pytest.mark.parametrize("unit, dtype", [(64, BF16), (16, F32)], ids=str)
def test_nothing_past_the_last_token_is_read(unit, dtype):
    rows, cols = 2 * unit, 3 * unit
    lists, blocks, dense = weight(rows, cols, unit, dtype)
    X = guarded(torch.randint(-2, 3, (5, cols)).to(dtype))
    Y = torch.full((5, rows), torch.nan, dtype=dtype)
    LayerBlocks(rows, cols, unit).run(lists[2], lists[1], blocks, X, Y, Epilogue())
    assert torch.equal(Y, (X.double() @ dense.T).to(dtype))
