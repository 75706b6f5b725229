"""Headers of ``windows/`` by themselves, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.device.primitives import cuda, needs_gpu, run
from tests.kernels.device.windows import sources
from tests.kernels.device.windows.strips import TILES, a_strip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, chains", sources.EXACTS)
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_the_redo_takes_entries_alone_and_says_what_is_not_finite(dtype, chains, pieces):
    n = pieces * 16 // dtype.itemsize
    strip = a_strip(dtype, n)
    out = torch.full((16, n), -1.0, device="cuda")
    failed = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    run(
        sources.exact(dtype, chains), (1, 1), 32,
        **{name: cuda(tensor) for name, tensor in strip.given.items()}, out=out, failed=failed,
        b_row_bytes=n * dtype.itemsize, tiles=TILES, n=n,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), strip.expected, rtol=0, atol=0, equal_nan=True)
    assert failed.cpu().tolist() == strip.failed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", [0, 1 << 0, 1 << 4 | 1 << 1, (1 << 37) - 1])
def test_windows_are_stored_where_they_end_and_redone_where_not_finite(bad):
    sizes = [0, 3, 0, 0, 2, 5, *[1] * 30, 0]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    count = len(sizes)
    # Windows 0 to 4, a piece that completes window 5, 31 windows to the end. Pieces are made exact
    # before they are joined, not redone here.
    items = [[0, 0, offsets[5], -5], [5, offsets[5], offsets[6], 0],
             [6, offsets[6], offsets[-1], -(count - 6)]]  # fmt: skip
    stored = torch.full((count,), -1, dtype=torch.int32, device="cuda")
    redone = torch.zeros(count, dtype=torch.int32, device="cuda")
    run(
        sources.windows(), (len(items), 1), 1, items=cuda(np.array(items, np.int32)),
        offsets=cuda(offsets.astype(np.int32)), stored=stored, redone=redone, bad=bad,
    )  # fmt: skip
    assert stored.tolist() == offsets[1:].tolist()
    assert redone.tolist() == [bad >> window & 1 if window != 5 else 0 for window in range(count)]
