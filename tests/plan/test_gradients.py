"""Products with gradients outside torch's operators: the same numbers, values kept, one error."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import sparsetile as st
from sparsetile.plan import family as module
from sparsetile.plan.traced import gradients as operator_gradients
from tests.contracts.cases import csr_of, random_matrix

A = random_matrix(30, 20, 0.2, seed=4)


def plan_of(dtype: torch.dtype = torch.float64, **options) -> st.Plan:
    return st.plan(csr_of(A, dtype=dtype), 6, **options)


def dense(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(A.toarray(), dtype=dtype)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def direct(C: torch.Tensor) -> bool:
    """Whether the product was not an operator's."""
    return type(C.grad_fn).__name__ == "_ProductBackward"


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_those_of_a_dense_product(reduce, relu, alpha, biased):
    plan, B, bias, G = plan_of(), leaf(20, 6), leaf(6), torch.randn(30, 6, dtype=torch.float64)
    C = plan.run(B, reduce=reduce, relu=relu, alpha=alpha, bias=bias if biased else None)
    assert direct(C)
    C.backward(G)
    found = B.grad, bias.grad
    B.grad = bias.grad = None
    lengths = torch.tensor((A.toarray() != 0).sum(1), dtype=torch.float64).clamp(min=1)
    scale = 1 / lengths[:, None] if reduce == "mean" else 1.0
    expected = alpha * (dense() @ B) * scale + (bias if biased else 0)
    expected = torch.relu(expected) if relu else expected
    assert torch.allclose(C, expected)
    expected.backward(G)
    assert torch.allclose(found[0], B.grad)
    assert torch.allclose(found[1], bias.grad) if biased else found[1] is None


def test_gradients_of_gradients_are_right():
    plan, bias = plan_of(), leaf(6)

    def product(B, bias):
        return plan.run(B, bias=bias, reduce="mean", alpha=0.5) ** 2

    assert torch.autograd.gradcheck(product, (leaf(20, 6), bias))
    assert torch.autograd.gradgradcheck(product, (leaf(20, 6), bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_bits_as_through_the_operator(dtype):
    plan, G = plan_of(dtype), torch.randn(30, 6).to(dtype)
    B = torch.randn(20, 6).to(dtype).requires_grad_()
    C = plan @ B
    (grad,) = torch.autograd.grad(C, B, G)
    plan.flat_with_transpose()
    tensors, recipe = plan.flat
    other = torch.ops.sparsetile.spmm(
        tensors, plan.values, [], B, None, recipe, "sum", 1.0, False, None
    )
    assert direct(C) and not direct(other)
    assert torch.equal(C, other) and torch.equal(grad, torch.autograd.grad(other, B, G)[0])


def test_parameters_and_gradients_of_any_strides_are_taken():
    plan = plan_of()
    B = torch.nn.Parameter(torch.randn(20, 6, dtype=torch.float64))
    C = plan @ B
    assert direct(C)
    C.sum().backward()  # one number, expanded
    assert torch.allclose(B.grad, dense().sum(0)[:, None].expand(20, 6))
    B.grad = None
    (plan @ B).backward(torch.randn(6, 30, dtype=torch.float64).t())
    assert B.grad.shape == B.shape


def test_only_the_bias_may_need_a_gradient():
    plan, bias, B = plan_of(), leaf(6), torch.randn(20, 6, dtype=torch.float64)
    C = plan.run(B, bias=bias)
    plan.update_values(torch.ones(plan.nnz, dtype=torch.float64))
    C.sum().backward()
    assert torch.equal(bias.grad, torch.full((6,), 30.0, dtype=torch.float64))


def test_values_that_changed_since_the_product_are_refused():
    plan, B = plan_of(), leaf(20, 6)
    C = plan @ B
    plan.update_values(torch.ones(plan.nnz, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"must stay as they are .* Call backward before"):
        C.sum().backward()
    (plan @ B).sum().backward()
    ones = torch.tensor(A.toarray() != 0, dtype=torch.float64)
    assert torch.allclose(B.grad, ones.sum(0)[:, None].expand(20, 6))


def test_values_are_not_reordered_at_each_step(calls_of):
    plan, B = plan_of(), leaf(20, 6)
    (plan @ B).sum().backward()

    orders = calls_of(type(plan._family), "entry_order")
    reordered = calls_of(operator_gradients, "reordered")
    (plan @ B).sum().backward()
    assert not orders and not reordered


@pytest.mark.parametrize("how", ["no_grad", "trainable values", "values=", "batch"])
def test_what_it_is_not_for_goes_the_other_way(how):
    plan, B = plan_of(torch.float32), torch.randn(20, 6, requires_grad=True)
    if how == "no_grad":
        with torch.no_grad():
            assert (plan @ B).grad_fn is None
        return
    if how == "trainable values":
        values = torch.ones(plan.nnz, requires_grad=True)
        plan.update_values(values)
        C = plan @ B
    elif how == "values=":
        C = plan.run(B, values=torch.ones(plan.nnz, requires_grad=True))
    else:
        C = plan @ B.expand(2, 20, 6)
    assert C.grad_fn is not None and not direct(C)
    C.sum().backward()
    assert bool(B.grad.isfinite().all())


def test_lengths_of_rows_are_inverted_once_for_means(calls_of):
    plan, made = plan_of(), calls_of(module, "row_scale")
    for _ in range(3):
        plan.run(leaf(20, 6), reduce="mean").sum().backward()
    assert len(made) == 1 and plan.info["bytes"]["row scale"] == 8 * 30
    plan.to(torch.float32)
    B = torch.randn(20, 6, requires_grad=True)
    plan.run(B, reduce="mean").sum().backward()
    assert len(made) == 2 and B.grad.dtype is torch.float32


def test_inference_tensors_are_not_kept_for_means():
    plan, B = plan_of(), leaf(20, 6)
    with torch.inference_mode():
        plan.run(B, reduce="mean")
        plan._family.row_scale(plan._variant)
    (plan.run(B, reduce="mean") ** 2).sum().backward()
    assert torch.autograd.gradgradcheck(
        lambda B: plan.run(B, reduce="mean", relu=True) ** 2, leaf(20, 6)
    )


def test_a_gradient_with_a_tangent_is_refused_by_bound_products_too():
    plan, B, G = plan_of(), leaf(20, 6), torch.randn(30, 6, dtype=torch.float64)
    C = plan @ B
    turned = plan.T._variant
    turned.bound = lambda *_: pytest.fail("dropped a tangent")
    with forward_ad.dual_level(), pytest.raises(ValueError, match="without forward-mode tangents"):
        torch.autograd.grad(C, B, forward_ad.make_dual(G, G))


def test_tensors_that_outlived_their_transform_are_taken():
    plan, B, kept = plan_of(), leaf(20, 6), []

    def keep(x):
        kept.append(x)
        return x.sum()

    torch.func.grad(keep)(B)
    C = plan.run(kept[0])
    assert direct(C) and torch.equal(C, plan @ B)
    C.sum().backward()
    assert torch.allclose(B.grad, dense().sum(0)[:, None].expand(20, 6))
