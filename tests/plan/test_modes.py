"""Products and plans in torch's modes and views: inference mode, autocast, negative views."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.plan import eager as gradients
from sparsetile.plan.plan import Plan
from sparsetile.systems.cpu.runner import CPURunner
from sparsetile.systems.cpu.system import CPUSystem
from sparsetile.systems.dense.system import DenseSystem
from tests.plans import MATRIX, dense, made, said

# -- inference mode


def trains(plan: st.Plan) -> None:
    """Both gradients can be taken outside of inference mode."""
    B = dense(requires_grad=True)
    values = torch.ones(MATRIX.nnz, requires_grad=True)
    plan.run(B, values=values).sum().backward()
    (plan @ B).sum().backward()
    (plan.T @ dense(30, requires_grad=True)).sum().backward()
    assert bool(B.grad.any()) and bool(values.grad.any())


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_a_plan_made_in_inference_mode_trains_afterwards(system):
    with torch.inference_mode():
        plan = made(system=system)
        plan @ dense()
    trains(plan)


def test_a_plan_of_inference_tensors_trains_afterwards():
    with torch.inference_mode():
        edges = torch.tensor([[2, 0, 1], [1, 0, 2]]), torch.ones(3)
        plan = st.plan((*edges, (3, 3)), 4)
    outside = st.plan((*edges, (3, 3)), 4)
    for each in (plan, outside):
        B = torch.randn(3, 4, requires_grad=True)
        (each @ B).sum().backward()
        assert torch.equal(B.grad, torch.ones(3, 4))


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_a_transpose_first_used_in_inference_mode_trains_afterwards(system):
    plan = made(system=system)
    with torch.inference_mode():
        plan.T @ dense(30)
    trains(plan)


def test_values_updated_and_cast_in_inference_mode_train_afterwards():
    plan = st.plan((*(torch.arange(3), torch.tensor([0, 1])), None, (2, 2)), 4)
    with torch.inference_mode():
        plan.update_values(torch.ones(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plan @ torch.ones(2, 4)
    B = torch.ones(2, 4, requires_grad=True)
    (plan @ B).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (plan @ B).sum().backward()
    assert torch.equal(B.grad, torch.full((2, 4), 2.0))


def test_a_plan_loaded_in_inference_mode_trains_afterwards(tmp_path):
    made().save(tmp_path / "a.safetensors")
    with torch.inference_mode():
        plan = st.load_plan(tmp_path / "a.safetensors")
    trains(plan)


def test_one_call_in_inference_mode_leaves_a_plan_that_trains():
    csr = st.plan(MATRIX, 4, device="cpu")._csr
    A = (csr.indptr, csr.indices, torch.ones(csr.nnz, requires_grad=True), csr.shape)
    with torch.inference_mode():
        st.spmm(A, dense())
    st.spmm(A, dense()).sum().backward()
    assert bool(A[2].grad.any())


# -- negative views


def negative(tensor: Tensor) -> Tensor:
    """The same numbers in a view that torch negates lazily."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("system", ["cpu", "dense"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_negative_views_of_b_and_of_the_values_keep_their_signs(system, n, reduce):
    plan, B = made(system=system), dense(20, n)
    values = torch.randn(MATRIX.nnz)
    expected = plan.run(B, reduce=reduce, values=values)
    torch.testing.assert_close(plan.run(negative(B), reduce=reduce), plan.run(B, reduce=reduce))
    torch.testing.assert_close(
        plan.run(negative(B), reduce=reduce, values=negative(values)), expected
    )
    plan.update_values(negative(values))
    torch.testing.assert_close(plan.run(B, reduce=reduce), expected)
    imaginary = torch.complex(B, -B).conj().imag
    assert imaginary.is_neg()
    torch.testing.assert_close(plan.run(imaginary, reduce=reduce), expected)


def test_a_negative_view_takes_no_short_path(calls_of):
    """Runners see addresses alone, so that what they are given must not be negated lazily."""
    seen = calls_of(CPURunner, "spmm")
    plan, B = made(system="cpu"), dense()
    plan._variant.bound = lambda B, out: pytest.fail("not resolved")
    plan @ negative(B)
    plan.run(negative(B), values=negative(torch.ones(MATRIX.nnz)))
    plan.linear(negative(dense(3, 20)))
    operands = [operand for call in seen for operand in (call.given[2], call.given[4])]
    assert len(seen) == 3 and not any(each.is_neg() for each in operands if each is not None)


def test_matrices_and_biases_may_be_negative_views():
    B, bias = dense(), torch.randn(4)
    csr = made()._csr
    values = torch.randn(csr.nnz)
    plan = st.plan((csr.indptr, csr.indices, negative(values), csr.shape), 4)
    expected = made().update_values(values).run(B, bias=bias)
    torch.testing.assert_close(plan.run(B, bias=negative(bias)), expected)
    A = (negative(csr.indptr), negative(csr.indices), values, csr.shape)
    torch.testing.assert_close(st.plan(A, 4).run(B, bias=bias), expected)
    torch.testing.assert_close(st.spmm(A, negative(B)), expected - bias)


@pytest.mark.parametrize(
    "out, got",
    [
        (torch._neg_view(torch.empty(30, 4)), "a negative view"),
        (torch.empty(30, 1).expand(30, 4), "strides (1, 0)"),
    ],
    ids=["negative", "expanded"],
)
def test_an_out_that_cannot_be_written_in_place_is_refused(out, got):
    assert said(ValueError, lambda: made().run(dense(), out=out)) == (
        f"run: out must be a tensor whose elements have memory of their own, got {got}. "
        "Allocate it with torch.empty, or omit out=."
    )


# -- autocast


def test_autocast_keeps_the_type_of_a_system_that_does_not_take_the_lower(monkeypatch):
    plan, B = made(system="cpu"), dense()
    expected = plan @ B
    monkeypatch.setattr(CPUSystem, "dtypes", (torch.float32, torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan @ B, expected)
        assert (plan @ B.bfloat16()).dtype is torch.float32


def test_a_library_s_product_keeps_its_type_under_autocast():
    """``dense`` multiplies through torch, whose autocast must not round an operator's operands."""
    plan = st.plan(MATRIX, 4, dtype=torch.bfloat16, system="dense", device="cpu")
    B = dense().bfloat16()
    expected = plan.run(B, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan.run(B, out_dtype=torch.float32), expected)


# -- threads


def test_threads_that_need_the_transpose_at_once_share_one(calls_of):
    plan, at_once = made(), threading.Barrier(4)
    builds = calls_of(st.CSR, "transposed")

    def work(_: int) -> Plan:
        at_once.wait()
        return plan.T

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert all(each is found[0] for each in found) and len(builds) == 1


def test_tensors_and_recipe_change_as_one():
    plan = made()
    before = plan.flat
    plan.flat_with_transpose()
    assert plan.flat is plan.flat and before[1] != plan.flat[1]
    assert len(before[0]) < len(plan.flat[0]), "what another thread read earlier stays whole"


def trained(plan: Plan, B: Tensor, bias: Tensor, autocast: bool) -> list[Tensor]:
    b, added = B.clone().requires_grad_(), bias.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        C = plan.run(b, bias=added, relu=True)
    C.float().square().sum().backward()
    return [C.detach(), b.grad, added.grad]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_trains_without_operators(dtype, reduce, calls_of):
    """A plan in autocast's type, or in a wider one, multiplies as a plan of that type does."""
    A = MATRIX if dtype is torch.float32 else MATRIX.astype("float32")
    plan = st.plan(A, 4, dtype=dtype, device="cpu")
    lower = st.plan(A, 4, dtype=torch.bfloat16, device="cpu")
    B, G = dense(), torch.randn(plan.shape[0], dense().shape[1]).bfloat16()
    b = B.bfloat16().requires_grad_()
    expected = lower.run(b, reduce=reduce)
    expected.backward(G)
    module = importlib.import_module("sparsetile.plan.plan")
    operators = calls_of(module, "general_product")
    mine = B.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = plan.run(mine, reduce=reduce)
    found.backward(G)
    assert found.dtype is torch.bfloat16 and torch.equal(found, expected)
    assert mine.grad.dtype is torch.float32 and torch.equal(mine.grad, b.grad.float())
    assert not operators


def test_autocast_follows_new_values_and_shares_the_pattern():
    plan, B = made(), dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = trained(plan, B, torch.ones(B.shape[1]), True)
        family = plan._family
        casts = [family.known(side, torch.bfloat16, 4) for side in (False, True)]
        for cast, whole in zip(casts, (plan, plan.T), strict=True):
            assert cast.csr.indices.data_ptr() == whole._csr.indices.data_ptr()
        plan.update_values(2 * plan.values)
        after = trained(plan, B, torch.ones(B.shape[1]), True)
        assert family.known(False, torch.bfloat16, 4) is casts[0]
    fresh = st.plan(MATRIX * 2, 4, dtype=torch.bfloat16, device="cpu")
    expected = trained(fresh, B.bfloat16(), torch.ones(B.shape[1]), False)
    for mine, other, old in zip(after, expected, before, strict=True):
        assert torch.equal(mine, other.to(mine.dtype)) and not torch.equal(mine, old)
    plan.to(torch.float64)
    assert {each.dtype for each in family.variants()} == {torch.float64}


def test_a_gradient_after_new_values_is_refused_under_autocast_too():
    plan, B = made(), dense().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        C = plan @ B
    plan.update_values(2 * plan.values)
    text = said(RuntimeError, lambda: C.sum().backward())
    assert "A's values must stay as they are" in text


@pytest.mark.parametrize("limit", [0, 2**40])
def test_relu_and_bias_have_the_same_gradients_in_one_node_and_in_two(limit, constants):
    constants(gradients, APART_BYTES=limit)
    plan, B, bias = made(), dense(), torch.randn(dense().shape[1])
    C, d_B, d_bias = trained(plan, B, bias, False)
    full = plan @ torch.eye(plan.shape[1])
    b, added = B.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = (full @ b + added).relu()
    expected.square().sum().backward()
    for mine, other in zip((C, d_B, d_bias), (expected, b.grad, added.grad), strict=True):
        torch.testing.assert_close(mine, other.detach())
    # Gradients of gradients, and a bias alone.
    b = B.double().requires_grad_()
    wide = st.plan(MATRIX, 4, dtype=torch.float64, device="cpu")
    assert torch.autograd.gradgradcheck(
        lambda x: wide.run(x, bias=bias.double(), relu=True).square(), b
    )
    added = bias.clone().requires_grad_()
    plan.run(B, bias=added, relu=True).sum().backward()
    torch.testing.assert_close(added.grad, (C > 0).float().sum(0))


def test_relu_has_its_gradient_where_rows_of_a_result_are_part_of_more(monkeypatch, constants):
    """Systems may return the first columns of wider rows; the host does so of a large C."""
    plan, B, bias = made(), dense(), torch.randn(dense().shape[1])
    expected = trained(plan, B, bias, False)
    constants(gradients, APART_BYTES=0)
    real = gradients.plain_product
    monkeypatch.setattr(
        gradients, "plain_product", lambda *given: torch.cat([real(*given)] * 2, 1)[:, : B.shape[1]]
    )
    for mine, other in zip(trained(plan, B, bias, False), expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_large_fused_product_on_the_host_has_gradients():
    rows = 2**14
    plan = st.plan(sp.eye_array(rows, dtype="float32", format="csr"), 130, device="cpu")
    B, bias = torch.randn(rows, 130, requires_grad=True), torch.zeros(130, requires_grad=True)
    C = plan.run(B, bias=bias, relu=True)
    C.sum().backward()
    assert C.nbytes >= gradients.APART_BYTES and torch.equal(B.grad, (C > 0).float())
    torch.testing.assert_close(bias.grad, (C > 0).float().sum(0))


@pytest.mark.parametrize("how", ["eager", "batch", "trainable", "out"])
def test_autocast_of_a_system_for_one_type_goes_through_the_exact_one(how, monkeypatch):
    """As ``half`` has it: ``dense`` stands for a system that takes float32 alone."""
    monkeypatch.setattr(DenseSystem, "dtypes", (torch.float32,))
    monkeypatch.setattr(DenseSystem, "casts_to_exact", True)
    plan = st.plan(MATRIX, 4, dtype=torch.float32, system="dense", device="cpu")
    lower = st.plan(MATRIX, 4, dtype=torch.bfloat16, system="cpu", device="cpu")
    B = dense().float()
    expected = lower @ B.bfloat16()
    if how == "trainable":
        leaf = plan.values.clone().requires_grad_()
        plan.update_values(leaf)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if how == "batch":
            assert torch.equal(plan @ torch.stack([B, B]), torch.stack([expected] * 2))
            return
        if how == "out":
            out = torch.empty_like(expected)
            assert plan.run(B, out=out) is out and torch.equal(out, expected)
            return
        C = plan @ B
    assert C.dtype is torch.bfloat16 and torch.equal(C, expected)
    if how == "trainable":
        C.float().sum().backward()
        assert leaf.grad is not None and bool((leaf.grad != 0).any())
    elif how == "eager":
        assert plan._family.known(False, torch.bfloat16, plan.n).system == "cpu"
        b = B.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (plan @ b).float().sum().backward()
        assert b.grad.dtype is torch.float32
