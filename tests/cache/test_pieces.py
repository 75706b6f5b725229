"""Products from arrays with more entries than one launch numbers: all paths, in pieces of rows."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
import sparsetile.functional as F
from sparsetile.cache import fresh, operators
from tests.contracts.cases import assert_close, csr_of, random_matrix, with_dense_row

MATRICES = {
    "random": random_matrix(150, 130, 0.1),
    "dense row": with_dense_row(90, 700, 3),
    "empty rows": random_matrix(300, 60, 0.02),
}


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETILE_ENTRY_LIMIT", "100")


def arrays(csr: st.CSR, index: torch.dtype = torch.int64):
    # Copies: torch does not count writes to memory of NumPy.
    return csr.indptr.to(index, copy=True), csr.indices.to(index, copy=True), csr.values, csr.shape


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_products_from_arrays_are_right(device, name, dtype, index):
    csr = csr_of(MATRICES[name], dtype=dtype).to(device)
    A = arrays(csr, index)
    for n in (1, 7, 64):
        B = torch.randn(csr.shape[1], n, dtype=torch.float64).to(dtype).to(device)
        assert_close(st.spmm(A, B), csr, B)
        assert_close(F.spmm(*A[:3], B), csr, B)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_batches_and_their_gradients_are_those_without_pieces(device, reduce, monkeypatch):
    csr = csr_of(MATRICES["random"], dtype=torch.float64).to(device)
    B = torch.randn(3, 130, 5, dtype=torch.float64, device=device)

    def results() -> list[torch.Tensor]:
        values, x = csr.values.detach().clone().requires_grad_(), B.clone().requires_grad_()
        indptr, indices, _, _ = arrays(csr)
        C = F.spmm(indptr, indices, values, x, reduce)
        (C * C).sum().backward()
        return [C.detach(), values.grad, x.grad]

    found = results()
    monkeypatch.delenv("SPARSETILE_ENTRY_LIMIT")
    for one, other in zip(found, results(), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients(device):
    csr = csr_of(random_matrix(20, 15, 0.4), dtype=torch.float64).to(device)
    indptr, indices, values, _ = arrays(csr)
    x = torch.randn(15, 3, dtype=torch.float64, device=device)
    operands = values.detach().requires_grad_(), x.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v, x: F.spmm(indptr, indices, v, x), operands)


def test_the_transpose_is_kept_from_the_first_gradient(device, monkeypatch):
    csr = csr_of(MATRICES["random"]).to(device)
    indptr, indices, values, _ = arrays(csr)
    made = []
    merged = operators._merged_transpose
    monkeypatch.setattr(
        operators, "_merged_transpose", lambda *each: made.append(1) or merged(*each)
    )
    for _ in range(3):
        x = torch.randn(130, 4, device=device, requires_grad=True)
        F.spmm(indptr, indices, values, x).sum().backward()
    assert made == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_such_a_matrix_is_never_planned_by_spmm(monkeypatch):
    monkeypatch.setattr(fresh, "PLAN_SECONDS", (0.0, 0.0))  # a plan would pay at once
    monkeypatch.setattr("sparsetile.cache.spmm.build_plan", None)
    csr = csr_of(MATRICES["random"]).to("cuda")
    A, B = arrays(csr), torch.randn(130, 8, device="cuda")
    for _ in range(3):
        assert_close(st.spmm(A, B), csr, B)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("part, at", [("columns", 900), ("pointers", 40)])
def test_a_wrong_index_raises_at_once_on_a_gpu(part, at):
    csr = csr_of(MATRICES["random"]).to("cuda")
    indptr, indices, values, shape = arrays(csr)
    (indices if part == "columns" else indptr)[at] = 10**6
    name = "column indices" if part == "columns" else "row pointers"
    with pytest.raises(ValueError, match=f"^spmm: {name} must be "):
        st.spmm((indptr, indices, values, shape), torch.randn(130, 8, device="cuda"))
