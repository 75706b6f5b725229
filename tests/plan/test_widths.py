"""Plans made without a width, and products with vectors."""

from __future__ import annotations

import pickle

import pytest
import torch

import sparsetile as st
from sparsetile.plan import family as module
from sparsetile.plan.family import FIRST_WIDTH, MAX_WIDTHS
from tests.contracts.cases import csr_of, random_matrix

ROWS, COLS = 12, 10


@pytest.fixture
def dense():
    return torch.from_numpy(random_matrix(ROWS, COLS, 0.4).toarray()).float()


@pytest.fixture
def plan(dense):
    return st.plan(dense.to_sparse_csr())


@pytest.fixture
def planned(calls_of):
    """Variants that were built."""
    return calls_of(module, "build_variant")


def widths(planned):
    return [call.given[1].n for call in planned]


def beside(plan):
    """The variants of other widths."""
    return [each for each in plan._family.variants() if each.n != FIRST_WIDTH]


def test_each_width_is_planned_for_once(plan, dense, planned):
    assert "n=any" in repr(plan)
    for n in (3, 7, 3, FIRST_WIDTH, 7):
        B = torch.randn(COLS, n)
        torch.testing.assert_close(plan @ B, dense @ B)
    assert widths(planned) == [3, 7]
    assert sorted(each.n for each in beside(plan)) == [3, 7]


def test_the_plans_are_bounded_and_the_latest_stay(plan, planned):
    for n in range(1, MAX_WIDTHS + 2):
        plan @ torch.ones(COLS, n)
    assert len(beside(plan)) == MAX_WIDTHS
    plan @ torch.ones(COLS, MAX_WIDTHS + 1)
    plan @ torch.ones(COLS, 1)
    assert widths(planned)[-1] == 1 and len(planned) == MAX_WIDTHS + 2


def test_new_values_reach_every_width(plan, dense):
    B = torch.randn(COLS, 3)
    plan @ B
    plan.update_values(2 * plan.values)
    torch.testing.assert_close(plan @ B, 2 * dense @ B)
    weight = torch.nn.Parameter(plan.values.clone())
    plan.update_values(weight)
    C = plan @ B
    C.sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        weight.zero_()
    assert not (plan @ B).any()


def test_gradients_and_the_transpose_have_widths_too(plan, dense, planned):
    B = torch.randn(COLS, 3, requires_grad=True)
    (plan @ B).sum().backward()
    torch.testing.assert_close(B.grad, dense.T @ torch.ones(ROWS, 3))
    G = torch.randn(ROWS, 5)
    torch.testing.assert_close(plan.T @ G, dense.T @ G)
    assert widths(planned) == [3, 5]
    plan.update_values(torch.zeros(plan.nnz))
    assert not (plan.T @ G).any()


def test_options_of_a_product_reach_the_width_s_plan(plan, dense):
    B, out = torch.randn(COLS, 3), torch.ones(ROWS, 3)
    plan.run(B, out, alpha=2.0, beta=3.0)
    torch.testing.assert_close(out, 2 * dense @ B + 3)
    bias = torch.randn(3)
    torch.testing.assert_close(plan.run(B, bias=bias, relu=True), torch.relu(dense @ B + bias))


def test_a_named_system_and_an_order_are_kept(dense):
    plan = st.plan(dense.to_sparse_csr(), system="dense", reorder="rcm")
    plan @ torch.ones(COLS, 3)
    (other,) = beside(plan)
    assert (other.system, other.permutation.name) == ("dense", "rcm")


@pytest.mark.parametrize("tune", ["measure", "none"])
def test_each_width_is_chosen_for_as_was_asked(dense, tune):
    plan = st.plan(dense.to_sparse_csr(), tune=tune)
    plan @ torch.ones(COLS, 3)
    (other,) = beside(plan)
    assert other.report["considered_by"] == tune


def test_files_and_copies_have_widths_too(tmp_path, plan, planned):
    plan.save(tmp_path / "a.safetensors")
    for again in (st.load_plan(tmp_path / "a.safetensors"), pickle.loads(pickle.dumps(plan))):
        planned.clear()
        assert "n=any" in repr(again)
        again @ torch.ones(COLS, 3)
        assert widths(planned) == [3]
    plan.to(torch.float64) @ torch.ones(COLS, 3, dtype=torch.float64)
    assert "n=any" in repr(plan)


def test_a_compiled_product_takes_the_first_plan(plan, dense, planned):
    B = torch.randn(COLS, 3)
    compiled = torch.compile(lambda b: plan @ b, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(B), dense @ B)
    assert not planned


@pytest.mark.parametrize("n", [None, 1, 4])
def test_a_vector_gives_a_vector(dense, n):
    plan = st.plan(dense.to_sparse_csr(), n)
    v = torch.randn(COLS)
    torch.testing.assert_close(plan @ v, dense @ v)
    torch.testing.assert_close(st.spmm(dense.to_sparse_csr(), v), dense @ v)
    out = torch.ones(ROWS)
    assert plan.run(v, out, beta=1.0) is out
    torch.testing.assert_close(out, dense @ v + 1)
    given = v.clone().requires_grad_()
    (plan @ given).sum().backward()
    torch.testing.assert_close(given.grad, dense.sum(0))
    matrix = dense.to_sparse_csr().requires_grad_()
    st.spmm(matrix, v).sum().backward()
    assert matrix.grad is not None


def test_a_vector_of_another_length_is_refused():
    plan = st.plan(csr_of(random_matrix(ROWS, COLS, 0.4)), 1)
    with pytest.raises(ValueError, match=r"^run: B must be of shape \[\.\.\., 10, N\]"):
        plan @ torch.ones(COLS + 1)
