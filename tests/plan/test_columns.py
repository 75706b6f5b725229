"""Plans with renumbered columns: B is permuted once, everything else is as without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import sparsetile as st
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, assert_close, csr_of, random_matrix
from tests.plans import MATRIX, dense, made, said


def planned(csr: st.CSR, n: int = 4, **options) -> st.Plan:
    return st.plan(csr, n, reorder_columns=True, **options)


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("reorder", REORDERERS)
def test_the_product_with_the_permuted_b_is_the_product(reorder, pattern):
    for name, matrix in MATRICES.items():
        with case_of(name):
            csr = csr_of(matrix(), pattern=pattern)
            plan = planned(csr, 3, reorder=reorder, system="cpu")
            B = torch.randn(csr.shape[1], 3)
            assert_close(plan @ plan.permute(B), csr, B)


@settings(max_examples=60, deadline=None)
@given(
    rows=some.integers(0, 25),
    columns=some.integers(0, 25),
    density=some.floats(0, 0.5),
    n=some.integers(0, 5),
    seed=some.integers(0, 2**31 - 1),
    system=some.sampled_from(["cpu", "dense"]),
)
def test_any_matrix_and_row_order_gives_the_same_product_and_transpose(
    rows, columns, density, n, seed, system
):
    csr = csr_of(random_matrix(rows, columns, density, seed=seed), dtype=torch.float64)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    plan = planned(csr, n, reorder=order, system=system)
    B = torch.randn(columns, n, dtype=torch.float64)
    G = torch.randn(rows, n, dtype=torch.float64)
    assert_close(plan @ plan.permute(B), csr, B)
    assert_close(plan.unpermute(plan.T @ G), csr.transposed(), G)
    assert torch.equal(plan.unpermute(plan.permute(B)), B)


def test_it_works_on_every_device_s_systems(device):
    csr = csr_of(MATRIX, dtype=torch.float16).to(device)
    B = torch.randn(20, 16).to(device, torch.float16)
    on_host = [name for name, system in SYSTEMS.items() if "cpu" in system.devices]
    for system in on_host if device.type == "cpu" else ("csr", "acc", "dense"):
        plan = planned(csr, 16, system=system, reorder="lsh")
        assert plan.column_order.device == device
        assert_close(plan @ plan.permute(B), csr, B)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_every_reduction_and_batches_are_as_without_the_option(reduce):
    plain, plan = made(), made(reorder_columns=True)
    B = dense(3, 20).unsqueeze(-1) * dense(1, 4)  # [3, 20, 4]
    torch.testing.assert_close(
        plan.run(plan.permute(B), reduce=reduce), plain.run(B, reduce=reduce)
    )


def test_columns_are_taken_as_the_row_order_first_uses_them():
    rows = torch.tensor([0, 0, 1, 2])
    columns = torch.tensor([1, 4, 0, 4])
    A = (torch.stack([rows, columns]), None, (3, 5))
    assert st.plan(A, 2, reorder_columns=True).column_order.tolist() == [1, 4, 0, 2, 3]
    order = torch.tensor([2, 1, 0])
    plan = st.plan(A, 2, reorder=order, reorder_columns=True)
    assert plan.column_order.tolist() == [4, 0, 1, 2, 3]
    assert plan.column_order.dtype is torch.int64


def test_without_the_option_b_is_taken_as_it_is():
    plan, B = made(), dense()
    assert plan.column_order is None and plan.info["reorder_columns"] is False
    assert plan.permute(B) is B and plan.unpermute(B) is B


# -- values and gradients -----------------------------------------------------------------------


def test_the_gradient_of_b_comes_back_in_b_s_own_order():
    B = dense(requires_grad=True)
    G = dense(30)
    expected = torch.autograd.grad(made() @ B, B, G)[0]
    plan = made(reorder_columns=True)
    torch.testing.assert_close(torch.autograd.grad(plan @ plan.permute(B), B, G)[0], expected)


def test_gradients_of_b_and_of_the_values_are_right_to_second_order():
    csr = csr_of(random_matrix(7, 6, 0.4), dtype=torch.float64)
    plan = planned(csr, 3)
    values = csr.values.clone().requires_grad_()
    B = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def product(values, B):
        return plan.run(plan.permute(B), values=values)

    assert torch.autograd.gradcheck(product, (values, B))
    assert torch.autograd.gradgradcheck(product, (values, B))


# Unsorted entries, one of them twice: what the caller's order of values must survive. Row 2 has
# columns 0 and 3, which are used first in the order 3, 0: its entries change places.
ROWS = torch.tensor([2, 0, 1, 0, 2, 2])
COLUMNS = torch.tensor([3, 2, 0, 3, 0, 3])


def written_out(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, 4, dtype=values.dtype).index_put((ROWS, COLUMNS), values, accumulate=True)


def test_new_values_come_in_the_order_of_the_matrix_that_was_planned():
    edges, values = torch.stack([ROWS, COLUMNS]), torch.arange(1.0, 7.0)
    plan = st.plan((edges, torch.ones(6), (3, 4)), 2, reorder_columns=True)
    B = dense(4, 2)
    plan.update_values(values)
    torch.testing.assert_close(plan @ plan.permute(B), written_out(values) @ B)
    torch.testing.assert_close(plan.run(plan.permute(B), values=-values), written_out(-values) @ B)
    G = dense(3, 2)
    torch.testing.assert_close(plan.unpermute(plan.T @ G), written_out(values).T @ G)


@pytest.mark.parametrize("kind", ["edges", "coo", "csr", "canonical"])
def test_values_that_require_grad_are_followed_whatever_holds_them(kind):
    values = torch.arange(1.0, 7.0, requires_grad=True)
    edges = torch.stack([ROWS, COLUMNS])
    whole = written_out(values.detach()).to_sparse_csr()
    leaf = whole.values().clone().requires_grad_()
    if kind == "edges":
        A, leaf = (edges, values, (3, 4)), values
    elif kind == "coo":
        A = torch.sparse_coo_tensor(edges, values, (3, 4))
        leaf = values
    elif kind == "csr":
        A = torch.sparse_csr_tensor(whole.crow_indices(), whole.col_indices(), leaf, (3, 4))
    else:
        A = st.CSR(whole.crow_indices().long(), whole.col_indices().int(), leaf, (3, 4))
    plan = st.plan(A, 2, reorder_columns=True)
    B, G = dense(4, 2), dense(3, 2)
    C = plan @ plan.permute(B)
    torch.testing.assert_close(C, written_out(values) @ B)
    (found,) = torch.autograd.grad(C, leaf, G)
    rows, columns = (ROWS, COLUMNS) if leaf is values else whole.to_dense().nonzero().unbind(1)
    torch.testing.assert_close(found, (G[rows] * B[columns]).sum(1))


def test_the_transpose_of_the_transpose_takes_the_permuted_b_too():
    plan, B = made(reorder_columns=True), dense()
    assert plan.T.column_order is None
    torch.testing.assert_close(plan.T.T @ plan.permute(B), made() @ B)


# -- files, words, errors -----------------------------------------------------------------------


def test_a_loaded_plan_permutes_and_multiplies_to_the_same_bits(tmp_path):
    plan, B, G = made(reorder_columns=True, reorder="rcm"), dense(), dense(30)
    plan.save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    assert torch.equal(loaded.column_order, plan.column_order)
    assert torch.equal(loaded @ loaded.permute(B), plan @ plan.permute(B))
    assert torch.equal(loaded.T @ G, plan.T @ G)
    values = torch.randn(MATRIX.nnz)
    permuted = plan.permute(B)
    assert torch.equal(
        loaded.update_values(values) @ permuted, plan.update_values(values) @ permuted
    )
    # What shares memory in a plan does not in one that was loaded.
    facts, wanted = loaded.info, plan.info
    assert facts.pop("bytes").keys() == wanted.pop("bytes").keys()
    assert facts == wanted and loaded.explain() == plan.explain()


def test_the_plan_says_that_it_takes_a_permuted_b():
    plan = made(reorder_columns=True)
    assert plan.info["reorder_columns"] is True
    line = "  columns   as first used in that order: run takes plan.permute(B), not B"
    assert line in plan.explain().splitlines()
    assert "  columns " not in made().explain()


@pytest.mark.parametrize("given", [1, None, "affinity"])
def test_an_option_that_is_not_true_or_false_is_refused(given):
    assert said(TypeError, lambda: made(reorder_columns=given)) == (
        f"plan: reorder_columns must be True or False, got {given!r}. "
        "Choose a row order with reorder=."
    )


@pytest.mark.parametrize("options", [{}, {"reorder_columns": True}], ids=["plain", "renumbered"])
@pytest.mark.parametrize("name", ["permute", "unpermute"])
def test_an_operand_of_another_shape_is_refused(name, options):
    call = getattr(made(**options), name)
    text = f"{name}: B must be of shape [..., 20, N], got "
    assert said(ValueError, lambda: call(torch.zeros(30, 4))).startswith(text)
    assert said(ValueError, lambda: call(torch.zeros(20))).startswith(text)
    assert said(TypeError, lambda: call([1.0])).startswith(f"{name}: B must be a torch tensor, got")


def test_a_traced_product_permutes_inside():
    plan, B = made(reorder_columns=True), dense()
    compiled = torch.compile(lambda B: plan @ plan.permute(B), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(B), made() @ B)
