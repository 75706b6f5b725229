"""Complex products on a GPU: whole numbers exactly, gradients, graphs, plans and arrays."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
import sparsetile.functional as F
from tests.plan.complex_numbers import TYPES, as_tensor, dense, matrix, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

A = matrix(700, 400, 0.05)
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


@types
@pytest.mark.parametrize("n", [1, 7, 64, 200])
def test_products_and_transposes_are_exact_of_whole_numbers(dtype, n):
    given, full = as_tensor(A, dtype, "cuda"), dense(A, dtype)
    B, G = whole(400, n, dtype=dtype), whole(700, n, dtype=dtype)
    plan = st.plan(given, n)
    assert plan.system == "csr" and plan.dtype is dtype
    for _ in range(2):  # with and without memory that was used before
        assert torch.equal((plan @ B.cuda()).cpu(), full @ B)
        assert torch.equal((plan.T @ G.cuda()).cpu(), full.T @ G)
        assert torch.equal((plan.H @ G.cuda()).cpu(), full.mH @ G)
        assert torch.equal(st.spmm(given, B.cuda()).cpu(), full @ B)
        parts = given.crow_indices(), given.col_indices(), given.values().clone()
        assert torch.equal(F.spmm(*parts, B.cuda()).cpu(), full @ B)
    out = torch.full((700, n), complex("nan+nanj"), dtype=dtype, device="cuda")
    assert torch.equal(plan.run(B.cuda(), out=out).cpu(), full @ B)


@types
@pytest.mark.parametrize("system", ["auto", "csr", "cusparse", "dense"])
def test_a_real_matrix_multiplies_complex_numbers(dtype, system):
    part = torch.empty(0, dtype=dtype).real.dtype
    real = as_tensor(A.real.tocsr(), part, "cuda")
    B = whole(400, 33, dtype=dtype)
    expected = dense(A.real.tocsr(), dtype) @ B
    assert torch.equal((st.plan(real, 33, system=system) @ B.cuda()).cpu(), expected)
    assert torch.equal(st.spmm(real, B.cuda()).cpu(), expected)


@types
def test_gradients_are_those_of_dense_torch(dtype):
    values = torch.from_numpy(A.data).to("cuda", dtype).requires_grad_()
    B = whole(400, 16, dtype=dtype, device="cuda").requires_grad_()
    G = whole(700, 16, dtype=dtype, device="cuda", seed=4)
    indptr, indices = (torch.from_numpy(part).cuda() for part in (A.indptr, A.indices))
    rows = torch.repeat_interleave(torch.arange(700, device="cuda"), indptr.diff())
    full = torch.zeros(700, 400, dtype=dtype, device="cuda")
    full = full.index_put((rows, indices.long()), values)
    expected = torch.autograd.grad(full @ B, (values, B), G)
    plan = st.plan((indptr, indices, values.detach(), A.shape), 16)
    for C in (plan.run(B, values=values), F.spmm(indptr, indices, values, B)):
        for found, wanted in zip(torch.autograd.grad(C, (values, B), G), expected, strict=True):
            assert torch.equal(found, wanted)
    (found,) = torch.autograd.grad(plan @ B, B, G)
    assert torch.equal(found, expected[1]) and torch.equal(plan.gradient(G), expected[1])


def test_a_captured_product_sees_new_values():
    plan = st.plan(as_tensor(A, torch.complex64, "cuda"), 32)
    B = whole(400, 32, dtype=torch.complex64, device="cuda")
    full = dense(A, torch.complex64, "cuda")
    plan @ B, plan.H @ (plan @ B)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
        D = plan.H @ C
    for factor in (1, -2):
        plan.update_values(factor * torch.from_numpy(A.data).to("cuda", torch.complex64))
        C.fill_(float("nan")), D.fill_(float("nan"))
        graph.replay()
        assert torch.equal(C, factor * (full @ B))
        expected = dense(A, torch.complex128, "cuda").mH @ (full @ B).to(torch.complex128)
        torch.testing.assert_close(D.to(torch.complex128), factor**2 * expected)


def test_plans_move_between_devices():
    plan, full = st.plan(A, 8, device="cpu"), dense(A, torch.complex128)
    B = whole(400, 8, dtype=torch.complex128)
    plan.H @ (plan @ B)
    assert torch.equal((plan.to("cuda") @ B.cuda()).cpu(), full @ B)
    assert torch.equal((plan.H @ (full @ B).cuda()).cpu(), full.mH @ (full @ B))
    assert torch.equal(plan.cpu() @ B, full @ B)
