"""The operators' flat form: directions that swap, and errors that say what is missing."""

from __future__ import annotations

import json

import pytest
import torch

import sparsetile as st
from sparsetile.plan.traced import operators as ops
from sparsetile.plan.traced.flat import FlatPlan
from sparsetile.plan.traced.gradients import need_transpose
from sparsetile.systems.cpu.runner import CPURunner
from tests.contracts.cases import csr_of, random_matrix


def made(system: str) -> st.Plan:
    return st.plan(csr_of(random_matrix(12, 10, 0.3)), 4, system=system)


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_mirroring_twice_gives_the_same_list(system):
    plan = made(system)
    plan.flat_with_transpose()
    flat = FlatPlan(plan.flat[1])
    mirrored = FlatPlan(flat.mirrored)
    assert mirrored.mirrored == plan.flat[1]
    there = flat.mirror(plan.flat[0])
    back = mirrored.mirror(there)
    assert len(back) == len(plan.flat[0])
    assert all(one is other for one, other in zip(back, plan.flat[0], strict=True))
    assert (mirrored.rows, mirrored.cols) == (flat.cols, flat.rows)


def test_order_and_inverse_undo_each_other():
    plan = made("cpu")
    plan.flat_with_transpose()
    flat = FlatPlan(plan.flat[1])
    order, inverse = plan.flat[0][flat.size], plan.flat[0][flat.size + 1]
    assert torch.equal(order[inverse], torch.arange(plan.nnz))
    assert torch.equal(plan.values[order], plan.T.values)


def test_an_exact_system_is_not_listed_twice():
    assert len(made("cpu").flat[0]) == 1 + len(made("cpu")._variant.built.tensors)
    dense = made("dense")
    assert len(dense.flat[0]) > 1 + len(dense._variant.built.tensors)


def test_gradients_without_the_transpose_say_what_to_call():
    plan = made("cpu")
    flat = FlatPlan(plan.flat[1])
    assert not flat.differentiable
    with pytest.raises(RuntimeError) as caught:
        need_transpose(flat)
    assert str(caught.value) == (
        "spmm: tensors must hold the planned transpose to compute gradients, got the forward half "
        "only. Call plan.run, which plans the transpose when gradients are needed."
    )


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_extremum_without_winners_is_the_same_and_has_no_gradient(reduce):
    csr = csr_of(random_matrix(30, 20, 0.2))
    plan = st.plan(csr, 4, system="cpu")
    B = torch.randn(20, 4, requires_grad=True)
    run = torch.ops.sparsetile.spmm_extremum
    arguments = (plan.flat[0], csr.values, B, plan.flat[1], reduce)
    C, none = run(*arguments, False)
    assert none.numel() == 0
    assert torch.equal(C, run(*arguments, True)[0])
    with pytest.raises(RuntimeError, match=r"^spmm_extremum: winners must be True .* plan\.run"):
        C.sum().backward()


def test_gradients_of_an_extremum_add_up_where_one_entry_of_b_wins_often():
    """One column of A is dense and B's row there is greatest: all rows' gradients meet in it."""
    rows = 50
    csr = csr_of(random_matrix(rows, 8, 1.0))
    csr.values[:] = 1
    B = torch.zeros(8, 3)
    B[5] = 10
    B.requires_grad_()
    values = csr.values.clone().requires_grad_()
    plan = st.plan(csr, 3, system="cpu")
    plan.run(B, values=values, reduce="max").sum().backward()
    expected = torch.zeros(8, 3)
    expected[5] = rows
    assert torch.equal(B.grad, expected)
    assert torch.equal(values.grad, torch.where(csr.indices == 5, 30.0, 0.0))


def test_a_recipe_without_an_exact_system_is_refused():
    plan = made("dense")
    forward, _ = json.loads(plan.flat[1])[0]
    recipe = json.dumps([[forward, None]])
    with pytest.raises(TypeError) as caught:
        FlatPlan(recipe)
    assert str(caught.value) == f"spmm: recipe must name an exact system, got {recipe}."


@pytest.mark.parametrize(
    "tensor, copied",
    [
        (torch.ones(3, 4), False),
        (torch.ones(3, 8)[:, :4], False),
        (torch.ones(3, 1).expand(3, 1), False),
        (torch.ones(4, 3).t(), True),
        (torch.ones(3, 8)[:, ::2], True),
        (torch.ones(3, 1).expand(3, 4), True),
        (torch.ones(2, 3, 4), False),
    ],
)
def test_only_columns_that_are_apart_are_copied(tensor, copied):
    found = ops.row_major(tensor)
    assert (found is not tensor) is copied
    assert torch.equal(found, tensor) and (found.shape[-1] <= 1 or found.stride(-1) == 1)


@pytest.mark.parametrize("any_strides", [False, True])
def test_a_runner_that_takes_any_strides_is_given_the_callers_own_tensors(monkeypatch, any_strides):
    plan, X, Y = made("cpu"), torch.ones(4, 10), torch.zeros(4, 12)
    given = []

    def spmm(self, tensors, values, packed, B, out, epilogue):
        given.append((B, out))
        out.fill_(3)

    monkeypatch.setattr(CPURunner, "any_strides", any_strides)
    monkeypatch.setattr(CPURunner, "spmm", spmm)
    plan.run(X.T, out=Y.T)
    plan.run(X.T, alpha=2.0)
    assert bool((Y == 3).all())
    (first, out), (second, made_out) = given
    own = [first.data_ptr(), second.data_ptr()] == [X.data_ptr()] * 2
    assert own is (out.data_ptr() == Y.data_ptr()) is any_strides
    assert made_out.is_contiguous()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_empty_row_of_an_extremum_has_no_gradient_whatever_the_first_entry_is(reduce):
    sign = 1.0 if reduce == "max" else -1.0
    values = torch.tensor([-torch.inf * sign, 1.0 * sign], requires_grad=True)
    A = (torch.tensor([0, 2, 2]), torch.tensor([0, 1]), values, (2, 2))
    plan = st.plan(A, 1, system="cpu")
    B = torch.ones(2, 1, requires_grad=True)
    plan.run(B, reduce=reduce).sum().backward()
    assert B.grad.tolist() == [[0.0], [sign]]
    assert values.grad.tolist() == [0.0, 1.0]
    values = torch.ones(2, requires_grad=True)
    B = torch.tensor([[-torch.inf * sign], [3.0]])
    plan.run(B, reduce=reduce, values=values).sum().backward()
    assert values.grad.tolist() == [0.0, 3.0]


def test_gradients_of_an_extremum_in_16_bits_are_added_up_in_float32():
    rows = 4000
    A = (torch.arange(rows + 1), torch.zeros(rows, dtype=torch.int64), None, (rows, 1))
    B = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    st.plan(A, 1, dtype=torch.bfloat16).run(B, reduce="max").sum().backward()
    assert float(B.grad) == 4000


@pytest.mark.parametrize("alpha", [-2.0, -0.5, 0.0, 3.0])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_alpha_scales_the_extremum_whatever_its_sign(reduce, alpha):
    plan, B = made("cpu"), torch.randn(10, 4)
    assert torch.equal(plan.run(B, reduce=reduce, alpha=alpha), alpha * plan.run(B, reduce=reduce))


def test_the_gradient_of_relu_at_nan_is_that_of_torch():
    A = (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2]), None, (3, 3))
    plan = st.plan(A, 1, system="cpu")
    start = torch.tensor([[torch.nan], [-1.0], [2.0]])
    grads = []
    for relu in (lambda B: plan.run(B, relu=True), lambda B: torch.relu(plan @ B)):
        B = start.clone().requires_grad_()
        relu(B).backward(torch.full((3, 1), 5.0))
        grads.append(B.grad.flatten().tolist())
    assert grads[0] == grads[1] == [5.0, 0.0, 5.0]


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_the_mean_of_a_row_longer_than_float16_has_a_value_and_a_gradient(system):
    length = 70_000
    A = (torch.tensor([0, length]), torch.arange(length), None, (1, length))
    plan = st.plan(A, 1, dtype=torch.float16, system=system)
    B = torch.full((length, 1), 2.0, dtype=torch.float16, requires_grad=True)
    C = plan.run(B, reduce="mean")
    assert C.tolist() == [[2.0]]
    C.backward(torch.full((1, 1), 1000.0, dtype=torch.float16))
    expected = torch.full((length, 1), 1000 / length)
    torch.testing.assert_close(B.grad.float(), expected, rtol=1e-3, atol=0)


def test_the_values_gradient_of_a_batch_is_added_up_in_float32():
    """Sums of 2049 and more ones would stop at 256 in bfloat16."""
    A = (torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, dtype=torch.bfloat16), (1, 1))
    values = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    B = torch.ones(3000, 1, 1, dtype=torch.bfloat16)
    st.plan(A, 1, system="cpu").run(B, values=values).sum().backward()
    assert abs(float(values.grad) - 3000) <= 8


def test_the_values_gradient_is_scaled_before_it_is_rounded():
    A = (torch.tensor([0, 1]), torch.tensor([0]), None, (1, 1))
    values = torch.ones(1, dtype=torch.float16, requires_grad=True)
    B = torch.full((1, 4), 30_000.0, dtype=torch.float16)
    C = st.plan(A, 4, dtype=torch.float16, system="cpu").run(B, values=values, alpha=0.25)
    C.backward(torch.ones_like(C))
    assert float(values.grad) == 30_000.0


def test_rows_farther_apart_than_32_bits_are_copied():
    far = torch.empty(2, 2**30, device="meta")[:, :4]  # four bytes each
    assert ops.row_major(far).stride() == (4, 1)
    near = torch.empty(2, 2**30 - 1, device="meta")[:, :4]
    assert ops.row_major(near) is near
    alone = torch.empty(1, 2**30, device="meta")[:, :4]
    assert ops.row_major(alone) is alone


def test_rows_of_four_gib_themselves_are_refused():
    with pytest.raises(ValueError) as caught:
        ops.row_major(torch.empty(2, 2**30, device="meta"))
    assert str(caught.value) == (
        "run: a dense operand must be of rows below 4 GiB, got 1073741824 columns of "
        "torch.float32. Multiply parts of its columns."
    )
