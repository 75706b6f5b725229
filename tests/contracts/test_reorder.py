"""What every row order must be: a permutation, found again for the same matrix, A untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import sparsetile as st
from sparsetile.reorder import REORDERERS, Permutation
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, assert_close, csr_of, random_matrix


@pytest.mark.parametrize("reorderer", REORDERERS)
def test_every_row_comes_exactly_once(reorderer):
    for name, matrix in MATRICES.items():
        with case_of(name):
            csr = csr_of(matrix())
            found = REORDERERS[reorderer](csr)
            assert isinstance(found, Permutation)
            rows = torch.arange(csr.shape[0])
            order = rows if found.perm is None else found.perm
            assert order.dtype is torch.int64 and order.device == csr.device
            assert torch.equal(order.sort().values, rows)
            assert found.checked(csr.shape[0]) is found


@pytest.mark.parametrize("reorderer", [name for name in REORDERERS if name != "identity"])
@settings(max_examples=60, deadline=None)
@given(
    rows=some.integers(0, 40),
    columns=some.integers(0, 40),
    density=some.floats(0, 0.5),
    seed=some.integers(0, 2**31 - 1),
)
def test_any_matrix_is_ordered_whole(reorderer, rows, columns, density, seed):
    csr = csr_of(random_matrix(rows, columns, density, seed=seed))
    order = REORDERERS[reorderer](csr).perm
    assert torch.equal(order.sort().values, torch.arange(rows))


@pytest.mark.parametrize("reorderer", REORDERERS)
def test_a_plan_with_any_order_gives_the_same_product(reorderer):
    csr = csr_of(random_matrix(60, 45, 0.1), dtype=torch.float64)
    B = torch.randn(45, 3, dtype=torch.float64)
    plan = st.plan((csr.indptr, csr.indices, csr.values, csr.shape), 3, reorder=reorderer)
    assert plan.info["reorder"] == reorderer
    assert_close(plan @ B, csr, B)


@pytest.mark.parametrize("reorderer", REORDERERS)
def test_an_order_carries_the_name_of_its_algorithm(reorderer):
    assert REORDERERS[reorderer](csr_of(MATRICES["odd sizes"]())).name == reorderer


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("reorderer", REORDERERS)
def test_the_same_matrix_gets_the_same_order_and_is_left_alone(reorderer, pattern):
    csr = csr_of(MATRICES["one dense row"](), pattern=pattern)
    indptr, indices = csr.indptr.clone(), csr.indices.clone()
    first, again = (REORDERERS[reorderer](csr).perm for _ in range(2))
    assert (first is None and again is None) or torch.equal(first, again)
    assert torch.equal(csr.indptr, indptr) and torch.equal(csr.indices, indices)


@pytest.mark.parametrize(
    "order, rows",
    [([0, 1], 3), ([0, 1, 1], 3), ([0, 1, 3], 3), ([-1, 0, 1], 3), ([[0, 1, 2]], 3), ([0], 0)],
)
def test_rejects_invalid_permutation(order, rows):
    perm = torch.tensor(order)
    with pytest.raises(ValueError) as caught:
        Permutation("given", perm).checked(rows)
    assert str(caught.value) == (
        f"plan: reorder must be a permutation of the {rows} rows of A, got a tensor of shape "
        f"{tuple(perm.shape)} that repeats or misses rows. "
        "Give each row number from 0 to M-1 exactly once."
    )


def test_a_permutation_of_no_rows_is_one():
    empty = Permutation("given", torch.empty(0, dtype=torch.int64))
    assert empty.checked(0) is empty
