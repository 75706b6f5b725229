"""``Plan.linear``: what it returns, its gradients, what it refuses, and when one kernel does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.plan.traced import operators as ops
from sparsetile.systems.cpu.system import CPURunner
from tests.contracts.cases import csr_of
from tests.plans import MATRIX, made, said

F16, F32, F64 = torch.float16, torch.float32, torch.float64
DENSE = torch.from_numpy(MATRIX.toarray())  # 30 x 20


def layer(X: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """The same in torch, in float64."""
    Y = torch.nn.functional.linear(X.double(), DENSE, None if bias is None else bias.double())
    return torch.relu(Y) if relu else Y


def plan64(**options) -> st.Plan:
    return st.plan(csr_of(MATRIX, dtype=F64), 4, **options)


@pytest.mark.parametrize("system", ["cpu", "dense"])
@pytest.mark.parametrize("lead", [(), (7,), (2, 3), (0,), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("relu", [False, True])
def test_a_linear_layer_is_that_of_torch(system, lead, relu):
    plan, X, bias = plan64(system=system), torch.randn(*lead, 20, dtype=F64), torch.randn(30)
    for given in (None, bias.double()):
        Y = plan.linear(X, bias=given, relu=relu)
        assert Y.shape == (*lead, 30) and Y.is_contiguous() and Y.dtype is F64
        assert torch.allclose(Y, layer(X, given, relu))


def test_alpha_scales_the_product_and_not_the_bias():
    X, bias = torch.randn(5, 20, dtype=F64), torch.randn(30, dtype=F64)
    found = plan64().linear(X, bias=bias, alpha=0.5)
    assert torch.allclose(found, layer(X) / 2 + bias)


def test_x_of_any_strides_is_taken():
    plan, wide = plan64(), torch.randn(6, 40, dtype=F64)
    for X in (wide[:, ::2], wide.T[:20].T, wide[:1, :20].expand(3, 20), wide[::3, 20:]):
        assert torch.allclose(plan.linear(X), layer(X))


def test_sixteen_bits_are_rounded_once_after_the_bias():
    plan = st.plan(csr_of(MATRIX, dtype=F16), 4)
    X, bias = torch.randn(5, 20).to(F16), torch.randn(30)
    wide = plan.linear(X, bias=bias, out_dtype=F32)
    found = plan.linear(X, bias=bias)
    assert wide.dtype is F32 and found.dtype is F16
    assert torch.equal(found, wide.to(F16))
    assert torch.allclose(wide.double(), layer(X, bias), atol=0.02)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_of_input_values_and_bias_are_right(relu):
    csr = csr_of(MATRIX, dtype=F64)
    plan = st.plan(csr, 4)
    X = torch.randn(2, 3, 20, dtype=F64, requires_grad=True)
    bias = torch.randn(30, dtype=F64, requires_grad=True)
    values = csr.values.clone().requires_grad_()

    def product(x: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return plan.update_values(v).linear(x, bias=b, relu=relu, alpha=1.5)

    assert torch.autograd.gradcheck(product, (X, bias, values))


def test_autocast_multiplies_in_its_own_type():
    X = torch.randn(5, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Y = made().linear(X, relu=True)
    assert Y.dtype is torch.bfloat16
    assert torch.allclose(Y.double(), layer(X, None, True), atol=0.1)


def test_a_compiled_layer_is_traced_whole():
    plan, X, bias = plan64(), torch.randn(5, 20, dtype=F64), torch.randn(30, dtype=F64)
    compiled = torch.compile(
        lambda x: plan.linear(x, bias=bias, relu=True), backend="eager", fullgraph=True
    )
    assert torch.allclose(compiled(X), layer(X, bias, True))


# -- one kernel


class Fusing(CPURunner):
    """Stands for a runner that fuses: it sees X and Y as transposes, and the bias of rows."""

    fuses_linear = True
    seen: list[tuple]

    def spmm(self, parts, values, packed, B, out, epilogue=None):
        self.seen.append((B, out, epilogue))
        out.copy_(epilogue.alpha * DENSE.to(out.dtype) @ B + epilogue.row_bias[:, None])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> tuple[st.Plan, list[tuple]]:
    plan = plan64(system="cpu")
    work = plan._variant.runner
    monkeypatch.setattr(work, "__class__", Fusing)
    monkeypatch.setattr(work, "seen", [], raising=False)
    return plan, work.seen


def test_a_system_that_fuses_gets_x_and_y_where_they_lie(fused):
    plan, seen = fused
    assert plan.fuses_linear and not made(system="dense").fuses_linear
    X, bias = torch.randn(2, 3, 20, dtype=F64), torch.randn(30, dtype=F64)
    Y = plan.linear(X, bias=bias, alpha=2.0)
    assert torch.allclose(Y, 2 * layer(X) + bias, atol=1e-6)
    ((B, out, epilogue),) = seen
    assert B.data_ptr() == X.data_ptr() and B.shape == (20, 6) and B.stride() == (1, 20)
    assert out.data_ptr() == Y.data_ptr() and out.shape == (30, 6) and out.stride() == (1, 30)
    assert epilogue.row_bias.dtype is F32 and epilogue.bias is None and not epilogue.plain
    compiled = torch.compile(lambda x: plan.linear(x, bias=bias), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(X), layer(X) + bias, atol=1e-6) and len(seen) == 2


def test_gradients_go_the_general_way(fused, monkeypatch):
    plan, seen = fused
    X = torch.randn(3, 20, dtype=F64, requires_grad=True)
    monkeypatch.setattr(Fusing, "spmm", CPURunner.spmm)
    assert torch.allclose(plan.linear(X), layer(X)) and not seen


def test_the_operator_says_which_systems_have_it():
    plan = made(system="cpu")
    text = said(
        RuntimeError,
        lambda: ops.linear(
            plan.flat[0], plan.values, [], torch.randn(2, 20), None, plan.flat[1], 1.0, False,
            None,
        ),
    )  # fmt: skip
    assert text == (
        "linear: recipe must be of a system that fuses linear layers, got CPURunner. Call "
        "plan.linear, which works with every system."
    )


# -- mistakes


def test_what_is_wrong_with_x_is_said():
    plan = made()
    assert said(TypeError, lambda: plan.linear([1.0])) == (
        "linear: X must be a torch tensor, got list. Convert it with torch.as_tensor."
    )
    assert said(ValueError, lambda: plan.linear(torch.randn(20, 3))) == (
        "linear: X must be of shape [..., 20], got (20, 3). A is 30x20: X needs one feature per "
        "column of A."
    )
    assert said(ValueError, lambda: plan.linear(torch.randn(3, 20, device="meta"))) == (
        "linear: X must be on cpu like the plan, got meta. Move it with X.to('cpu'), or plan with "
        "A on X's device."
    )
    assert said(TypeError, lambda: plan.linear(torch.eye(20).to_sparse())) == (
        "linear: X must be a dense tensor, got torch.sparse_coo. Call X.to_dense()."
    )
    assert said(TypeError, lambda: plan.linear(torch.randn(3, 20).half())) == (
        "linear: X must be torch.float32 like the plan, got torch.float16. Cast it with "
        "X.to(torch.float32), or make a plan with dtype=torch.float16."
    )


def test_what_is_wrong_with_the_rest_is_said():
    plan, X = made(), torch.randn(3, 20)
    assert said(TypeError, lambda: plan.linear(X, bias=1.0)) == (
        "linear: bias must be a torch tensor, got float. Convert it with torch.as_tensor."
    )
    assert said(ValueError, lambda: plan.linear(X, bias=torch.randn(20))) == (
        "linear: bias must be of shape (30,) on cpu, got (20,) on cpu. Give one number per row of "
        "A."
    )
    assert said(TypeError, lambda: plan.linear(X, out_dtype=F16)) == (
        "linear: out_dtype must be torch.float32 or torch.float32, got torch.float16. Cast the "
        "result instead."
    )
