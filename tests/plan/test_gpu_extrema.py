"""Gradients of max and min on a GPU: each element's goes to the entry that won it, and no other."""

from __future__ import annotations

import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from tests.contracts.cases import csr_of, random_matrix, with_dense_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def wanted(A: st.CSR, values: Tensor | None, B: Tensor, grad: Tensor, reduce: str) -> Tensor:
    """The gradient for B in float64, by the first winner of each element; all on the CPU."""
    wide = F64 if B.dtype is F64 else F32
    products = B.to(wide)[..., A.indices.long(), :]
    weights = torch.ones(A.nnz) if values is None else values
    products = products * weights.to(wide).unsqueeze(-1)
    out = torch.zeros(B.shape, dtype=F64)
    for row, (begin, end) in enumerate(zip(A.indptr[:-1], A.indptr[1:], strict=True)):
        if begin == end:
            continue
        mine = products[..., begin:end, :]
        first = (mine.argmax(-2) if reduce == "max" else mine.argmin(-2)) + begin
        source = grad[..., row, :].double() * weights.double()[first]
        out.scatter_add_(-2, A.indices.long()[first].unsqueeze(-2), source.unsqueeze(-2))
    return out


def operands(A: st.CSR, n: int, dtype: torch.dtype, *lead: int) -> tuple[Tensor, Tensor]:
    """B without equal elements in a column where the type allows, and a gradient."""
    generator = torch.Generator().manual_seed(n)
    B = torch.randn((*lead, A.shape[1], n), generator=generator, dtype=F64)
    grad = torch.randint(-4, 5, (*lead, A.shape[0], n), generator=generator)
    grad = grad.to(dtype)
    grad[..., A.row_lengths() == 0, :] = torch.nan  # no entry won it: it goes nowhere
    return B.to(dtype), grad


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "dtype, n", [(F32, 64), (F32, 33), (F64, 40), (F16, 128), (BF16, 7), (BF16, 256), (F32, 1)]
)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_it_goes_to_the_first_winner(reduce, weighted, dtype, n, lead):
    keep = sp.diags_array((torch.arange(70) % 9 > 0).double().numpy())  # the first row is empty
    matrix = sp.csr_array(keep @ with_dense_row(70, 900, 6))
    matrix.eliminate_zeros()
    A = csr_of(matrix, dtype=dtype)  # the transpose's rows are short
    values = A.values if weighted else None
    B, grad = operands(A, n, dtype, *lead)
    plan = st.plan(A.with_values(values).to("cuda"), n, dtype=dtype)
    x = B.to("cuda", copy=True).requires_grad_()
    plan.run(x, reduce=reduce).backward(grad.cuda())
    found, expected = x.grad.cpu().double(), wanted(A, values, B, grad, reduce)
    unit = torch.finfo(dtype).eps
    bound = unit * expected.abs() + 2e-6 * expected.abs().amax()
    assert bool(((found - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype, n", [(F32, 64), (BF16, 48), (F64, 3)])
def test_long_rows_of_the_transpose_are_cut_and_added_in_one_order(dtype, n):
    A = csr_of(with_dense_row(40, 9000, 3).T.tocsr(), dtype=dtype)  # one column has all rows
    B, grad = operands(A, n, dtype)
    B[A.indices[A.row_lengths().argmax()]] = 9  # wins often
    plan = st.plan(A.with_values(None).to("cuda"), n, dtype=dtype)
    found = []
    for _ in range(2):
        x = B.to("cuda", copy=True).requires_grad_()
        plan.run(x, reduce="max").backward(grad.cuda())
        found.append(x.grad.cpu())
    assert torch.equal(*found)
    expected = wanted(A, None, B, grad, "max")  # whole numbers: exact but for the last rounding
    assert torch.equal(found[0], expected.to(dtype))


def test_places_beyond_16_bits():
    rows, longest = 3, 2**15 + 40
    indptr = torch.tensor([0, longest, longest, longest + 2])
    indices = torch.cat([torch.arange(longest), torch.tensor([0, longest - 1])]).int()
    A = st.CSR(indptr, indices, None, (rows, longest))
    B, grad = operands(A, 5, F32)
    B[-1, 0] = 100  # won by the last entry of both rows
    plan = st.plan(A.to("cuda"), 5, dtype=F32)
    x = B.to("cuda", copy=True).requires_grad_()
    plan.run(x, reduce="max").backward(grad.cuda())
    assert torch.equal(x.grad.cpu().double(), wanted(A, None, B, grad, "max"))


def test_an_infinite_weight_spreads_nothing_where_it_did_not_win():
    A = csr_of(random_matrix(30, 20, 0.4))
    A.values[5] = -torch.inf
    B, grad = operands(A, 16, F32)
    B.abs_().add_(1)
    plan = st.plan(A.to("cuda"), 16)
    x = B.to("cuda", copy=True).requires_grad_()
    plan.run(x, reduce="max").backward(grad.cuda())
    assert bool(torch.isfinite(x.grad).all())


def test_the_products_of_both_directions_and_second_derivatives():
    A = csr_of(random_matrix(12, 9, 0.4), dtype=F64).to("cuda")
    plan = st.plan(A, 4)
    B = torch.randn(9, 4, dtype=F64, device="cuda", requires_grad=True)
    values = A.values.clone().requires_grad_()
    product = lambda v, b: plan.run(b, values=v, reduce="max").square()  # noqa: E731
    assert torch.autograd.gradgradcheck(product, (values, B))
    X = torch.randn(12, 4, dtype=F64, device="cuda", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: plan.T.run(x, reduce="min"), X)


def test_few_bytes_are_kept_for_the_gradient():
    rows, n = 20_000, 64
    A = csr_of(random_matrix(rows, rows, 5e-4)).to("cuda")
    plan = st.plan(A.with_values(None), n)
    B = torch.randn(rows, n, device="cuda", requires_grad=True)
    plan.run(B, reduce="max").sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    C = plan.run(B, reduce="max")
    kept = torch.cuda.memory_allocated() - before
    assert kept <= rows * n * (4 + 2) + 2**21, "C, and two bytes for each winner"
    torch.cuda.reset_peak_memory_stats()
    B.grad = None
    before = torch.cuda.memory_allocated()
    C.backward(torch.ones_like(C))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 3 * rows * n * 4, "the gradient of C and that of B"
