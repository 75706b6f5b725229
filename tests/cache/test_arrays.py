"""Products of CSR arrays as they came: no plan, nothing stale, nothing read outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.cache import arrays as module
from sparsetile.cache import spmm as spmm_module
from sparsetile.kernels.cpu import api
from tests.contracts.cases import assert_close, csr_of, random_matrix

MATRIX = random_matrix(30, 20, 0.2).astype(np.float32)


@pytest.fixture(autouse=True)
def no_plans(calls_of) -> list[Any]:
    """Plans that were made."""
    st.clear_plan_cache()
    return calls_of(spmm_module, "build_plan")


def torch_csr(matrix: Any, index: Any = np.int64) -> Tensor:
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(index)),
        torch.from_numpy(matrix.indices.astype(index)),
        torch.from_numpy(matrix.data.copy()),
        matrix.shape,
    )


def exact_csr(matrix: Any) -> st.CSR:
    return csr_of(matrix).with_values(torch.from_numpy(matrix.data))


def wide_scipy(matrix: Any) -> Any:
    made = matrix.copy()
    made.indptr, made.indices = made.indptr.astype(np.int64), made.indices.astype(np.int64)
    return made


def with_room(matrix: Any) -> Any:
    """Room for more entries, as scipy leaves it."""
    made = matrix.copy()
    made.indices = np.concatenate([made.indices, np.full(5, 10**6, made.indices.dtype)])
    made.data = np.concatenate([made.data, np.full(5, np.nan, made.data.dtype)])
    return made


KINDS: dict[str, Callable[[Any], Any]] = {
    "scipy": lambda m: m.copy(),
    "scipy array": sp.csr_array,
    "scipy, 64-bit indices": wide_scipy,
    "scipy with room behind": with_room,
    "torch": torch_csr,
    "torch, 32-bit indices": lambda m: torch_csr(m, np.int32),
    "tensors": lambda m: (*(torch.from_numpy(x) for x in (m.indptr, m.indices, m.data)), m.shape),
    "NumPy arrays": lambda m: (m.indptr, m.indices, m.data, m.shape),
    "64-bit row pointers": lambda m: (m.indptr.astype(np.int64), m.indices, m.data, m.shape),
    "64-bit columns": lambda m: (m.indptr, m.indices.astype(np.int64), m.data, m.shape),
    "CSR": exact_csr,
}


@pytest.mark.parametrize(  # each pair of index types is compiled for each type of values
    "kind, dtype",
    [*((kind, np.float32) for kind in KINDS), ("scipy", np.float64), ("torch", np.float64)],
)
def test_every_kind_has_the_bits_of_a_plan_without_one(kind, dtype, no_plans):
    matrix = MATRIX.astype(dtype)
    A, csr = KINDS[kind](matrix), exact_csr(matrix)
    for n in (1, 3, 16, 33, 130):
        B = torch.randn(20, n, dtype=csr.values.dtype)
        C = st.spmm(A, B)
        assert torch.equal(C, st.plan(csr, n) @ B)
        assert_close(C, csr, B)
        assert torch.equal(st.spmm(A, B[:, 0]), C[:, 0])
        padded = torch.full((20, n + 3), torch.nan, dtype=B.dtype)[:, 1 : n + 1]
        assert torch.equal(st.spmm(A, padded.copy_(B)), C)
    assert not no_plans
    assert torch.equal(st.spmm(A, B[:, :1].expand(20, 9))[:, 8], C[:, 0])
    assert len(no_plans) == 1, "columns that are not adjacent are planned"


def test_a_pattern_has_ones():
    indptr, indices = torch.from_numpy(MATRIX.indptr), torch.from_numpy(MATRIX.indices)
    ones = csr_of(MATRIX).with_values(torch.ones(MATRIX.nnz))
    B = torch.randn(20, 5)
    assert_close(st.spmm((indptr, indices, None, (30, 20)), B), ones, B)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (7, 3)])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_matrices_without_entries(shape, n, no_plans):
    A = sp.csr_matrix(shape, dtype=np.float32)
    assert torch.equal(st.spmm(A, torch.randn(shape[1], n)), torch.zeros(shape[0], n))
    assert not no_plans


def test_unsorted_and_repeated_columns_count_each():
    indptr, indices = torch.tensor([0, 3, 3, 5]), torch.tensor([2, 0, 2, 1, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    C = st.spmm((indptr, indices, values, (3, 3)), torch.eye(3))
    assert torch.equal(C, torch.tensor([[2.0, 0, 4], [0, 0, 0], [0, 9, 0]]))


def test_one_dense_row_is_shared_by_threads(no_plans):
    rows, cols = 3000, 40_000
    indptr = np.concatenate([[0], np.full(rows, cols) + np.arange(rows)]).astype(np.int32)
    indices = np.concatenate([np.arange(cols), np.arange(1, rows)]).astype(np.int32)
    A = sp.csr_matrix((np.ones(indices.size, np.float32), indices, indptr), (rows, cols))
    B = torch.randint(-3, 4, (cols, 200)).float()
    C = st.spmm(A, B)
    assert torch.equal(C[0], B.sum(0)) and torch.equal(C[1:], B[1:rows])
    assert not no_plans


def wrong(**changes: Any) -> tuple[Any, ...]:
    """The arrays of a matrix of 3 rows and 4 columns with a mistake."""
    parts = {"indptr": [0, 2, 3, 5], "indices": [0, 3, 1, 0, 2]}
    parts |= changes
    indptr, indices = torch.tensor(parts["indptr"]), torch.tensor(parts["indices"])
    return indptr, indices, torch.ones(indices.numel()), (3, 4)


WRONG = {
    "a column too large": dict(indices=[0, 3, 1, 4, 2]),
    "a column far outside": dict(indices=[0, 3, 1, 2**40, 2]),
    "a negative column": dict(indices=[0, -1, 1, 0, 2]),
    "row pointers that descend": dict(indptr=[0, 4, 3, 5]),
    "a negative row pointer": dict(indptr=[0, -2, 3, 5]),
    "a row pointer past the entries": dict(indptr=[0, 2, 900, 5]),
    "row pointers that end early": dict(indptr=[0, 2, 3, 4]),
    "row pointers that end late": dict(indptr=[0, 2, 3, 6]),
    "row pointers that begin late": dict(indptr=[1, 2, 3, 5]),
}


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_wrong_arrays_get_the_error_of_plans(mistake, n, index):
    indptr, indices, values, shape = wrong(**WRONG[mistake])
    if index is torch.int32 and "far" in mistake:
        indices = indices.clamp(max=2**31 - 1)
    A = (indptr.to(index), indices.to(index), values, shape)
    B = torch.randn(4, n)
    assert api.product_of_arrays(*A[:3], 5, 4, B) is None
    with pytest.raises(ValueError) as planned:
        st.plan(A, n)
    with pytest.raises(ValueError) as caught:
        st.spmm(A, B)
    assert str(caught.value) == str(planned.value).replace("plan:", "spmm:")


def test_wrong_arrays_of_many_chunks_are_noticed_wherever_they_are():
    A = random_matrix(5000, 300, 0.05).astype(np.float32)
    parts = [torch.from_numpy(each) for each in (A.indptr, A.indices, A.data)]
    B = torch.randn(300, 70)
    for at in (0, A.nnz // 2, A.nnz - 1):
        indices = parts[1].clone()
        indices[at] = 300
        assert api.product_of_arrays(parts[0], indices, parts[2], A.nnz, 300, B) is None
    for at in (1, 2500, 4999):
        indptr = parts[0].clone()
        indptr[at] = A.nnz + 1 if at < 4999 else -1
        assert api.product_of_arrays(indptr, *parts[1:], A.nnz, 300, B) is None
    C = api.product_of_arrays(*parts, A.nnz, 300, B)
    assert_close(C, csr_of(A), B)


def test_what_is_in_the_arrays_counts_however_it_got_there():
    A, B = MATRIX.copy(), torch.randn(20, 6)
    tuple_of = KINDS["tensors"](A)  # the same memory
    for step in range(1, 4):
        A.data *= -step
        A.indices[:] = A.indices[::-1].copy()
        torch.from_numpy(A.data).data[0] = 7.0
        expected = torch.from_numpy(A.toarray()) @ B
        torch.testing.assert_close(st.spmm(A, B), expected)
        torch.testing.assert_close(st.spmm(tuple_of, B), expected)


def test_gradients_and_other_types_are_left_to_plans(no_plans):
    indptr, indices, values, shape = KINDS["tensors"](MATRIX)
    B = torch.randn(20, 4, requires_grad=True)
    st.spmm((indptr, indices, values, shape), B).sum().backward()
    assert B.grad is not None and len(no_plans) == 1
    with torch.no_grad():
        st.spmm((indptr, indices, values, shape), B)
    assert len(no_plans) == 1
    trained = torch.nn.Parameter(values.clone())
    st.spmm((indptr, indices, trained, shape), B.detach()).sum().backward()
    assert trained.grad is not None and len(no_plans) == 2
    assert st.spmm(MATRIX, B.detach(), "max").shape == (30, 4)
    assert st.spmm(MATRIX, B.detach().double()).dtype is torch.float64
    assert st.spmm(MATRIX, B.detach().bfloat16()).dtype is torch.bfloat16
    assert len(no_plans) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert st.spmm(MATRIX, B.detach()).dtype is torch.bfloat16


def test_a_matrix_that_is_nearly_dense_is_planned(no_plans):
    A = random_matrix(400, 400, 0.9).astype(np.float32)
    for n, plans in ((1, 0), (8, 0), (300, 1)):  # narrow products take less than finding a plan
        assert_close(st.spmm(A, B := torch.randn(400, n)), csr_of(A), B)
        assert len(no_plans) == plans


def test_arrays_that_may_not_be_written(no_plans):
    A = MATRIX.copy()
    for part in (A.data, A.indices, A.indptr):
        part.flags.writeable = False
    assert_close(st.spmm(A, B := torch.randn(20, 3)), csr_of(MATRIX), B)


def test_infinity_of_b_reaches_only_the_rows_that_refer_to_it():
    B = torch.ones(20, 5)
    B[4] = torch.inf
    C, hit = st.spmm(MATRIX, B), torch.from_numpy(MATRIX.toarray()[:, 4] != 0)
    assert torch.isfinite(C[~hit]).all() and not torch.isfinite(C[hit]).any()


def test_several_threads_multiply_one_matrix():
    A = random_matrix(2000, 500, 0.05).astype(np.float32)
    operands = [torch.randn(500, n) for n in (1, 8, 64, 200)]
    expected, wrong_ones = [st.spmm(A, B) for B in operands], []

    def work() -> None:
        for _ in range(10):
            for B, C in zip(operands, expected, strict=True):
                if not torch.equal(st.spmm(A, B), C):
                    wrong_ones.append(B.shape)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_ones


def test_sizes_that_do_not_fit_get_errors_of_plans():
    with pytest.raises(ValueError, match="spmm: B must"):
        st.spmm(MATRIX, torch.randn(21, 3))
    indptr, indices, values, _ = KINDS["tensors"](MATRIX)
    with pytest.raises(ValueError, match="spmm"):
        st.spmm((indptr, indices, values[:-1], (30, 20)), torch.randn(20, 3))
    with pytest.raises(ValueError, match="spmm"):
        st.spmm((indptr, indices, values, (31, 20)), torch.randn(20, 3))


def test_a_profiler_sees_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        st.spmm(MATRIX, torch.randn(20, 3))
    assert any("sparsetile" in event.key for event in seen.key_averages())


def test_it_can_be_switched_off(no_plans, constants):
    constants(module, UNPLANNED_ON_CPU=False)
    st.spmm(MATRIX, torch.randn(20, 3))
    assert len(no_plans) == 1
