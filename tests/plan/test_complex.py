"""Complex numbers: products, transposes, gradients by torch's convention, SciPy's results."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import eigsh, gmres, svds

import sparsetile as st
import sparsetile.functional as F
from sparsetile.intake import as_csr, read_matrix
from tests.plan.complex_numbers import TYPES, as_tensor, dense, matrix, whole
from tests.plans import said

A = matrix()
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def arrays(matrix: Any = A) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(each) for each in (matrix.indptr, matrix.indices, matrix.data))


@types
@pytest.mark.parametrize("n", [0, 1, 7, 33])
def test_products_and_transposes_are_exact_of_whole_numbers(dtype, n):
    plan = st.plan(as_tensor(A, dtype), n)
    full, B, G = dense(A, dtype), whole(35, n, dtype=dtype), whole(60, n, dtype=dtype)
    assert plan.dtype is dtype and plan.n == n and plan.system == "cpu"
    assert torch.equal(plan @ B, full @ B)
    assert torch.equal(plan.T @ G, full.T @ G)
    assert torch.equal(plan.H @ G, full.conj().T @ G)
    assert torch.equal(plan.H.H @ B, full @ B) and torch.equal(plan.T.H @ B, full.conj() @ B)
    assert torch.equal(st.spmm(as_tensor(A, dtype), B), full @ B)


@types
def test_a_real_matrix_multiplies_complex_numbers_at_once(dtype):
    part = torch.empty(0, dtype=dtype).real.dtype
    real = as_tensor(A.real.tocsr(), part)
    B, expected = whole(35, 5, dtype=dtype), dense(A.real.tocsr(), dtype)
    plan = st.plan(real, 5)
    assert plan.dtype is part and plan.H is plan.T
    assert torch.equal(plan @ B, expected @ B) and torch.equal(plan @ B[:, 0], expected @ B[:, 0])
    assert torch.equal(plan.T @ (expected @ B), expected.T @ (expected @ B))
    assert torch.equal(st.spmm(real, B), expected @ B)
    torch.testing.assert_close(st.spmm(real, B, "mean"), st.plan(real, 5).run(B, reduce="mean"))
    planned = st.plan(real, 5, dtype=dtype)
    assert planned.dtype is dtype and torch.equal(planned @ B, expected @ B)
    pattern = (*arrays()[:2], None, A.shape)
    ones = torch.from_numpy((A.toarray() != 0) * 1.0).to(dtype)
    assert torch.equal(st.plan(pattern, 5, dtype=dtype) @ B, ones @ B)
    assert torch.equal(F.spmm(*arrays()[:2], None, B), ones @ B)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
def test_scipy_s_matrices_of_every_format_agree_with_scipy(form):
    given = A.asformat(form)
    B = whole(35, 4, dtype=torch.complex128).numpy()
    for C in (st.plan(given, 4, device="cpu") @ B, st.spmm(given, B)):
        assert isinstance(C, np.ndarray) and C.dtype == np.complex128
        np.testing.assert_array_equal(C, A @ B)
    np.testing.assert_array_equal(B.T @ st.plan(A.T.tocsr(), 4, device="cpu"), B.T @ A.T)


def test_entries_in_any_order_and_twice_are_sorted_and_summed():
    rows, cols = torch.tensor([2, 0, 2, 0, 1]), torch.tensor([1, 3, 1, 0, 2])
    values = torch.tensor([1 + 2j, 3j, -5 + 1j, 2.0, 1 - 1j], dtype=torch.complex128)
    edges, shape = torch.stack([rows, cols]), (3, 4)
    full = torch.zeros(3, 4, dtype=torch.complex128).index_put_((rows, cols), values, True)
    B = whole(4, 2, dtype=torch.complex128)
    plan = st.plan((edges, values, shape), 2)
    assert torch.equal(plan @ B, full @ B) and torch.equal(
        st.spmm((edges, values, shape), B), full @ B
    )
    assert torch.equal(plan.update_values(2 * values) @ B, 2 * full @ B)
    assert torch.equal(plan.run(B, values=values.conj()), full.conj() @ B)


def test_the_conjugate_transpose_takes_new_values_of_its_own():
    plan = st.plan(A, 3, device="cpu")
    B, full = whole(35, 3, dtype=torch.complex128), dense(A, torch.complex128)
    assert torch.equal(plan.values, torch.from_numpy(A.data))
    adjoint = plan.H
    torch.testing.assert_close(
        adjoint.values, dense(A.conj().T.tocsr(), plan.dtype).to_sparse_csr().values()
    )
    adjoint.update_values(3 * adjoint.values)
    assert torch.equal(plan @ B, 3 * full @ B)
    plan.T.update_values(plan.T.values / 3)
    assert torch.equal(plan @ B, full @ B) and torch.equal(
        plan.H @ (full @ B), full.mH @ (full @ B)
    )


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_follow_torch_s_convention(reduce):
    small = matrix(12, 7)  # one number after the other is changed: a large one takes a minute
    plan = st.plan(small, 2, device="cpu")
    indptr, indices, values = arrays(small)
    values = values.clone().requires_grad_()
    B = whole(7, 2, dtype=torch.complex128).requires_grad_()
    bias = whole(2, dtype=torch.complex128, seed=5).requires_grad_()

    def product(values, B, bias):
        return plan.run(B, values=values, bias=bias, alpha=0.5, reduce=reduce)

    assert torch.autograd.gradcheck(product, (values, B, bias))
    assert torch.autograd.gradgradcheck(product, (values, B, bias))
    assert torch.autograd.gradcheck(lambda B: plan.run(B, reduce=reduce), B)
    assert torch.autograd.gradcheck(lambda B: plan.H.run(plan.run(B, reduce=reduce)), B)
    assert torch.autograd.gradcheck(lambda v, B: F.spmm(indptr, indices, v, B, reduce), (values, B))
    G = whole(12, 2, dtype=torch.complex128, seed=2)
    (expected,) = torch.autograd.grad(plan.run(B, reduce=reduce), B, G)
    torch.testing.assert_close(plan.gradient(G, reduce=reduce), expected)
    (expected,) = torch.autograd.grad(plan.H.run(G.requires_grad_(), reduce=reduce), G, B.detach())
    torch.testing.assert_close(plan.H.gradient(B.detach(), reduce=reduce), expected)


def test_gradients_of_a_real_matrix_are_those_of_dense_torch():
    weight = torch.from_numpy(A.data.real.copy()).requires_grad_()
    B = whole(35, 3, dtype=torch.complex128).requires_grad_()
    shape = (*arrays()[:2], weight, A.shape)

    def through(product):
        weight.grad = B.grad = None
        product().abs().square().sum().backward()
        return weight.grad, B.grad

    rows = torch.repeat_interleave(torch.arange(60), torch.from_numpy(np.diff(A.indptr)))

    def full():
        made = torch.zeros(60, 35, dtype=torch.complex128)
        return made.index_put((rows, arrays()[1].long()), weight.to(made.dtype)) @ B

    expected = through(full)
    for product in (
        lambda: st.plan(shape, 3) @ B, lambda: st.spmm(shape, B),
        lambda: st.plan(shape, 3, dtype=torch.complex128) @ B, lambda: F.spmm(*shape[:3], B),
    ):  # fmt: skip
        torch.testing.assert_close(through(product), expected)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "update"])
def test_trained_values_are_read_in_every_product(kind):
    B, leaf = whole(35, 3, dtype=torch.complex128), as_tensor(A, torch.complex128).requires_grad_()
    given = leaf
    if kind != "tensor":
        leaf = arrays()[2].clone().requires_grad_()
        given = (*arrays()[:2], leaf, A.shape)
    plan = (
        st.plan(A, 3, device="cpu").update_values(leaf) if kind == "update" else st.plan(given, 3)
    )
    (plan @ B).abs().sum().backward()
    wanted = arrays()[2].clone().requires_grad_()
    F.spmm(*arrays()[:2], wanted, B).abs().sum().backward()
    found = leaf.grad.values() if kind == "tensor" else leaf.grad
    torch.testing.assert_close(found.clone(), wanted.grad)
    with torch.no_grad():
        (leaf.values() if kind == "tensor" else leaf).mul_(2)
    full = dense(A, torch.complex128)
    assert torch.equal(plan @ B, 2 * full @ B)
    assert torch.equal(plan.H @ (full @ B), 2 * full.mH @ (full @ B))
    text = said(TypeError, lambda: pickle.dumps(plan))
    assert text.startswith(
        "pickle: plan must be one that holds its own values, got one that follows"
    )
    assert said(TypeError, lambda: copy.deepcopy(plan.T)).startswith("deepcopy: plan must be one")


def test_out_bias_and_batches():
    plan, full = st.plan(A, 3, device="cpu"), dense(A, torch.complex128)
    B = whole(2, 35, 3, dtype=torch.complex128)
    assert torch.equal(plan @ B, full @ B)
    bias = whole(3, dtype=torch.complex128)
    assert torch.equal(plan.run(B[0], bias=bias), full @ B[0] + bias)
    assert torch.equal(plan.run(B[0], bias=bias.real.contiguous()), full @ B[0] + bias.real)
    old = whole(60, 3, dtype=torch.complex128, seed=9)
    for out in (old.clone(), old.T.contiguous().T, torch.stack([old, old], 1)[:, 0]):
        before = out._version
        assert plan.run(B[0], out, alpha=2, beta=0.5) is out and out._version > before
        assert torch.equal(out, 2 * (full @ B[0]) + 0.5 * old)
    nan = torch.full((60,), complex("nan+nanj"), dtype=torch.complex128)
    assert torch.equal(plan.run(B[0, :, 0], out=nan), full @ B[0, :, 0])
    square = matrix(20, 20)
    both = whole(20, 3, dtype=torch.complex128)
    expected = dense(square, torch.complex128) @ both
    assert torch.equal(st.plan(square, 3, device="cpu").run(both, out=both), expected)


def test_conjugate_and_strided_operands_are_what_they_say():
    plan, full = st.plan(A, 3, device="cpu"), dense(A, torch.complex128)
    B = whole(35, 6, dtype=torch.complex128)
    for each in (
        B.conj(),
        B[:, ::2],
        B.T.contiguous().T,
        B.mT.conj().contiguous().mH,
        torch._neg_view(B),
    ):
        assert torch.equal(plan @ each, full @ each)
    assert torch.equal(st.plan(torch.conj(as_tensor(A, plan.dtype)), 3) @ B, full.conj() @ B)


def test_non_finite_numbers_reach_only_what_complex_arithmetic_says():
    B = whole(35, 2, dtype=torch.complex128)
    B[4, 0], B[9, 1] = complex("inf"), complex(0, float("nan"))
    real, imaginary = (
        sp.csr_array((part, A.indices, A.indptr), A.shape) for part in (A.data.real, A.data.imag)
    )
    x, y = B.real.numpy(), B.imag.numpy()
    C = (st.plan(A, 2, device="cpu") @ B).numpy()
    np.testing.assert_array_equal(C.real, real @ x - imaginary @ y)
    np.testing.assert_array_equal(C.imag, real @ y + imaginary @ x)
    assert np.isfinite(C).any() and not np.isfinite(C).all()


def test_torch_s_tools_see_complex_products():
    plan, full = st.plan(A, 3, device="cpu"), dense(A, torch.complex128)
    B = whole(35, 3, dtype=torch.complex128)
    traced = torch.compile(lambda B: plan @ B, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(B), full @ B)
    traced = torch.compile(
        lambda v, B: F.spmm(*arrays()[:2], v, B), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(traced(arrays()[2], B), full @ B)
    assert torch.equal(torch.func.jvp(lambda B: plan @ B, (B,), (B,))[1], full @ B)
    assert torch.equal(
        torch.func.vmap(lambda B: plan @ B)(torch.stack([B, 2 * B])), full @ torch.stack([B, 2 * B])
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan @ B, full @ B) and torch.equal(st.spmm(A, B), full @ B)
        small = st.plan(A.astype("complex64"), 3, device="cpu")
        assert torch.equal(small @ B.to(torch.complex64), (full @ B).to(torch.complex64))


def test_copies_pickles_and_other_types():
    plan, full = st.plan(A, device="cpu"), dense(A, torch.complex128)
    B = whole(35, 3, dtype=torch.complex128)
    assert torch.equal(plan @ B, full @ B) and plan.n == 128
    for made in (
        copy.deepcopy(plan),
        pickle.loads(pickle.dumps(plan)),
        pickle.loads(pickle.dumps(plan.H)).H,
    ):
        plan.update_values(2 * torch.from_numpy(A.data))
        assert torch.equal(made @ B, full @ B)
        plan.update_values(torch.from_numpy(A.data))
    assert torch.equal(plan.T @ (full @ B), full.T @ (full @ B))
    text = plan.explain()
    assert "two products of 256 columns of real numbers" in text
    assert "compared with no other" in text
    plan.to(torch.complex64)
    assert repr(plan) == (
        f"Plan(60x35, {A.nnz} entries, weighted, n=any, complex64, cpu, system=cpu)"
    )
    small = (full @ B).to(torch.complex64)
    assert torch.equal(plan @ B.to(torch.complex64), small)
    assert torch.equal(plan.H @ small, (full.mH @ full @ B).to(torch.complex64))
    assert plan.floor()[0] > 0 and plan.info["dtype"] == "complex64" and plan.info["n"] == 128


def test_scipy_s_solvers_take_complex_plans():
    B = sp.csr_array(A[:35] + A[:35].conj().T + 40 * sp.eye_array(35))
    operator = st.plan(B, 1, device="cpu").as_linear_operator()
    assert operator.dtype == np.complex128
    np.testing.assert_allclose(
        eigsh(operator, k=3, return_eigenvectors=False), eigsh(B, k=3, return_eigenvectors=False)
    )
    rectangular = st.plan(A, 1, device="cpu").as_linear_operator()
    np.testing.assert_allclose(
        np.sort(svds(rectangular, k=2, return_singular_vectors=False)),
        np.sort(svds(A, k=2, return_singular_vectors=False)),
    )
    b = np.arange(35) * (1 - 2j)
    x, failed = gmres(operator, b, rtol=1e-10)
    assert not failed
    np.testing.assert_allclose(B @ x, b, atol=1e-6)
    real = st.plan(A.real.tocsr(), 1, device="cpu").as_linear_operator()
    np.testing.assert_allclose(real @ (np.ones(35) * 1j), A.real @ np.ones(35) * 1j)


@pytest.mark.parametrize(
    "symmetry, above", [("general", 0), ("hermitian", 5 - 2j), ("symmetric", 5 + 2j)]
)
def test_complex_files_are_planned(symmetry, above, tmp_path):
    file = tmp_path / "a.mtx"
    file.write_text(f"%%MatrixMarket matrix coordinate complex {symmetry}\n2 2 1\n2 1 5 2\n")
    plan = st.plan(file, 1, device="cpu")
    expected = torch.tensor([[0, above], [5 + 2j, 0]], dtype=torch.complex128)
    assert torch.equal(plan @ torch.eye(2, dtype=torch.complex128), expected)
    sp.save_npz(tmp_path / "b.npz", A)
    assert st.plan(tmp_path / "b.npz", 1, device="cpu").dtype is torch.complex128
    with pytest.raises(
        ValueError, match=r"read_matrix: values in a.mtx must be .*got complex128\. Sp"
    ):
        read_matrix(file)


PLAN, REAL = st.plan(A, 2, device="cpu"), st.plan(A.real.tocsr(), 2, device="cpu")
B = whole(35, 2, dtype=torch.complex128)
SMALL, LEAF = B.to(torch.complex64), B.clone().requires_grad_()
REFUSED = {
    "real B": (
        lambda: PLAN @ B.real,
        "run: B must be torch.complex128 with this plan, got torch.float64. Cast it "
        "with B.to(torch.complex128).",
    ),
    "another B": (
        lambda: PLAN @ SMALL,
        "run: B must be torch.complex128 with this plan, got torch.complex64. Cast",
    ),
    "of a real plan": (
        lambda: REAL @ SMALL,
        "run: B must be torch.complex128 with this plan, got torch.complex64. Cast",
    ),
    "of a half plan": (
        lambda: st.plan(A.real.tocsr(), 2, dtype=torch.float16, device="cpu") @ SMALL,
        "run: B must be torch.float16 like the plan, got torch.complex64. Multiply "
        "B.real and B.imag",
    ),
    "rows": (lambda: PLAN @ B[:9], "run: B must be of shape [..., 35, N], got (9, 2)."),
    "max": (
        lambda: PLAN.run(B, reduce="max"),
        "run: reduce must be sum or mean in a complex product, got max.",
    ),
    "relu": (
        lambda: PLAN.run(B, relu=True),
        "run: relu and out_dtype must be omitted in a complex product, got relu.",
    ),
    "out_dtype": (
        lambda: REAL.run(B, out_dtype=torch.float32),
        "run: relu and out_dtype must be omitted in a complex product, got torch.float32.",
    ),
    "beta": (
        lambda: PLAN.run(B, beta=1.0),
        "run: beta must be 0 when out is not given, got 1.0. Pass out=.",
    ),
    "bias and out": (
        lambda: PLAN.run(B, B[:60], bias=B[0]),
        "run: bias must be omitted with out=, got out=. Add it to the result.",
    ),
    "bias": (
        lambda: PLAN.run(B, bias=B),
        "run: bias must be of shape (2,) on cpu, got (35, 2) on cpu. Give one number "
        "per column of B.",
    ),
    "bias list": (
        lambda: PLAN.run(B, bias=[1, 2]),
        "run: bias must be a torch tensor, got list. Convert it with torch.as_tensor.",
    ),
    "out": (
        lambda: PLAN.run(B, out=torch.empty(60, 2)),
        "run: out must be torch.complex128 of shape (60, 2) on cpu, got torch.float32",
    ),
    "conjugate out": (
        lambda: PLAN.run(B, out=whole(60, 2, dtype=torch.complex128).conj()),
        "run: out must be a tensor whose elements have memory of their own, got a conjugate view.",
    ),
    "out with grad": (
        lambda: PLAN.run(LEAF, out=torch.empty(60, 2, dtype=torch.complex128)),
        "run: out must be omitted when gradients are needed, got a tensor.",
    ),
    "alpha": (lambda: PLAN.run(B, alpha=1j), "run: alpha must be a number, got 1j. Pass a float."),
    "linear": (
        lambda: PLAN.linear(B.T),
        "linear: plan must be real with this call, got complex numbers. Write plan.run(X.mT).mT.",
    ),
    "save": (
        lambda: PLAN.save("a.safetensors"),
        "save: plan must be real with this call, got complex numbers. Save the "
        "matrix, and plan it again.",
    ),
    "gradient": (
        lambda: PLAN.gradient(B.real),
        "gradient: grad must be torch.complex128 with this plan, got torch.float64.",
    ),
    "gradient values": (
        lambda: PLAN.gradient(B, values=B),
        "gradient: values must be real with this call, got complex numbers. Let "
        "autograd find the gradient.",
    ),
    "to": (
        lambda: PLAN.to(torch.float32),
        "to: dtype must be torch.complex64 or torch.complex128, got torch.float32.",
    ),
    "values": (
        lambda: REAL.run(B, values=torch.from_numpy(A.data)),
        "run: values must be a float tensor, got torch.complex128.",
    ),
    "dtype": (
        lambda: st.plan(A, 2, dtype=torch.float32, device="cpu"),
        "plan: dtype must be torch.complex64 or torch.complex128 of a complex A, got "
        "torch.float32.",
    ),
    "keep": (
        lambda: st.plan(A, 2, keep="inference", device="cpu"),
        "plan: reorder_columns and keep must be False and 'all' with complex numbers,"
        " got something else. Omit both.",
    ),
    "spmm real B": (
        lambda: st.spmm(A, B.real),
        "spmm: B must be complex like A, got torch.float64. Cast it with B.to(torch.complex64).",
    ),
    "spmm max": (
        lambda: st.spmm(A, B, "max"),
        "spmm: reduce must be sum or mean of complex numbers, got max.",
    ),
    "spmm rows": (lambda: st.spmm(A, B[:9]), "spmm: B must be of shape [..., 35, N], got (9, 2)."),
    "spmm of real, max": (
        lambda: st.spmm(A.real.tocsr(), B, "max"),
        "spmm: B must be a vector or matrix for sum or mean if it is complex, got "
        "shape (35, 2) for max.",
    ),
    "sddmm": (
        lambda: F.sddmm(*arrays()[:2], B[:1].expand(60, 2), B),
        "functional.sddmm: x must be of real numbers, got torch.complex128.",
    ),
    "functional": (
        lambda: F.spmm(*arrays(), SMALL),
        "functional.spmm: values must be of x's type torch.complex64, got torch.complex128.",
    ),
    "intake": (
        lambda: as_csr(A),
        "plan: values must be float16, bfloat16, float32, float64, or whole numbers, "
        "got complex128. Split it into real and imaginary parts.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_complex_products_do_not_take_is_refused(name):
    call, text = REFUSED[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(text)
