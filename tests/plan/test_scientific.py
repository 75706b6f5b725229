"""Plans in SciPy's solvers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import aslinearoperator, cg, eigsh, lobpcg, lsqr, svds

import sparsetile as st
from tests.examples import load_example


def laplacian(size: int) -> sp.csr_array:
    ones = np.ones(size)
    return sp.diags_array([2.5 * ones, -ones[1:], -ones[1:]], offsets=[0, 1, -1]).tocsr()


def rectangular(dtype: str = "float64") -> sp.csr_array:
    made = sp.random_array((60, 35), density=0.2, rng=np.random.default_rng(3), format="csr")
    return made.astype(dtype)


def test_eigenvalues_and_solutions_are_scipy_s_own() -> None:
    A = laplacian(80)
    operator = st.plan(A, 1).as_linear_operator()
    assert aslinearoperator(operator) is operator and operator.dtype == A.dtype
    np.testing.assert_allclose(
        eigsh(operator, k=3, which="LA", return_eigenvectors=False),
        eigsh(A, k=3, which="LA", return_eigenvectors=False),
    )
    b = np.arange(80.0)
    x, failed = cg(operator, b, rtol=1e-10)
    assert not failed
    np.testing.assert_allclose(A @ x, b, atol=1e-6)
    start = np.random.default_rng(1).normal(size=(80, 4))
    found = lobpcg(operator, start, largest=True, tol=1e-8, maxiter=200)[0]
    np.testing.assert_allclose(found, eigsh(A, k=4, which="LA")[0][::-1], rtol=1e-5)


def test_transposes_are_products_of_plans_too() -> None:
    A = rectangular()
    operator = st.plan(A, 4).as_linear_operator()
    X = np.random.default_rng(2).normal(size=(60, 3))
    np.testing.assert_allclose(operator.rmatmat(X), A.T @ X)
    np.testing.assert_allclose(operator.T @ X, A.T @ X)
    np.testing.assert_allclose(operator.rmatvec(X[:, 0]), A.T @ X[:, 0])
    values = svds(operator, k=3, return_singular_vectors=False)
    np.testing.assert_allclose(np.sort(values), np.sort(svds(A, k=3)[1]))
    b = A @ np.ones(35)
    np.testing.assert_allclose(lsqr(operator, b, atol=1e-12, btol=1e-12)[0], np.ones(35), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_results_have_the_plan_s_type(dtype: str) -> None:
    A = rectangular()
    plan = st.plan(A, 2, dtype=getattr(torch, dtype))
    for X in (np.ones((35, 2)), np.asfortranarray(np.ones((35, 2))), np.ones((35, 2), dtype="i4")):
        C = plan.as_linear_operator() @ X
        assert C.dtype == dtype and C.shape == (60, 2)
        np.testing.assert_allclose(C, A @ X, rtol=1e-2)
    np.testing.assert_allclose(
        plan.as_linear_operator() @ (np.ones(35) * (1 + 2j)), A @ np.ones(35) * (1 + 2j), rtol=1e-2
    )


def test_new_values_of_the_plan_are_the_operator_s() -> None:
    A = rectangular()
    plan = st.plan(A, 1)
    operator = plan.as_linear_operator()
    plan.update_values(torch.from_numpy(2 * A.data))
    np.testing.assert_allclose(operator @ np.ones(35), 2 * (A @ np.ones(35)))


def test_what_scipy_cannot_take_is_refused() -> None:
    A = rectangular()
    with pytest.raises(TypeError, match=r"as_linear_operator: the plan must be of a type that N"):
        st.plan(A, 2, dtype=torch.bfloat16).as_linear_operator()
    with pytest.raises(TypeError, match="columns keep their order"):
        st.plan(A, 2, reorder_columns=True).as_linear_operator()


def test_block_solvers_of_the_examples_find_what_numpy_finds() -> None:
    solvers = load_example("block_solvers")
    A = solvers.laplacian(9)
    plan = st.plan(A, n=3)
    B = torch.randn(81, 3, dtype=torch.float64)
    B[:, 1] = 0  # solved before it begins
    X, steps = solvers.block_cg(plan, B, 1e-10)
    expected = np.linalg.solve(A.toarray(), B.numpy())
    np.testing.assert_allclose(X.numpy(), expected, rtol=1e-7, atol=1e-9)
    assert 10 < steps < 200
    values, vectors, _ = solvers.block_lobpcg(plan, torch.randn(81, 3, dtype=torch.float64), 1e-8)
    largest = np.linalg.eigvalsh(A.toarray())[::-1][:3]
    np.testing.assert_allclose(values.numpy(), largest, rtol=1e-10)
    np.testing.assert_allclose((plan @ vectors).numpy(), (values * vectors).numpy(), atol=1e-6)
