"""The gradient of ReLU and bias in one kernel: on a GPU, and on the host thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.launch import columns
from sparsetile.launch.columns import epilogue_gradient, takes_epilogue_gradient
from sparsetile.plan import valued
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")


def operands(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A gradient, and a C with zeros of both signs, NaN and Inf among its elements."""
    generator = torch.Generator().manual_seed(rows + n)
    grad = torch.randn(rows, n, generator=generator)
    C = torch.randn(rows, n, generator=generator).relu()
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, -1.0, 1e-8])
    at = torch.randint(rows * n, (max(rows * n // 9, 1),), generator=generator)
    C.view(-1)[at] = odd[torch.arange(at.numel()) % odd.numel()]
    return grad.to(dtype), C.to(dtype)


def check(grad: Tensor, C: Tensor, masked: Tensor, sums: Tensor) -> None:
    expected = torch.ops.aten.threshold_backward(grad, C, 0)
    assert torch.equal(masked, expected)
    exact = expected.double().sum(0)
    bound = 1e-6 * expected.double().abs().sum(0) + 1e-30
    assert sums.dtype is torch.float32 and bool(((sums.double() - exact).abs() <= bound).all())


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    memory: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def scratch(device: int, stream: int, size: int, counters: int) -> tuple[Tensor, Tensor]:
        made = torch.full((size,), 255, dtype=torch.uint8), torch.zeros(counters, dtype=torch.int32)
        return memory.setdefault((size, counters), made)

    load_on_host(monkeypatch, folder, columns, scratch=scratch)


@pytest.mark.skipif(host_compiler() is None, reason="no g++ here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (5, 7), (700, 40), (2100, 66)])
def test_gradient_thread_by_thread(on_host: None, dtype: torch.dtype, rows: int, n: int):
    grad, C = operands(rows, n, dtype)
    for _ in range(2):  # counters are put back
        check(grad, C, *epilogue_gradient(grad, C))
    same, sums = epilogue_gradient(grad, None)
    assert same is grad
    check(grad, torch.ones_like(grad), grad, sums)


@pytest.mark.skipif(host_compiler() is None, reason="no g++ here")
def test_rows_that_lie_apart(on_host: None):
    grad, C = operands(300, 24, torch.float32)
    wide = torch.full((300, 33), torch.nan)
    wide[:, 5:29] = grad
    check(grad, C, *epilogue_gradient(wide[:, 5:29], C))


def test_what_it_takes():
    grad, C = operands(4, 8, torch.float32)
    assert not takes_epilogue_gradient(grad, C), "a GPU's matrices alone"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 16, 40, 256, 301, 1024])
def test_gradient_on_a_gpu(dtype: torch.dtype, n: int):
    for rows in (1, 3, 130, 5000, 70001):
        grad, C = (each.cuda() for each in operands(rows, n, dtype))
        assert takes_epilogue_gradient(grad, C)
        found = [epilogue_gradient(grad, C) for _ in range(3)]
        check(grad, C, *found[0])
        for masked, sums in found[1:]:
            assert torch.equal(masked, found[0][0]) and torch.equal(sums, found[0][1])
        _, sums = epilogue_gradient(grad, None)
        check(grad, torch.ones_like(grad), grad, sums)
        wide = torch.full((rows, n + 5), torch.nan, dtype=dtype, device="cuda")
        wide[:, 3 : 3 + n] = grad
        check(grad, C, *epilogue_gradient(wide[:, 3 : 3 + n], C))
    assert not takes_epilogue_gradient(grad.t(), None) or n == 1
    assert not takes_epilogue_gradient(grad[:0], C[:0])
    assert not takes_epilogue_gradient(grad.double(), C.double())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_needs_no_more_memory_than_its_matrices(dtype: torch.dtype):
    rows, n = 40_000, 256
    plan = st.plan(_diagonal(rows, dtype), n, dtype=dtype, system="csr")
    B = torch.randn(rows, n, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.zeros(n, device="cuda", requires_grad=True)
    grad = torch.randn(rows, n, device="cuda", dtype=dtype)
    for _ in range(2):
        plan.run(B, bias=bias, relu=True).backward(grad)
        B.grad = bias.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan.run(B, bias=bias, relu=True).backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    # C, which the call above holds, the masked gradient and B's; torch's sum took two more.
    assert peak <= 3.1 * grad.nbytes


def _diagonal(rows: int, dtype: torch.dtype) -> Tensor:
    at = torch.arange(rows + 1, device="cuda")
    values = torch.rand(rows, device="cuda").to(dtype)
    return torch.sparse_csr_tensor(at, at[:-1], values, (rows, rows), check_invariants=False)


def test_gradients_of_gradients_take_no_kernel_of_the_epilogue(monkeypatch: pytest.MonkeyPatch):
    """Also if the kernel of the epilogue's gradient could take them, as on a GPU."""
    called = []
    monkeypatch.setattr(valued, "takes_epilogue_gradient", lambda *_: True)
    monkeypatch.setattr(valued, "epilogue_gradient", lambda *a: called.append(a))
    matrix = torch.diag(torch.rand(50) + 0.5).to_sparse_csr()
    plan = st.plan(matrix, 8)
    B = torch.randn(50, 8, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    grad = torch.randn(50, 8, requires_grad=True)
    out = plan.run(B, bias=bias, relu=True)
    (d_B, d_bias) = torch.autograd.grad(out, (B, bias), grad, create_graph=True)
    (again,) = torch.autograd.grad(d_B.sum() + d_bias.sum(), grad)
    reached = (out > 0).to(out.dtype)
    expected = reached * (plan @ torch.ones_like(B).detach() + 1)
    torch.testing.assert_close(again, expected)
    assert not called
    with pytest.raises(TypeError):  # a first gradient would have called it, which gives no list
        torch.autograd.grad(plan.run(B, bias=bias, relu=True), (B, bias), grad.detach())
    assert called


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_training_through_the_epilogue(relu: bool, bias: bool, reduce: str):
    torch.manual_seed(1)
    dense = (torch.rand(300, 200, device="cuda") < 0.05) * torch.rand(300, 200, device="cuda")
    plan = st.plan(dense.to_sparse_csr(), 48)
    B = torch.randn(200, 48, device="cuda", requires_grad=True)
    b = torch.randn(48, device="cuda", requires_grad=True) if bias else None
    grad = torch.randn(300, 48, device="cuda")
    leaves = (B,) if b is None else (B, b)
    found = torch.autograd.grad(plan.run(B, bias=b, relu=relu, reduce=reduce), leaves, grad)
    scale = (dense != 0).sum(1, keepdim=True).clamp(min=1).double()
    product = dense.double() @ B.double()
    product = product / scale if reduce == "mean" else product
    product = product if b is None else product + b.double()
    product = product.relu() if relu else product
    expected = torch.autograd.grad(product, leaves, grad.double())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-2)
