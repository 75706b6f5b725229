"""``half`` on a GPU: the copy's range, rows that do not fit it, and the same bits each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
from tests.contracts.cases import csr_of, random_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.fixture(autouse=True)
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)


def plan_of(n: int, density: float = 0.05, cols: int = 700) -> st.Plan:
    csr = csr_of(random_matrix(500, cols, density)).to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(n)
    values = torch.randn(csr.nnz, generator=generator, device="cuda")
    return st.plan(csr.with_values(values), n, system="half", reorder="identity")


def assert_rounded(plan: st.Plan, B: Tensor) -> Tensor:
    """Every element is as near as TF32's rounding of B leaves it; bits repeat."""
    C = plan @ B
    csr = plan._csr
    values, gathered = plan.values.double()[:, None], B.double()[csr.indices.long()]
    zeros = torch.zeros(plan.shape[0], B.shape[1], dtype=torch.float64, device="cuda")
    wanted = zeros.index_add(0, csr.row_ids(), values * gathered)
    sizes = zeros.index_add(0, csr.row_ids(), (values * gathered).abs())
    assert bool(((C - wanted).abs() <= (2.0**-11 + 2.0**-17) * sizes + 2.0**-140).all())
    assert torch.equal(plan @ B, C)
    return C


@pytest.mark.parametrize("n", [8, 64, 100, 128, 129, 256, 512, 1040])
def test_random_rows(n: int):
    plan = plan_of(n)
    assert plan.system == "half"
    assert_rounded(plan, torch.randn(700, n, device="cuda"))


@pytest.mark.parametrize("density", [0.05, 0.4])
def test_rows_that_the_copy_cannot_hold(density: float):
    plan, B = plan_of(128, density), torch.randn(700, 128, device="cuda")
    some = B.clone()
    some[::7, 3] = 2.0**-40
    some[5] *= 2.0**60
    some[6] *= 2.0**-60
    assert_rounded(plan, some)
    assert_rounded(plan, B * torch.logspace(-12, 12, 128, device="cuda"))
    assert_rounded(plan, B * torch.logspace(-30, 30, 700, device="cuda")[:, None])


def test_values_of_any_size():
    plan, B = plan_of(64), torch.randn(700, 64, device="cuda")
    for size in (1e-35, 1e30):
        plan.update_values(torch.randn(plan.nnz, device="cuda") * size)
        assert_rounded(plan, B * 1e-3)
    plan.update_values(torch.randn(plan.nnz, device="cuda"))
    assert_rounded(plan, B)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-44, 1e30])
def test_one_value_of_another_size_changes_nothing_in_other_rows(size: float):
    """It is multiplied with B itself, and all other entries with the copy."""
    plan, B = plan_of(128), torch.randn(700, 128, device="cuda")
    before, values = plan @ B, plan.values.clone()
    values[1000] = size
    plan.update_values(values)
    others = torch.arange(500, device="cuda") != plan._csr.row_ids()[1000]
    assert torch.equal(assert_rounded(plan, B)[others], before[others])


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("n", [20, 64, 128, 512])
def test_no_row_of_b_fits(n: int, begin: int):
    plan, B = plan_of(n, 0.3), torch.randn(700, n + 1, device="cuda")
    B = B[:, begin : begin + n] * 2.0**60
    assert_rounded(plan, B)
    B[::2] *= 2.0**-60
    assert_rounded(plan, B)


def test_what_is_not_finite_stays_where_it_is():
    plan, B = plan_of(128), torch.randn(700, 128, device="cuda")
    B[3, 0], B[7, 127], B[9, 64] = torch.nan, torch.inf, -torch.inf
    exact = st.plan(
        (plan._csr.indptr, plan._csr.indices, plan.values, plan.shape), 128, system="csr"
    )
    C, wanted = plan @ B, exact @ B
    assert torch.equal(C.isnan(), wanted.isnan()) and torch.equal(C.isinf(), wanted.isinf())


def test_capture_strides_and_epilogues():
    plan, B = plan_of(128), torch.randn(700, 160, device="cuda")
    part = B[:, 3:131]
    plain = assert_rounded(plan, part)
    assert torch.equal(plan @ part.contiguous(), plain)
    bias = torch.randn(128, device="cuda")
    fused = plan.run(part, bias=bias, relu=True, alpha=2.0)
    torch.testing.assert_close(fused, (2 * plain + bias).relu())
    out = torch.full((500, 140), torch.nan, device="cuda")[:, 5:133]
    # An element at a time, in another order of additions.
    torch.testing.assert_close(plan.run(part, out=out), plain)
    batch = torch.stack([part, 2 * part])
    assert torch.equal(plan @ batch, torch.stack([plain, 2 * plain]))
    fixed = part.contiguous()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan @ fixed
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan @ fixed
    fixed.mul_(4.0)
    graph.replay()
    assert torch.equal(captured, 4 * plain)


def test_gradients():
    plan, B = plan_of(64), torch.randn(700, 64, device="cuda", requires_grad=True)
    G = torch.randn(500, 64, device="cuda")
    (plan @ B).backward(G)
    assert plan.T.system == "half"
    assert torch.equal(B.grad, plan.T @ G)
