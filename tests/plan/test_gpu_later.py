"""Plans that compare all systems later, on a GPU: streams, captures, gradients in TF32."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.fixture
def plan(tf32: None) -> st.Plan:
    """A plan of a matrix for which systems with tiles are worth comparing."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(256, 256, generator=generator) < 0.02
    full = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1).float()
    A = (full * torch.randn(full.shape, generator=generator)).cuda()
    made = st.plan(A.to_sparse_csr(), 128)
    made.full = A.double()
    assert made._family.forward.later is not None
    return made


@pytest.fixture
def tf32() -> object:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def check(plan: st.Plan, C: torch.Tensor, B: torch.Tensor) -> None:
    bound = 2e-3 * (plan.full.abs() @ B.double().abs()) + 1e-6
    assert ((C.double() - plan.full @ B.double()).abs() <= bound).all()


def test_products_and_gradients_before_and_after(plan):
    B = torch.randn(4096, 128, device="cuda", requires_grad=True)
    plan._family.forward.later.left = 3
    for _ in range(5):
        C = plan @ B
        check(plan, C.detach(), B.detach())
        (grad,) = torch.autograd.grad(C, B, torch.ones_like(C))
        wanted = plan.full.T @ torch.ones_like(C, dtype=torch.float64)
        assert ((grad.double() - wanted).abs() <= 2e-3 * plan.full.abs().sum(0)[:, None]).all()
    assert plan._family.forward.later is None and "compared_after" in plan.info


def test_a_captured_plan_stays_as_it_is(plan):
    B = torch.randn(4096, 128, device="cuda")
    plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    system = plan.system
    assert plan._family.forward.later is None
    for factor in (1.0, 2.0):
        plan.update_values(factor * plan.values)
        plan.full *= factor
        B.copy_(torch.randn_like(B))
        C.fill_(float("nan"))
        graph.replay()
        check(plan, C, B)
        plan @ B
    assert plan.system == system


def test_streams_meet_the_change(plan):
    B = torch.randn(4096, 128, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    plan._family.forward.later.left = 20
    found = []
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            found.append(plan @ B)
    torch.cuda.synchronize()
    for C in found:
        check(plan, C, B)
    assert plan._family.forward.later is None
