"""Headers of ``mma/`` by themselves, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile.core.device import capability
from tests.kernels.device.mma import sources
from tests.kernels.device.primitives import (
    BF16,
    F16,
    F32,
    cuda,
    needs_gpu,
    needs_hopper,
    run,
    whole,
)


def bit_array(tiles: Tensor) -> np.ndarray:
    """Occupied cells of 8 x 8 tiles -> one uint64 each, bit 8r + c."""
    cells = tiles.reshape(-1, 64).numpy().astype(np.uint64)
    return (cells << np.arange(64, dtype=np.uint64)).sum(1, dtype=np.uint64)


def tiles_of(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Occupied cells and values of 8 x 8 tiles; an odd number of cells in the first."""
    maker = torch.Generator().manual_seed(seed)
    cells = torch.rand(count, 8, 8, generator=maker) < 0.4
    if int(cells[0].sum()) % 2 == 0:
        cells[0, 0, 0] = ~cells[0, 0, 0]
    return cells, whole(count, 8, 8, seed=seed) + 9.0  # no zeros


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, weighted, stack, stored", sources.TILE_PRODUCTS)
def test_a_tile_is_decoded_and_multiplied(dtype, weighted, stack, stored):
    tile = 1
    cells, values = tiles_of(3 * stack)
    dense = torch.where(cells, values if weighted else torch.ones_like(values), 0.0)
    dense = dense[tile * stack : (tile + 1) * stack]
    counts = cells.sum((1, 2)).reshape(3, stack).sum(1).cumsum(0)
    begin, end = int(counts[tile - 1]), int(counts[tile])
    span = 16 // dtype.itemsize
    b = whole(8, 8 * span)
    kept = torch.cat([values[cells], torch.zeros(16).double()])
    words = 2 if dtype is F32 else 1
    weights = torch.zeros(32, stack, words, dtype=torch.int32, device="cuda")
    c = torch.full((8 * stack, 8 * span), -1.0, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    run(
        sources.tile_product(dtype, weighted, stack, stored), (1, 1), 32,
        bitmaps=cuda(bit_array(cells).view(np.int64)), values=cuda(kept, dtype), b=cuda(b, dtype),
        weights=weights, c=c, count=count, tile=tile, begin=begin, end=end,
    )  # fmt: skip
    # lane = 4g + t: row g, columns 2t and 2t + 1.
    pairs = dense.reshape(stack, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, stack, 2)
    expected = pairs.to(dtype).contiguous().view(torch.int32).reshape(32, stack, words)
    assert torch.equal(weights.cpu(), expected)
    assert torch.equal(c.cpu().double(), dense.reshape(8 * stack, 8) @ b)
    assert int(count) == (end - begin if weighted else 0)


def tf32(bits: np.ndarray, ties_to_even: bool) -> np.ndarray:
    """Round float32 bits to the 11 bits of TF32; infinities and NaN stay what they are."""
    half = 0xFFF + (bits >> np.uint32(13) & np.uint32(1)) if ties_to_even else 0x1000
    rounded = bits + np.uint32(half) if np.isscalar(half) else bits + half.astype(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    return np.where(special, bits, rounded) & np.uint32(0xFFFFE000)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("out_dtype", [F16, BF16])
def test_rounding_to_tf32_transposing_four_lanes_and_pairs_of_16_bits(out_dtype):
    random = np.random.default_rng(0).uniform(-1e9, 1e9, 256 - 32).astype(np.float32)
    cases = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 4097.0, 4098.0, 4099.0, 4102.0, -4098.0]
    cases += [np.float32(1 + i * 2.0**-13) for i in range(32 - len(cases))]
    given = np.concatenate([np.array(cases, np.float32), random])
    rounded, pairs = (torch.zeros(256, dtype=torch.int32, device="cuda") for _ in range(2))
    transposed = torch.zeros(256, 4, dtype=torch.int32, device="cuda")
    run(
        sources.registers(out_dtype), (8, 1), 32, given=cuda(given.view(np.int32)),
        rounded=rounded, transposed=transposed, pairs=pairs,
    )  # fmt: skip
    found = rounded.cpu().numpy().view(np.uint32) & np.uint32(0xFFFFE000)
    numbers = ~np.isnan(given)
    even = capability(0) >= (9, 0)
    assert np.array_equal(found[numbers], tf32(given.view(np.uint32), even)[numbers])
    assert np.isnan(found[~numbers].view(np.float32)).all()
    before = torch.arange(1024).reshape(64, 4, 4)  # four lanes of four words
    assert torch.equal(transposed.cpu().long().reshape(64, 4, 4), before.mT)
    numbers16 = torch.arange(256).double()
    both = torch.stack([numbers16, -numbers16], 1).to(out_dtype)
    assert torch.equal(pairs.cpu(), both.view(torch.int32).flatten())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype, k_major", sources.WGMMA_SHARED)
def test_wgmma_multiplies_a_tile_in_the_swizzle(dtype, k_major):
    depth = 64 if dtype.itemsize <= 2 else 32
    a, b = whole(64, depth, most=2), whole(depth, 128, most=2)
    c = torch.zeros(64, 128, device="cuda")
    given = (b.mT if k_major else b).contiguous()
    run(
        sources.wgmma_shared(dtype, k_major), (1, 1), 128,
        a=cuda(a, dtype), b=cuda(given, dtype), c=c,
    )  # fmt: skip
    assert torch.equal(c.cpu().double(), a @ b)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype, columns", sources.WGMMA_REGISTERS)
def test_wgmma_adds_a_tile_in_registers(dtype, columns):
    depth = 8 if dtype is F32 else 16
    a, b = whole(64, depth), whole(depth, columns)
    c = torch.zeros(64, columns, device="cuda")
    run(
        sources.wgmma_registers(dtype, columns), (1, 1), 128,
        a=cuda(a, dtype), b=cuda(b, dtype), c=c,
    )  # fmt: skip
    assert torch.equal(c.cpu().double(), a @ b + 1.0)
