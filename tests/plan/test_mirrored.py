"""Plans of symmetric matrices: gradients by the plan itself, and what a transpose shares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.nn import GCNConv
from sparsetile.plan.family import Family
from sparsetile.plan.report import all_parts
from tests.contracts.cases import runs_on_this_gpu

ROWS, N = 60, 8


def adjacency(kind: str) -> Tensor:
    """A dense matrix: symmetric, of a symmetric pattern only, or neither."""
    generator = torch.Generator().manual_seed(3)
    upper = (torch.rand(ROWS, ROWS, generator=generator) < 0.1).float().triu()
    pattern = ((upper + upper.T) > 0).float()
    if kind == "directed":
        pattern = (torch.rand(ROWS, ROWS, generator=generator) < 0.1).float()
    weights = torch.rand(ROWS, ROWS, generator=generator) + 0.5
    return pattern * (weights + weights.T if kind == "symmetric" else weights)


def gradient(plan: st.Plan, B: Tensor, grad: Tensor) -> Tensor:
    leaf = B.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(plan.run(leaf), leaf, grad)
    return found


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(ROWS, N), torch.randn(ROWS, N)


@pytest.mark.parametrize("kind", ["symmetric", "pattern", "directed"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_those_of_the_transpose(
    kind: str, reduce: str, operands: tuple[Tensor, Tensor]
):
    A, (B, grad) = adjacency(kind), operands
    plan = st.plan(A.to_sparse_csr(), N)
    leaf = B.clone().requires_grad_()
    (found,) = torch.autograd.grad(plan.run(leaf, reduce=reduce), leaf, grad)
    scale = (A != 0).sum(1, keepdim=True).clamp(min=1) if reduce == "mean" else 1
    torch.testing.assert_close(found, A.T @ (grad / scale))
    assert plan._family.symmetric == (kind == "symmetric")
    turned = [each for each in plan._family.variants() if each.transposed]
    assert bool(turned) == (kind != "symmetric")


def test_a_symmetric_plan_keeps_no_transpose_for_gradients(operands: tuple[Tensor, Tensor]):
    plan = st.plan(adjacency("symmetric").to_sparse_csr(), N)
    before = plan.info["bytes"]
    gradient(plan, *operands)
    assert plan.info["bytes"] == before and plan._family.order is None
    directed = st.plan(adjacency("directed").to_sparse_csr(), N)
    gradient(directed, *operands)
    assert any(name.startswith("transpose") for name in directed.info["bytes"])


def test_parts_are_named_by_direction_and_by_the_type_that_they_were_cast_to():
    plan = st.plan(adjacency("directed").to_sparse_csr(), N)
    own = set(plan.info["bytes"])
    assert not any(":" in name for name in own)
    for dtype in (torch.float32, torch.float64):
        for transposed in (False, True):
            plan._family.prepare(transposed, dtype, N, False)
    kinds = {name.partition(":")[0] for name in set(plan.info["bytes"]) - own}
    assert kinds == {"transpose", "float64", "transpose float64"}
    names = all_parts(plan._family, plan._variant)
    matrices = {name for name in names if name.endswith("matrix")}
    assert matrices == {"matrix", "transpose: matrix"}, "casts share them"


@pytest.mark.parametrize("kind", ["symmetric", "pattern"])
def test_one_pattern_is_built_once(kind: str, operands: tuple[Tensor, Tensor]):
    A, (B, _) = adjacency(kind), operands
    plan = st.plan(A.to_sparse_csr(), N)
    turned = plan.T
    assert turned._variant.built is plan._variant.built and turned._csr.indices is plan._csr.indices
    assert turned.T is plan
    torch.testing.assert_close(turned @ B, A.T @ B)
    held = plan.info["bytes"]
    assert not {"transpose: format", "transpose: matrix", "transpose: exact system"} & held.keys()


def test_unsymmetric_new_values_get_a_transpose(operands: tuple[Tensor, Tensor]):
    A, other = adjacency("symmetric"), adjacency("pattern")
    plan, (B, grad) = st.plan(A.to_sparse_csr(), N), operands
    gradient(plan, B, grad)
    assert plan._family.symmetric
    plan.update_values(other.to_sparse_csr().values())
    torch.testing.assert_close(plan @ B, other @ B)
    torch.testing.assert_close(gradient(plan, B, grad), other.T @ grad)
    assert not plan._family.symmetric
    plan.update_values(A.to_sparse_csr().values())
    torch.testing.assert_close(gradient(plan, B, grad), A.T @ grad)


def test_a_transpose_that_was_read_is_used(operands: tuple[Tensor, Tensor]):
    A, (B, grad) = adjacency("symmetric"), operands
    plan = st.plan(A.to_sparse_csr(), N)
    gradient(plan, B, grad)
    turned, other = plan.T, adjacency("pattern")
    plan.update_values(other.to_sparse_csr().values())
    torch.testing.assert_close(turned @ B, other.T @ B)
    torch.testing.assert_close(gradient(plan, B, grad), other.T @ grad)


def test_a_gradient_after_new_values_is_refused(operands: tuple[Tensor, Tensor]):
    plan, (B, grad) = st.plan(adjacency("symmetric").to_sparse_csr(), N), operands
    leaf = B.clone().requires_grad_()
    out = plan.run(leaf)
    plan.update_values(adjacency("pattern").to_sparse_csr().values())
    with pytest.raises(RuntimeError, match="new ones since"):
        out.backward(grad)


def test_a_cast_mirrors_as_its_plan_does(operands: tuple[Tensor, Tensor]):
    for kind in ("symmetric", "pattern"):
        A, (B, grad) = adjacency(kind), operands
        plan = st.plan(A.to_sparse_csr(), N)
        with torch.autocast("cpu", torch.bfloat16):
            found = gradient(plan, B, grad.bfloat16())
        expected = A.bfloat16().float().T @ grad.bfloat16().float()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert plan._family.symmetric == (kind == "symmetric")


def test_gradients_of_gradients(operands: tuple[Tensor, Tensor]):
    A, (B, grad) = adjacency("symmetric"), operands
    plan = st.plan(A.to_sparse_csr(), N)
    leaf, of_out = B.clone().requires_grad_(), grad.clone().requires_grad_()
    (d_B,) = torch.autograd.grad(plan.run(leaf), leaf, of_out, create_graph=True)
    (again,) = torch.autograd.grad(d_B, of_out, B)
    torch.testing.assert_close(again, A @ B)


def test_moving_keeps_gradients(operands: tuple[Tensor, Tensor]):
    A, (B, grad) = adjacency("symmetric"), operands
    plan = st.plan(A.to_sparse_csr(), N)
    gradient(plan, B, grad)
    plan.to(torch.float64)
    found = gradient(plan, B.double(), grad.double())
    torch.testing.assert_close(found, A.double().T @ grad.double())


def test_layers_of_undirected_graphs_plan_no_transpose(operands: tuple[Tensor, Tensor], calls_of):
    planned = calls_of(Family, "_transpose")
    edges = adjacency("symmetric").nonzero().T.contiguous()
    x = operands[0].clone().requires_grad_()
    GCNConv(N, N)(x, edges).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0) and not planned


@pytest.mark.parametrize("symmetric", [True, False])
def test_captured_graphs_refuse_what_they_cannot_follow(
    symmetric: bool, operands: tuple[Tensor, Tensor]
):
    A, (B, grad) = adjacency("symmetric"), operands
    plan = st.plan(A.to_sparse_csr(), N)
    gradient(plan, B, grad)
    plan._family.symmetric_captured = True
    other = (2 * A if symmetric else adjacency("pattern")).to_sparse_csr().values()
    if not symmetric:
        with pytest.raises(ValueError, match=r"Read plan\.T before the capture"):
            plan.update_values(other)
        torch.testing.assert_close(plan @ B, A @ B)
        return
    plan.update_values(other)
    torch.testing.assert_close(gradient(plan, B, grad), 2 * A.T @ grad)
    assert plan._family.symmetric


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("system", ["csr", "acc", "dense", "rsh", "voltrix", "wcsr", "brp"])
def test_captured_training_of_a_symmetric_plan(system: str, monkeypatch: pytest.MonkeyPatch):
    if not runs_on_this_gpu(system):
        pytest.skip(f"this GPU has no {system}")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    generator = torch.Generator().manual_seed(1)
    upper = ((torch.rand(500, 500, generator=generator) < 0.05).float()).triu()
    A = ((upper + upper.T) * 0.5).cuda()
    plan = st.plan(A.to_sparse_csr(), 32, system=system)
    B = torch.randn(500, 32, device="cuda", requires_grad=True)
    grad = torch.randn(500, 32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            B.grad = None
            plan.run(B, relu=True).backward(grad)
    torch.cuda.current_stream().wait_stream(side)
    assert plan._family.symmetric and not plan._family.symmetric_captured
    B.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.run(B, relu=True)
        out.backward(grad)
    assert plan._family.symmetric_captured
    with torch.no_grad():
        B.normal_()
        grad.normal_()
    graph.replay()
    expected = A.double().T @ (grad * (out > 0)).double()
    torch.testing.assert_close(B.grad.double(), expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match=r"Read plan\.T"):
        plan.update_values(torch.rand(plan.nnz, device="cuda"))
    plan.update_values(plan.values * 3)
    graph.replay()
    torch.testing.assert_close(B.grad.double(), 3 * expected, rtol=2e-2, atol=6e-2)


def test_the_backward_pass_asks_once(operands: tuple[Tensor, Tensor], calls_of):
    plan = st.plan(adjacency("symmetric").to_sparse_csr(), N)
    gradient(plan, *operands)
    asked = calls_of(Family, "_first_gradient")
    gradient(plan, *operands)
    assert not asked
