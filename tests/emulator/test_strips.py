"""The redo of sixteen rows (exact_strips.cuh), run on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.emulator.build import HostKernel, host_compiler
from tests.kernels.device.primitives import MMA_TYPES
from tests.kernels.device.windows import sources
from tests.kernels.device.windows.strips import TILES, a_strip

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


@pytest.mark.parametrize("pieces, batch", [(1, 1), (1, 4), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", MMA_TYPES, ids=str)
def test_entries_alone_meet_what_is_not_finite(dtype, pieces, batch, folder):
    source = sources.exact(dtype, 1, pieces, batch)
    spec = SimpleNamespace(source=lambda _: source, params=source.params, name=source.entry)
    kernel = HostKernel(spec, {}, folder)
    for chunks in (1, 3, 8) if pieces == 1 else (5, 9, 15, 16):
        n = chunks * 16 // dtype.itemsize
        strip = a_strip(dtype, n)
        out, failed = torch.full((16, n), -1.0), torch.full((32,), -1, dtype=torch.int32)
        given = {**strip.given, "out": out, "failed": failed}
        values = {name: tensor.data_ptr() for name, tensor in given.items()}
        sizes = {"b_row_bytes": n * dtype.itemsize, "tiles": TILES, "n": n}
        kernel.launch((1, 1, 1), 32, 0, {**values, **sizes})
        torch.testing.assert_close(out.double(), strip.expected, rtol=0, atol=0, equal_nan=True)
        assert failed.tolist() == strip.failed
