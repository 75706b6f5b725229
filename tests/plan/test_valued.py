"""Products with values of the call: one node, whose gradients are those of the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.plan import eager

ROWS, COLUMNS, N = 9, 7, 5


@pytest.fixture
def matrix() -> tuple[st.Plan, Tensor]:
    """A plan of a pattern with empty rows, and values for it."""
    generator = torch.Generator().manual_seed(2)
    dense = torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    dense[dense < 0.6] = 0.0
    dense[4] = 0.0
    A = dense.to_sparse_csr()
    return st.plan(A, n=N, dtype=torch.float64), A.values().clone().requires_grad_()


def operand(seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(COLUMNS, N, generator=generator, dtype=torch.float64)
    return made.requires_grad_()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_are_those_of_the_operators(matrix, reduce, biased, relu, monkeypatch):
    plan, values = matrix
    B = operand()
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True) if biased else None
    leaves = [B, values, *([bias] if bias is not None else [])]

    def results() -> list[Tensor]:
        options: dict[str, Any] = {"bias": bias, "relu": relu, "reduce": reduce, "alpha": 0.5}
        C = plan.run(B, values=values, **options)
        grad = torch.randn(C.shape, generator=torch.Generator().manual_seed(5), dtype=C.dtype)
        return [C, *torch.autograd.grad(C, leaves, grad)]

    found = results()
    assert type(found[0].grad_fn).__name__ == "_ValuedBackward"
    monkeypatch.setattr(eager, "takes_valued", lambda *operands: False)
    torch.testing.assert_close(found, results())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_have_gradients(matrix, reduce):
    plan, values = matrix

    def call(B: Tensor, values: Tensor) -> Tensor:
        return plan.run(B, values=values, reduce=reduce)

    assert torch.autograd.gradcheck(call, (operand(), values))
    assert torch.autograd.gradgradcheck(call, (operand(), values))


@pytest.mark.parametrize("trained", ["values", "operand"])
def test_only_what_is_asked_for_is_kept(matrix, trained):
    plan, values = matrix
    B = operand()
    (values if trained == "operand" else B).requires_grad_(False)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        C = plan.run(B, values=values)
    assert [each.shape for each in saved] == [(B if trained == "values" else values).shape]
    C.sum().backward()
    assert (values if trained == "values" else B).grad is not None


def test_transforms_batches_and_maxima_take_the_operators(matrix):
    plan, values = matrix
    B = operand()
    jacobian = torch.func.jacrev(lambda given: plan.run(B.detach(), values=given).sum())
    batch = torch.stack([B, 2 * B])
    plan.run(B, values=values).sum().backward()
    torch.testing.assert_close(jacobian(values.detach()), values.grad)
    both = plan.run(batch, values=values)
    assert type(both.grad_fn).__name__ != "_ValuedBackward"
    torch.testing.assert_close(both[1], 2 * plan.run(B, values=values))
    assert type(plan.run(B, values=values, reduce="max").grad_fn).__name__ != "_ValuedBackward"
