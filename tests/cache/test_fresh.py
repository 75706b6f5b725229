"""Products straight from a GPU's arrays: which take that path, and when a matrix is planned. torch
multiplies in place of kernels; tests/cache/test_gpu_fresh.py needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.cache import fresh
from sparsetile.cache.fresh import direct_seconds, fresh_product
from sparsetile.intake import CSR

INDPTR = torch.tensor([0, 3, 3, 4, 7])
INDICES = torch.tensor([4, 0, 0, 2, 1, 4, 3])
VALUES = torch.tensor([1, -2, 3, 0.5, 2, -1, 4])
DENSE = torch.zeros(4, 5).index_put(
    (torch.repeat_interleave(torch.arange(4), INDPTR.diff()), INDICES), VALUES, accumulate=True
)
B = torch.arange(15.0).reshape(5, 3)

Wrap = Callable[[Tensor], Any]


def arrays(wrap: Wrap, values: Tensor | None = VALUES) -> tuple[Any, ...]:
    """A matrix of new tensors."""
    indptr, indices = wrap(INDPTR.clone()), wrap(INDICES.clone())
    return indptr, indices, None if values is None else wrap(values), (4, 5)


def sparse(wrap: Wrap, values: Tensor = VALUES) -> Any:
    return wrap(torch.sparse_csr_tensor(INDPTR, INDICES, values, (4, 5)))


@pytest.mark.parametrize("operand", [B, B[:, 0], B.T.contiguous().T, B[:, :1]])
@pytest.mark.parametrize("kind", ["tensors", "pattern", "sparse tensor", "CSR"])
def test_arrays_are_multiplied_without_a_plan(on_gpu, kind, operand):
    A: Any = arrays(on_gpu, None if kind == "pattern" else VALUES)
    if kind == "sparse tensor":
        A = sparse(on_gpu)
    if kind == "CSR":
        A = CSR(A[0], A[1], A[2], (4, 5))
    dense = DENSE.gt(0) + DENSE.lt(0) if kind == "pattern" else DENSE
    if kind == "pattern":
        dense = dense + torch.tensor([[1.0, 0, 0, 0, 0]] + 3 * [[0.0] * 5])  # one place twice
    assert torch.equal(st.spmm(A, on_gpu(operand)), dense.float() @ operand)


@pytest.mark.parametrize(
    "values",
    [
        VALUES.double(),
        torch.stack([VALUES, VALUES], 1)[:, 0],  # apart in memory
        torch.imag(torch.complex(VALUES, VALUES).conj()),  # negative by a flag alone
    ],
)
def test_values_that_kernels_cannot_read_are_left_to_plans(on_gpu, values):
    assert fresh_product(sparse(on_gpu), on_gpu(B)) is not None
    assert fresh_product(arrays(on_gpu, values), on_gpu(B)) is None
    if not values.is_neg():
        assert fresh_product(sparse(on_gpu, values), on_gpu(B)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda each: torch.stack([each, each], 1)[:, 0],  # apart in memory
        lambda each: each.to(torch.int16),
        lambda each: each.reshape(1, -1),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_indices_that_kernels_cannot_read_are_left_to_plans(on_gpu, place, change):
    parts = [INDPTR, INDICES]
    parts[place] = change(parts[place])
    A = (*map(on_gpu, parts), on_gpu(VALUES), (4, 5))
    assert fresh_product(A, on_gpu(B)) is None


@pytest.mark.parametrize(
    "parts",
    [
        (INDPTR, INDICES, VALUES[:6]),
        (torch.stack([INDPTR, INDPTR], 1)[:, 0], INDICES, VALUES),  # apart in memory
        (INDPTR[:4], INDICES, VALUES),
    ],
    ids=["fewer values", "row pointers apart", "fewer rows"],
)
def test_parts_of_a_sparse_tensor_that_do_not_fit_are_left_to_plans(on_gpu, parts):
    """torch does not compare them unless it is asked to."""
    A = torch.sparse_csr_tensor(*parts, (4, 5), check_invariants=False)
    assert fresh_product(on_gpu(A), on_gpu(B)) is None


def test_what_a_product_found_wrong_is_raised_by_the_next(on_gpu, wrong_column):
    A = arrays(on_gpu)
    st.spmm(A, on_gpu(B))
    wrong_column()
    with pytest.raises(ValueError, match=r"indices must be from 0 to 4 .*, got 9 at entry 3"):
        st.spmm(A, on_gpu(B))
    assert torch.equal(st.spmm(A, on_gpu(B)), DENSE @ B)


def test_products_are_predicted_by_the_bytes_that_they_move(on_gpu):
    """Rows of B are gathered from L2; A, C and the rows of B in use move once."""
    device, facts = torch.device("cuda"), fresh.machine(None)
    for entries, used in ((10**6, 2000), (500, 500)):
        gathered = 4 * 64 * entries / (0.7 * facts.l2_gather)
        moved = 4 * 64 * (1000 + used) + 12 * entries + 8 * 1000
        expected = 5e-6 + gathered + moved / facts.dram
        assert direct_seconds(1000, 2000, entries, 64, 4, device) == pytest.approx(expected)


def products_until_planned(A: Any, operand: Tensor) -> int:
    for number in range(1000):
        if fresh_product(A, operand) is None:
            return number
    raise AssertionError("never planned")


@pytest.fixture
def soon(constants: Callable[..., None]) -> int:
    """After how many products a matrix is planned."""
    constants(fresh, SHARE=0.5, PLAN_SECONDS=(0.0, 0.0))
    each = direct_seconds(4, 5, 7, 3, 4, torch.device("cuda"))
    constants(fresh, PLAN_SECONDS=(3 * 0.5 * each, 0.5 * each))  # of 7 entries
    return 10


def test_a_matrix_is_planned_when_its_products_have_cost_enough(on_gpu, soon):
    A, other = arrays(on_gpu), arrays(on_gpu)
    assert products_until_planned(A, on_gpu(B)) == soon
    assert products_until_planned(A, on_gpu(B)) == 0, "its account stays"
    assert fresh_product(other, on_gpu(B)) is not None, "each matrix has its own"
    A[1].fill_(1)
    assert products_until_planned(A, on_gpu(B)) == soon, "another pattern has come"


def test_a_pattern_whose_columns_or_values_are_new_in_each_call_is_never_planned(on_gpu, soon):
    """A plan would serve one product. Memory of tensors that ended comes again."""
    indptr, indices, values, shape = arrays(on_gpu)
    for _ in range(3 * soon):
        view = on_gpu(INDICES)  # another tensor of the same memory and count of writes
        assert view.data_ptr() == INDICES.data_ptr()
        assert fresh_product((indptr, view, values, shape), on_gpu(B)) is not None
        assert fresh_product((indptr, indices, on_gpu(VALUES), shape), on_gpu(B)) is not None


def test_steps_of_training_count_for_their_gradients(on_gpu, soon):
    weight = VALUES.clone().requires_grad_()
    A = (*arrays(on_gpu)[:2], weight, (4, 5))
    assert products_until_planned(A, on_gpu(B)) == -(-soon // 3)


def test_accounts_of_matrices_that_ended_make_room_first(on_gpu, soon, constants):
    """A matrix in use keeps what its products have cost, however many others come and go."""
    constants(fresh, MOST_ACCOUNTS=6)
    A = arrays(on_gpu)
    for number in range(soon):
        assert fresh_product(A, on_gpu(B)) is not None, number
        for _ in range(3):
            fresh_product(arrays(on_gpu), on_gpu(B))
    assert fresh_product(A, on_gpu(B)) is None


def test_accounts_of_many_matrices_in_use_are_bounded(on_gpu, soon, constants):
    constants(fresh, MOST_ACCOUNTS=6)
    matrices = [arrays(on_gpu) for _ in range(20)]
    for _ in range(2):
        for A in matrices:
            assert fresh_product(A, on_gpu(B)) is not None
            assert len(fresh._accounts) <= 6
