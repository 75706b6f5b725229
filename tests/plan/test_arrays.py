"""Arrays of NumPy and cupy as operands of plans."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st


def matrix(dtype: str = "float32") -> sp.csr_array:
    made = sp.random_array((40, 25), density=0.2, rng=np.random.default_rng(3), format="csr")
    return made.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(25,), (25, 3), (2, 25, 3)])
def test_products_of_numpy_arrays_are_numpy_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    A, B = matrix(dtype), np.random.default_rng(1).normal(size=shape).astype(dtype)
    C = st.plan(A, 3) @ B
    assert type(C) is np.ndarray and C.dtype == dtype
    np.testing.assert_allclose(C, A.toarray() @ B, rtol=1e-4, atol=1e-5)


def test_any_strides_and_read_only_arrays_are_taken() -> None:
    A, plan = matrix("float64"), st.plan(matrix("float64"), 3)
    B = np.random.default_rng(1).normal(size=(50, 6))
    fixed = B[:25].copy()
    fixed.flags.writeable = False
    for each in (B[::2, ::2], B[::-2, :3], np.asfortranarray(B[:25]), fixed):
        np.testing.assert_allclose(plan @ each, A @ each)
    assert not fixed.flags.writeable


class CupyArray:
    """As much of cupy's arrays as operands need, in the host's memory."""

    __module__ = "cupy"
    __array_ufunc__ = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    @property
    def T(self) -> CupyArray:
        return CupyArray(self.tensor.mT)


def test_products_of_cupy_arrays_are_cupy_arrays(monkeypatch) -> None:
    A, B = matrix("float64"), np.random.default_rng(1).normal(size=(25, 3))
    cupy = SimpleNamespace(from_dlpack=CupyArray)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    C = st.plan(A, 3) @ CupyArray(torch.from_numpy(B))
    assert type(C) is CupyArray
    np.testing.assert_allclose(C.tensor, A @ B)
    C = CupyArray(torch.from_numpy(B.T)) @ st.plan(A, 3).T
    assert type(C) is CupyArray
    np.testing.assert_allclose(C.tensor, (A @ B).T)


def test_an_array_times_a_plan_is_the_product_with_the_transpose() -> None:
    A, plan = matrix("float64"), st.plan(matrix("float64"), 3)
    X = np.random.default_rng(1).normal(size=(5, 40))
    np.testing.assert_allclose(X @ plan, X @ A.toarray())
    np.testing.assert_allclose(X[0] @ plan, X[0] @ A.toarray())
    with pytest.raises(TypeError, match=r"Write plan @ B, or plan\.T for the transpose"):
        torch.from_numpy(X) @ plan


def test_options_and_errors_are_those_of_tensors() -> None:
    A, plan = matrix(), st.plan(matrix(), 3)
    B = np.ones((25, 3), dtype="float32")
    np.testing.assert_allclose(plan.run(B, alpha=2.0, relu=True), np.maximum(2 * (A @ B), 0), 1e-5)
    with pytest.raises(ValueError, match=r"run: B must be of shape \[..., 25, N\]"):
        plan @ np.ones((24, 3), dtype="float32")
    with pytest.raises(TypeError, match="run: B must be a torch tensor"):
        plan.run(B, out=torch.zeros(40, 3))
