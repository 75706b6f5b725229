"""Headers of ``pipeline/`` by themselves, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device.pipeline import sources
from tests.kernels.device.primitives import cuda, needs_gpu, needs_hopper, run, whole


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, columns, stages, is_whole", sources.COPY_RINGS)
def test_copies_bring_the_rows_of_every_tile_through_the_ring(dtype, columns, stages, is_whole):
    vector = 16 // dtype.itemsize
    n = columns if is_whole else columns - 3 * vector
    tiles, rows = 9, 50
    b = whole(rows, columns + vector)
    ids = torch.randint(0, rows, (tiles, 8), generator=torch.Generator().manual_seed(1))
    given = cuda(b, dtype)
    out = torch.full((tiles, 8, columns), -1.0, dtype=dtype, device="cuda")
    run(
        sources.copy_ring(dtype, columns, stages, is_whole), (1, 1), 32,
        ids=cuda(ids, torch.int32), b=given, out=out, b_row_bytes=given.stride(0) * dtype.itemsize,
        tiles=tiles, n=n,
    )  # fmt: skip
    expected = b[ids][..., :columns].clone()
    expected[..., n:] = 0
    assert torch.equal(out.cpu().double(), expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("steps", [1, 4, 13])
@pytest.mark.parametrize("stages, bulk", sources.BARRIER_RINGS)
def test_barriers_hand_over_every_step_of_several_turns(stages, bulk, steps):
    given = torch.arange(steps * 128, dtype=torch.int32, device="cuda").reshape(steps, 128)
    out = torch.full((2, steps, 128), -1, dtype=torch.int32, device="cuda")
    run(sources.barrier_ring(stages, bulk), (1, 1), 96, given=given, out=out, steps=steps)
    assert torch.equal(out, given.expand(2, steps, 128))
