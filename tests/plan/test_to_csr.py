"""plan.to_csr(): A comes back as a tensor, with the values of now."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st

DENSE = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 0.0, 3.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_plan_gives_its_matrix_back(dtype):
    A = DENSE.to(dtype).to_sparse_csr()
    plan = st.plan(A, n=2)
    found = plan.to_csr()
    assert found.layout is torch.sparse_csr and found.dtype is dtype
    assert torch.equal(found.to_dense(), DENSE.to(dtype))
    assert torch.equal(plan.T.to_csr().to_dense(), DENSE.T.to(dtype))
    plan.update_values(torch.tensor([5.0, 6.0, 7.0]).to(dtype))
    assert found.values().tolist() == [1.0, 2.0, 3.0]  # a copy
    assert plan.to_csr().values().tolist() == [5.0, 6.0, 7.0]


def test_trained_values_are_those_of_now():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    plan = st.plan((torch.tensor([0, 1, 2]), torch.tensor([1, 0]), values, (2, 2)), n=1)
    with torch.no_grad():
        values.mul_(10)
    assert plan.to_csr().values().tolist() == [10.0, 20.0]


def test_duplicates_are_summed_and_a_pattern_counts_as_ones():
    rows, columns = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
    summed = st.plan((torch.stack([rows, columns]), torch.ones(3), (2, 2)), n=1).to_csr()
    assert summed.to_dense().tolist() == [[0.0, 1.0], [2.0, 0.0]]
    pattern = st.plan((torch.tensor([0, 1]), torch.tensor([2]), None, (1, 3)), n=1).to_csr()
    assert pattern.to_dense().tolist() == [[0.0, 0.0, 1.0]]


def test_plans_without_a_s_entries_or_columns_refuse():
    A = DENSE.to_sparse_csr()
    with pytest.raises(ValueError, match=r"to_csr: the plan must be one whose columns keep their"):
        st.plan(A, n=1, reorder_columns=True).to_csr()
    with pytest.raises(ValueError, match=r"to_csr: A's entries must be omitted with a plan of"):
        st.plan(A, n=1, keep="inference").to_csr()
