"""Headers of ``epilogue/`` by themselves, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device.epilogue import sources
from tests.kernels.device.primitives import F16, F32, F64, cuda, needs_gpu, run, whole

ALPHAS = {
    "plain": {},
    "scaled": {"alpha": -2.0},
    "mean": {"mean": 1},
    "added": {"beta": 3.0},
    "bias": {"bias": True},
    "relu": {"relu": 1},
    "all": {"alpha": 2.0, "mean": 1, "beta": -3.0, "bias": True, "relu": 1, "row_bias": True},
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("wanted", ALPHAS)
@pytest.mark.parametrize("out_dtype, vector, count, row_bias", sources.EPILOGUES)
def test_the_epilogue_is_applied_and_stored(out_dtype, vector, count, row_bias, wanted, ordered):
    acc = F64 if out_dtype is F64 else F32
    n, rows, stride = 24 - vector, 8, 32
    order = torch.tensor([6, 2, 0, 7, 3]) if ordered else torch.arange(5)
    wants = ALPHAS[wanted]
    sums, before = 4.0 * whole(len(order), n), whole(rows, stride, seed=1)
    bias, by_row = whole(n, seed=2), whole(rows, seed=3)
    entries = torch.tensor([0, 1, 2, 4, 1, 2, 4, 0])
    indptr = torch.cat([torch.zeros(1).long(), entries.cumsum(0)])
    c = cuda(before, out_dtype)
    values = {
        "sums": cuda(sums, acc), "c": c, "c_row_stride": stride, "c_batch_stride": 0,
        "order": cuda(order, torch.int32) if ordered else 0, "rows": len(order),
        "indptr": cuda(indptr), "bias": cuda(bias, acc) if "bias" in wants else 0,
        "alpha": wants.get("alpha", 1.0), "beta": wants.get("beta", 0.0),
        "epilogue": wanted != "plain", "mean": wants.get("mean", 0), "relu": wants.get("relu", 0),
        "n": n,
    }  # fmt: skip
    if row_bias:
        bias_type = {F16: 1, F32: 0}[out_dtype]
        held = cuda(by_row, out_dtype)
        values |= {"row_bias": held if "row_bias" in wants else 0, "row_bias_type": bias_type}
    # Two positions more than there are: nothing may be stored for them.
    source = sources.epilogue(out_dtype, vector, count, row_bias)
    run(source, (len(order) + 2, 1), -(-n // count), **values)
    expected = before.clone()
    result = sums * wants.get("alpha", 1.0)
    if "mean" in wants:
        result /= entries[order].clamp(min=1)[:, None]
    result += wants.get("beta", 0.0) * before[order, :n] + (bias if "bias" in wants else 0.0)
    if row_bias and "row_bias" in wants:
        result += by_row[order, None]
    expected[order, :n] = result.clamp(min=0) if "relu" in wants else result
    assert torch.equal(c.cpu().double(), expected)
