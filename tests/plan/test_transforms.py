"""torch.func: products in vmap, grad, jacrev, jacfwd and hessian against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import sparsetile as st
from sparsetile.intake import as_csr
from sparsetile.plan.modes import transforming
from tests.plans import variant_of

ROWS, COLS, N = 6, 5, 4
close = torch.testing.assert_close


@pytest.fixture
def dense():
    """Sums of its rows differ, one row is empty."""
    values = torch.arange(1.0, ROWS * COLS + 1, dtype=torch.float64).reshape(ROWS, COLS) / 7
    kept = torch.arange(ROWS * COLS).reshape(ROWS, COLS) % 3 == 0
    kept[2] = False
    return values * kept


@pytest.fixture(params=["cpu", "dense"])
def plan(request, dense):
    return st.plan(dense.to_sparse_csr(), N, system=request.param)


@pytest.fixture
def x():
    return torch.randn(COLS, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def filled(dense):
    """A from its values, differentiably."""
    where = dense.nonzero().unbind(1)
    return lambda values: torch.zeros_like(dense).index_put(where, values)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_vmap_over_b_is_one_product_of_a_batch(plan, dense, dim, lead, calls_of):
    X = torch.randn(*lead, COLS, N, dtype=torch.float64)
    batch = torch.stack([X, 2 * X, X - 1], dim)
    calls = calls_of(variant_of(plan).runner, "spmm")
    C = vmap(lambda b: plan @ b, in_dims=dim)(batch)
    close(C, dense @ torch.stack([X, 2 * X, X - 1]))
    assert len(calls) == 1


@pytest.mark.parametrize("batched", ["values", "bias", "both", "all"])
def test_vmap_over_values_and_biases(plan, filled, x, batched):
    values = torch.rand(3, plan.nnz, dtype=torch.float64)
    biases = torch.rand(3, N, dtype=torch.float64)
    dims = {"values": (0, None, None), "bias": (None, None, 0), "both": (0, None, 0), "all": 0}
    dims = dims[batched] if batched != "all" else (0, 0, 0)
    B = torch.stack([x, -x, x + 1]) if batched == "all" else x
    v, c = values if dims[0] == 0 else values[0], biases if dims[2] == 0 else biases[0]

    def ours(v, b, c):
        return plan.run(b, values=v, bias=c, relu=True)

    def theirs(v, b, c):
        return torch.relu(filled(v) @ b + c)

    close(vmap(ours, in_dims=dims)(v, B, c), vmap(theirs, in_dims=dims)(v, B, c))


def test_a_batch_of_none_has_the_shape_of_its_products(plan):
    none = torch.empty(0, COLS, N, dtype=torch.float64)
    assert vmap(lambda b: plan @ b)(none).shape == (0, ROWS, N)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_derivatives_of_b_and_of_the_values(plan, filled, x, reduce):
    lengths = (filled(torch.ones(plan.nnz, dtype=torch.float64)) != 0).sum(1, keepdim=True)
    scale = 1 if reduce == "sum" else 1 / lengths.clamp(min=1)

    def ours(v, b):
        return plan.run(b, values=v, reduce=reduce, alpha=1.5).sin()

    def theirs(v, b):
        return (1.5 * scale * (filled(v) @ b)).sin()

    v = plan.values
    for transform in (jacrev, jacfwd):
        for argument in (0, 1):
            close(transform(ours, argument)(v, x), transform(theirs, argument)(v, x))
    for arguments in ((0, 0), (0, 1), (1, 0), (1, 1)):
        mixed = [jacfwd(jacrev(f, arguments[0]), arguments[1])(v, x[:, :1]) for f in (ours, theirs)]
        close(*mixed)
        twice = [jacrev(jacrev(f, arguments[0]), arguments[1])(v, x[:, :1]) for f in (ours, theirs)]
        close(*twice)
    close(
        hessian(lambda b: ours(v, b).square().sum())(x[:, :1]),
        hessian(lambda b: theirs(v, b).square().sum())(x[:, :1]),
    )


def test_the_bias_and_relu_have_derivatives(plan, dense, x):
    bias = torch.linspace(-2, 2, N, dtype=torch.float64)

    def ours(b, c):
        return plan.run(b, bias=c, relu=True).square().sum()

    def theirs(b, c):
        return torch.relu(dense @ b + c).square().sum()

    for argument in (0, 1):
        close(grad(ours, argument)(x, bias), grad(theirs, argument)(x, bias))
        close(jacfwd(ours, argument)(x, bias), jacfwd(theirs, argument)(x, bias))


def test_gradients_of_each_sample(plan, dense):
    X = torch.randn(3, COLS, N, dtype=torch.float64)
    ours = vmap(grad(lambda b: (plan @ b).square().sum()))(X)
    close(ours, vmap(grad(lambda b: (dense @ b).square().sum()))(X))
    weights = torch.rand(3, plan.nnz, dtype=torch.float64)
    each = vmap(grad(lambda v, b: plan.run(b, values=v).square().sum()))(weights, X)
    single = [
        grad(lambda v, b: plan.run(b, values=v).square().sum())(w, b)
        for w, b in zip(weights, X, strict=True)
    ]
    close(each, torch.stack(single))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_max_and_min_in_every_transform(plan, x, reduce):
    v = plan.values
    run = plan.run(x, reduce=reduce, alpha=-2.0)
    X = torch.stack([x, -x])
    close(vmap(lambda b: plan.run(b, reduce=reduce, alpha=-2.0))(X)[0], run)
    eager_b, eager_v = x.clone().requires_grad_(), v.clone().requires_grad_()
    plan.run(eager_b, values=eager_v, reduce=reduce).sin().sum().backward()

    def loss(values, b):
        return plan.run(b, values=values, reduce=reduce).sin().sum()

    close(grad(loss, 0)(v, x), eager_v.grad)
    close(grad(loss, 1)(v, x), eager_b.grad)
    close(jacfwd(loss, 1)(v, x), eager_b.grad)
    each = vmap(lambda values: plan.run(x, values=values, reduce=reduce))(torch.stack([v, 2 * v]))
    close(each[0], plan.run(x, reduce=reduce))


def test_max_of_an_empty_matrix_has_a_gradient_of_zeros():
    nothing = (torch.zeros(ROWS + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), None)
    plan = st.plan((*nothing, (ROWS, COLS)), N)
    gradient = grad(lambda b: plan.run(b, reduce="max").sum())(torch.ones(COLS, N))
    assert torch.equal(gradient, torch.zeros(COLS, N))


def test_a_linear_layer_in_transforms(plan, dense):
    X = torch.randn(3, 2, COLS, dtype=torch.float64)
    bias = torch.rand(ROWS, dtype=torch.float64)
    close(vmap(lambda each: plan.linear(each, bias=bias))(X), X @ dense.T + bias)
    close(
        grad(lambda each: plan.linear(each, relu=True).square().sum())(X[0]),
        grad(lambda each: torch.relu(each @ dense.T).square().sum())(X[0]),
    )


def test_one_call_in_transforms(dense, x):
    A = dense.to_sparse_csr()
    close(vmap(lambda b: st.spmm(A, b))(torch.stack([x, 2 * x]))[1], 2 * dense @ x)
    close(grad(lambda b: st.spmm(A, b).sum())(x), dense.T @ torch.ones(ROWS, N).double())


@pytest.mark.parametrize("function", ["spmm", "plan"])
def test_a_matrix_that_belongs_to_a_transform_is_refused(function):
    edges, weight = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)

    def product(w):
        A, B = (edges, w, (2, 2)), torch.ones(2, 1)
        return (st.spmm(A, B) if function == "spmm" else st.plan(A, 1) @ B).sum()

    with pytest.raises(
        ValueError, match=rf"^{function}: A must be a matrix from outside .* values="
    ):
        grad(product)(weight)


def test_what_a_plan_keeps_survives_the_transform_that_made_it(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    assert not transforming()
    _, back = vjp(lambda b: (plan @ b).sum(), x)  # plans the transpose inside
    back(torch.tensor(1.0, dtype=torch.float64))
    kept = [*plan.flat[0], *plan.T.flat[0], plan.values, plan.T.values]
    assert all(tensor.untyped_storage().data_ptr() or not tensor.numel() for tensor in kept)
    given = x.clone().requires_grad_()
    (plan @ given).sum().backward()
    close(given.grad, dense.T @ torch.ones(ROWS, N).double())


def test_tangents_of_a_16_bit_product_are_rounded_once():
    plan = st.plan(torch.eye(4).to_sparse_csr(), N, dtype=torch.bfloat16)
    B = torch.randn(4, N).bfloat16()
    C, tangent = jvp(lambda b: plan @ b, (B,), (2 * B,))
    assert torch.equal(C, B) and torch.equal(tangent, 2 * B)


def test_tangents_of_values_and_of_b_are_added_before_they_are_rounded():
    """256 + 1 has no place in bfloat16, and 257 - 256 has."""
    plan = st.plan(torch.ones(1, 2).to_sparse_csr(), 1, dtype=torch.bfloat16)
    values, B = torch.tensor([1.0, 1.0]).bfloat16(), torch.tensor([[256.0], [3.0]]).bfloat16()
    d_values, d_B = torch.tensor([-1.0, 0.0]).bfloat16(), torch.tensor([[256.0], [1.0]]).bfloat16()
    _, tangent = jvp(lambda v, b: plan.run(b, values=v), (values, B), (d_values, d_B))
    assert tangent.dtype is torch.bfloat16 and tangent.item() == 1


def test_an_out_and_new_values_are_refused_inside(plan, x):
    with pytest.raises(ValueError, match=r"^run: out must be omitted inside of torch\.func's"):
        vmap(lambda b: plan.run(b, out=torch.empty(ROWS, N, dtype=x.dtype)))(x[None])
    with pytest.raises(ValueError, match=r"^update_values: values must be omitted inside"):
        grad(lambda v: plan.update_values(v).values.sum())(plan.values)


def test_duplicates_have_gradients_in_the_order_they_were_given():
    edges = torch.tensor([[0, 0, 1], [1, 1, 0]])
    weight = torch.tensor([1.0, 2.0, 3.0])
    plan = st.plan((edges, weight, (2, 2)), 1)
    B = torch.tensor([[10.0], [20.0]])
    assert torch.equal(
        grad(lambda w: plan.run(B, values=w).sum())(weight), torch.tensor([20.0, 20.0, 10.0])
    )
    assert as_csr((edges, weight, (2, 2))).nnz == 2
