"""A plan's values: replaced, given for one product, followed while an optimiser changes them."""

from __future__ import annotations

import gc
import itertools

import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from tests.contracts.cases import assert_close, csr_of
from tests.plans import MATRIX, dense, made, said


@pytest.mark.parametrize("name", ["update_values", "run"])
@pytest.mark.parametrize(
    "values, kind, text",
    [
        ([1.0], TypeError, "a torch tensor, got list. Convert it with torch.as_tensor."),
        (
            torch.ones(3), ValueError,
            f"of shape ({MATRIX.nnz},), got (3,). "
            "Give one value per entry of the matrix that was planned.",
        ),
        (
            torch.ones(MATRIX.nnz, device="meta"), ValueError,
            "on cpu, got meta. Call values.to('cpu').",
        ),
        (
            torch.ones(MATRIX.nnz, dtype=torch.int64), TypeError,
            "a float tensor, got torch.int64. Call values.to(torch.float32).",
        ),
    ],
    ids=["list", "length", "device", "dtype"],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(name, values, kind, text):
    plan = made()
    if name == "run":
        assert said(kind, lambda: plan.run(dense(), values=values)) == f"run: values must be {text}"
    else:
        assert said(kind, lambda: plan.update_values(values)) == (
            f"update_values: values must be {text}"
        )


def messy() -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Edges out of order, with duplicates: 8 entries at 4 places."""
    edges = torch.tensor([[2, 0, 2, 1, 0, 2, 0, 2], [1, 3, 1, 0, 3, 0, 3, 1]])
    return edges, torch.arange(1.0, 9.0), (3, 4)


def messy_dense(weight: torch.Tensor) -> torch.Tensor:
    edges, _, shape = messy()
    return torch.zeros(shape).index_put(tuple(edges), weight, accumulate=True)


def test_values_are_given_in_the_order_of_the_input_and_duplicates_add_up():
    edges, weight, shape = messy()
    plan, B = st.plan((edges, weight, shape), 3), torch.randn(4, 3)
    assert plan.nnz == 4
    assert torch.allclose(plan @ B, messy_dense(weight) @ B)
    fresh = torch.tensor([5.0, -1.0, 2.0, 0.5, 3.0, 7.0, 1.0, -2.0])
    assert torch.allclose(plan.run(B, values=fresh), messy_dense(fresh) @ B)
    assert torch.allclose(plan @ B, messy_dense(weight) @ B), "for that product only"
    plan.update_values(fresh)
    assert torch.allclose(plan @ B, messy_dense(fresh) @ B)
    assert torch.allclose(plan.T @ torch.eye(3), messy_dense(fresh).T)


def test_gradients_reach_every_one_of_several_duplicates():
    edges, weight, shape = messy()
    plan, B = st.plan((edges, weight, shape), 3), torch.randn(4, 3)
    one, other = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    (plan.run(B, values=one) ** 2).sum().backward()
    ((messy_dense(other) @ B) ** 2).sum().backward()
    assert torch.allclose(one.grad, other.grad)


def test_a_pattern_can_be_given_values_later():
    csr, B = csr_of(MATRIX, pattern=True), dense()
    plan = st.plan(csr, 4)
    assert plan.values is None
    assert_close(plan.T @ torch.ones(30, 4), csr.transposed(), torch.ones(30, 4))
    fresh = torch.randn(csr.nnz)
    plan.update_values(fresh)
    assert_close(plan @ B, csr.with_values(fresh), B)
    assert_close(plan.T @ torch.ones(30, 4), csr.with_values(fresh).transposed(), torch.ones(30, 4))
    fresh.zero_()
    assert float(plan.values.abs().max()) > 0, "the plan must hold a copy"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_values_of_another_float_type_are_converted(dtype):
    plan, B = made(), dense()
    fresh = torch.randn(plan.nnz).to(dtype)
    plan.update_values(fresh)
    assert plan.values.dtype is torch.float32
    assert_close(plan @ B, csr_of(MATRIX).with_values(fresh.float()), B)


def train(
    plan: st.Plan, weight: torch.nn.Parameter, B: torch.Tensor, goal: torch.Tensor
) -> list[float]:
    optimiser = torch.optim.SGD([weight], lr=0.05)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = ((plan @ B - goal) ** 2).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["planned", "updated"])
def test_an_optimiser_s_steps_are_followed(how):
    edges, weight, shape = messy()
    parameter = torch.nn.Parameter(weight.clone())
    plan = st.plan((edges, parameter if how == "planned" else weight, shape), 3)
    if how == "updated":
        plan.update_values(parameter)
    B = torch.randn(4, 3)
    losses = train(plan, parameter, B, messy_dense(torch.ones(8)) @ B)
    assert all(after < before for before, after in itertools.pairwise(losses))
    with torch.no_grad():
        assert torch.allclose(plan @ B, messy_dense(parameter) @ B, atol=1e-6)
    assert torch.allclose(plan.values.detach(), messy_dense(parameter)[messy_dense(weight) != 0])


def test_a_plan_stops_following_when_it_is_given_plain_values():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    csr, B = csr_of(MATRIX), dense()
    plan = st.plan(csr.with_values(parameter), 4)
    plan.update_values(torch.full((MATRIX.nnz,), 2.0))
    with torch.no_grad():
        parameter.zero_()
    assert not (plan @ B).requires_grad
    assert_close(plan @ B, csr.with_values(torch.full((MATRIX.nnz,), 2.0)), B)


def test_the_transpose_follows_too():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    csr, G = csr_of(MATRIX), dense(30)
    plan = st.plan(csr.with_values(parameter), 4)
    plan.T @ G
    with torch.no_grad():
        parameter.mul_(3)
        assert_close(plan.T @ G, csr.with_values(parameter.detach()).transposed(), G)


def test_two_products_may_wait_for_one_backward():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    plan = st.plan(csr_of(sp.csr_array(MATRIX)).with_values(parameter), 4)
    first, second = dense(), dense()
    ((plan @ first).sum() + (plan @ second).sum()).backward()
    rows = csr_of(MATRIX).indices.long()
    assert torch.allclose(parameter.grad, (first + second).sum(1)[rows], atol=1e-5)


def test_values_given_to_the_transpose_are_the_plan_s_too():
    csr, B, G = csr_of(MATRIX), dense(), dense(30)
    plan = made()
    fresh = torch.randn(MATRIX.nnz)
    plan.T.update_values(fresh)
    expected = csr.transposed().with_values(fresh)
    assert_close(plan.T @ G, expected, G)
    assert_close(plan @ B, expected.transposed(), B)
    plan.update_values(csr.values)
    assert_close(plan.T @ G, csr.transposed(), G)


def test_a_parameter_given_to_the_transpose_is_followed_by_both():
    plan, B, G = made(), dense(), dense(30)
    flipped = csr_of(MATRIX).transposed()
    parameter = torch.nn.Parameter(torch.randn(MATRIX.nnz))
    kept = plan.T
    kept.update_values(parameter)
    for step in range(2):
        now = flipped.with_values(parameter.detach())
        with torch.no_grad():
            assert_close(kept @ G, now, G)
            assert_close(plan @ B, now.transposed(), B)
        ((plan @ B).sum() + (kept @ G).sum()).backward()
        assert bool(parameter.grad.all()), step
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        parameter.grad = None


def test_a_transpose_taken_earlier_follows_a_parameter_given_later():
    plan, G = made(), dense(30)
    kept = plan.T
    parameter = torch.nn.Parameter(torch.randn(MATRIX.nnz))
    plan.update_values(parameter)
    (kept @ G).sum().backward()
    assert bool(parameter.grad.any())


def test_the_transpose_of_the_transpose_is_the_plan():
    plan = made()
    kept = plan.T
    assert kept.T is plan
    B = dense(30, requires_grad=True)
    (kept @ B).sum().backward()
    assert_close(B.grad, csr_of(MATRIX), torch.ones(20, 4))


def test_a_transpose_outlives_its_plan():
    kept = made().T
    gc.collect()
    fresh, B = torch.randn(MATRIX.nnz), dense()
    kept.update_values(fresh)
    assert_close(kept.T @ B, csr_of(MATRIX).transposed().with_values(fresh).transposed(), B)


@pytest.mark.parametrize("how", ["updated", "passed"])
def test_a_parameter_that_a_state_dict_replaced_can_be_followed(how):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(MATRIX.nnz))

    layer, B = Layer(), dense()
    plan = made().update_values(layer.weight)
    fresh = torch.randn(MATRIX.nnz)
    layer.load_state_dict({"weight": fresh}, assign=True)
    if how == "updated":
        C = plan.update_values(layer.weight) @ B
    else:
        C = plan.run(B, values=layer.weight)
    assert_close(C.detach(), csr_of(MATRIX).with_values(fresh), B)
    C.sum().backward()
    assert bool(layer.weight.grad.any())
