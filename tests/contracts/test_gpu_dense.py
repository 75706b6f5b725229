"""``dense`` where A's columns are no multiple of 16 bytes: two products, one sum."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from tests.contracts.cases import assert_close, tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cols", [1, 7, 9, 64, 301])
@pytest.mark.parametrize("n", [1, 33, 64])
def test_columns_of_any_number(dtype: torch.dtype, cols: int, n: int):
    generator = torch.Generator("cuda").manual_seed(cols * n)
    A = torch.randn(200, cols, device="cuda", generator=generator).to(dtype)
    A[A.abs() < 0.5] = 0
    B = torch.randn(cols, n, device="cuda", generator=generator).to(dtype)
    bias = torch.randn(n, device="cuda", generator=generator).to(dtype)
    with tf32(True):
        plan = st.plan(A.to_sparse_csr(), n, dtype=dtype, system="dense")
        csr = plan._csr.with_values(plan.values)
        C = torch.full((200, n + 3), torch.nan, device="cuda", dtype=dtype)[:, 1 : n + 1]
        plan.run(B, out=C)
        assert_close(C, csr, B)
        fused = plan.run(B, bias=bias, relu=True)
        batch = plan @ torch.stack([B, -B])
    wanted = (C.double() + bias.double()).relu()
    torch.testing.assert_close(fused.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(batch[1], -batch[0])
    with tf32(True):
        lean = st.plan(A.to_sparse_csr(), n, dtype=dtype, system="dense", keep="inference")
        assert_close(lean @ B, csr, B)
    B[-1, 0] = torch.inf
    with tf32(True):
        assert_close(plan @ B, csr, B)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cols", [64, 67])
def test_the_path_of_little_host_time_gives_the_same_bits(dtype: torch.dtype, cols: int):
    """``out=`` takes the general way."""
    generator = torch.Generator("cuda").manual_seed(cols)
    A = torch.randn(100, cols, device="cuda", generator=generator).to(dtype)
    A[A.abs() < 0.5] = 0
    bias = torch.randn(48, device="cuda", generator=generator).to(dtype)
    wide = torch.randn(cols, 80, device="cuda", generator=generator).to(dtype)
    plan = st.plan(A.to_sparse_csr(), 48, dtype=dtype, system="dense")
    csr = plan._csr.with_values(plan.values)
    for B in (
        wide[:, :48].contiguous(),
        wide[:, :48],
        wide[:, 1:49],
        wide[:, :48].clone().T.contiguous().T,
    ):
        C = torch.full((100, 48), torch.nan, device="cuda", dtype=dtype)
        assert_close(plan @ B, csr, B)
        assert torch.equal(plan @ B, plan.run(B, out=C))
        for options in ({"alpha": 0.5}, {"reduce": "mean"}, {"bias": bias, "relu": True}):
            eager, compiled = plan.run(B, **options), torch.compile(plan.run)(B, **options)
            torch.testing.assert_close(eager, compiled)
    assert (plan @ wide[:, :0]).shape == (100, 0)
    B = wide.clone().requires_grad_()
    (plan @ B).backward(torch.ones_like(plan @ wide))
    torch.testing.assert_close(B.grad, A.T @ torch.ones_like(plan @ wide), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_row_that_met_no_entry_is_recomputed(dtype: torch.dtype):
    """More rows than thread blocks, and many elements of a warp that are not finite."""
    generator = torch.Generator("cuda").manual_seed(3)
    A = torch.randn(3000, 40, device="cuda", generator=generator).to(dtype)
    A[A.abs() < 1.0] = 0
    B = torch.randn(40, 96, device="cuda", generator=generator).to(dtype)
    B[3, ::5], B[7, 40:48], B[11, 95] = torch.inf, torch.nan, -torch.inf
    with tf32(True):
        plan = st.plan(A.to_sparse_csr(), 96, dtype=dtype, system="dense")
        assert_close(plan @ B, plan._csr.with_values(plan.values), B)
