"""Forward-mode derivatives: tangents of B, of A's values and of a bias, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import sparsetile as st
from sparsetile.plan.traced import operators
from tests.contracts.cases import csr_of, random_matrix
from tests.plans import said

F64 = torch.float64
STEP = 1e-6


def matrix() -> st.CSR:
    """With empty rows, so that max and min have rows without a winner."""
    scattered = random_matrix(30, 20, 0.15).tolil()
    scattered[7] = 0
    return csr_of(scattered.tocsr(), dtype=F64)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def check(function, operands: tuple[Tensor, ...]) -> None:
    """Compare the tangent with a difference quotient."""
    moves = tuple(torch.randn_like(each) for each in operands)
    C, tangent = torch.func.jvp(function, operands, moves)
    ahead = function(*(at + STEP * by for at, by in zip(operands, moves, strict=True)))
    behind = function(*(at - STEP * by for at, by in zip(operands, moves, strict=True)))
    torch.testing.assert_close(C, function(*operands))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * STEP), atol=1e-7, rtol=1e-6)
    assert bool(tangent.any())
    with forward_ad.dual_level():  # without torch.func
        duals = (forward_ad.make_dual(*pair) for pair in zip(operands, moves, strict=True))
        plain = forward_ad.unpack_dual(function(*duals))
        torch.testing.assert_close(plain.primal, C)
        torch.testing.assert_close(plain.tangent, tangent)


@pytest.mark.parametrize("system", ["cpu", "dense"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_tangents_of_b_and_of_the_values_are_right(system, reduce, lead):
    csr = matrix()
    plan = st.plan(csr, 4, system=system)
    check(lambda B: plan.run(B, reduce=reduce, alpha=-0.5), (random(*lead, 20, 4),))
    check(
        lambda values, B: plan.run(B, values=values, reduce=reduce),
        (csr.values, random(*lead, 20, 4)),
    )


def test_a_bias_and_relu_have_tangents_too():
    plan = st.plan(matrix(), 4)
    check(lambda B, bias: plan.run(B, bias=bias, relu=True), (random(20, 4), random(4)))
    check(lambda X, bias: plan.linear(X, bias=bias, relu=True), (random(5, 20), random(30)))


def test_values_with_duplicates_have_tangents():
    edges = torch.tensor([[0, 0, 1, 0], [1, 1, 0, 0]])
    plan = st.plan((edges, random(4), (2, 2)), 3)
    check(lambda values: plan.run(torch.ones(2, 3, dtype=F64), values=values), (random(4),))


def test_a_dual_level_without_dual_tensors_changes_nothing():
    plan, B = st.plan(matrix(), 4), random(20, 4)
    with forward_ad.dual_level():
        assert torch.equal(plan @ B, plan.run(B, out=torch.empty(30, 4, dtype=F64)))
        assert forward_ad.unpack_dual(plan @ B).tangent is None


def test_a_tangent_can_be_differentiated_in_reverse():
    csr, move = matrix(), random(20, 4)
    A, plan = torch.zeros(30, 20, dtype=F64), st.plan(csr, 4)
    A[csr.row_ids(), csr.indices.long()] = csr.values
    B = random(20, 4).requires_grad_()
    with forward_ad.dual_level():
        squares = (plan @ forward_ad.make_dual(B, move)) ** 2
        (grad,) = torch.autograd.grad(forward_ad.unpack_dual(squares).tangent.sum(), B)
    torch.testing.assert_close(grad, 2 * A.T @ (A @ move))


def test_a_tangent_that_reaches_an_operator_is_refused():
    plan = st.plan(matrix(), 4)
    tensors, recipe = plan.flat
    refused = (
        "spmm: operands must be without forward-mode tangents inside of a gradient or an "
        "operator, got a dual tensor. Call plan.run, which has a forward mode, or take both "
        "derivatives in reverse mode."
    )
    with forward_ad.dual_level():
        B = forward_ad.make_dual(random(20, 4), random(20, 4))
        for call in (
            lambda: torch.ops.sparsetile.spmm(
                tensors, plan.values, [], B, None, recipe, "sum", 1.0, False, None
            ),
            lambda: operators.sddmm(tensors, random(30, 4), B, recipe, 1.0),
            lambda: operators.spmm_extremum(tensors, plan.values, B, recipe, "max", False),
        ):
            assert said(ValueError, call) == refused
        B = forward_ad.make_dual(random(20, 4).requires_grad_(), random(20, 4))
        loss = ((plan @ B) ** 2).sum()
        with pytest.raises(ValueError, match="without forward-mode tangents"):
            loss.backward()


def test_an_out_has_no_tangent():
    plan, out = st.plan(matrix(), 4), torch.empty(30, 4, dtype=F64)
    with forward_ad.dual_level():
        B = forward_ad.make_dual(random(20, 4), random(20, 4))
        assert said(ValueError, lambda: plan.run(B, out=out)) == (
            "run: out must be omitted in forward-mode differentiation, got a tensor. Omit out=."
        )
