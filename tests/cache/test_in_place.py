"""Products bound to the caller's own values: changes behind them are seen in the next call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.cache import spmm as module
from tests.contracts.cases import csr_of, random_matrix

CSR = csr_of(random_matrix(30, 20, 0.3))


pytestmark = pytest.mark.usefixtures("planned_on_cpu")


@pytest.fixture(autouse=True)
def _cold() -> None:
    st.clear_plan_cache()


@pytest.fixture
def slow(calls_of) -> list[Any]:
    """Fingerprints taken: products in place take none."""
    return calls_of(module, "fingerprint")


def tensor() -> Tensor:
    return torch.sparse_csr_tensor(
        CSR.indptr.clone(), CSR.indices.long(), CSR.values.clone(), CSR.shape
    )


def arrays() -> tuple[Any, ...]:
    return CSR.indptr.clone(), CSR.indices.clone(), CSR.values.clone(), CSR.shape


def edges() -> tuple[Any, ...]:
    """Without weights, unsorted."""
    mixed = torch.randperm(CSR.nnz, generator=torch.Generator().manual_seed(1))
    return torch.stack([CSR.row_ids(), CSR.indices.long()])[:, mixed].contiguous(), None, CSR.shape


KINDS = {"tensor": tensor, "arrays": arrays, "edges": edges}


def dense(A: Any) -> Tensor:
    return st.plan(A, 20, device="cpu") @ torch.eye(20)


def check(A: Any, B: Tensor) -> None:
    torch.testing.assert_close(st.spmm(A, B), dense(A) @ B)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_matrix_is_not_looked_at_again(kind, slow):
    A, B = KINDS[kind](), torch.randn(20, 8)
    check(A, B)
    slow.clear()
    for _ in range(3):
        check(A, torch.randn(20, 8))
        check(A, torch.nn.Parameter(torch.randn(20, 8), requires_grad=False))
        check(A, torch.randn(20, 9)[:, :8])
    assert not slow
    check(A, torch.randn(20, 5))  # another width has a plan of its own
    assert len(slow) == 1


@pytest.mark.parametrize("kind", ["tensor", "arrays"])
def test_new_values_are_read_where_they_are(kind, slow):
    A, B = KINDS[kind](), torch.randn(20, 8)
    check(A, B)
    slow.clear()
    values = A.values() if kind == "tensor" else A[2]
    values.mul_(3)
    if kind == "tensor":
        check(A, B)  # the count of a sparse tensor is that of its pattern, too
        slow.clear()
    values.numpy()[:3] = 7  # nothing counts this
    check(A, B)
    optimiser = torch.optim.AdamW([torch.nn.Parameter(values)], fused=True)
    optimiser.param_groups[0]["params"][0].grad = torch.ones_like(values)
    optimiser.step()
    check(A, B)
    assert not slow


@pytest.mark.parametrize("kind", KINDS)
def test_another_pattern_is_noticed(kind, slow):
    A, B = KINDS[kind](), torch.randn(20, 8)
    check(A, B)
    indices = A.col_indices() if kind == "tensor" else A[1] if kind == "arrays" else A[0][1]
    indices[0] = 19 if int(indices[0]) != 19 else 0
    check(A, B)


def test_data_of_another_matrix_is_noticed_even_at_the_same_address():
    A, B = tensor(), torch.randn(20, 8)
    check(A, B)
    for seed in range(20):
        other = csr_of(random_matrix(30, 20, 0.3, seed=seed))
        A.data = torch.sparse_csr_tensor(
            other.indptr, other.indices.long(), other.values, other.shape
        )
        del other
        gc.collect(0)  # a whole collection takes longer than the rest
        check(A, B)


def test_indices_at_the_address_of_the_old_ones_are_noticed():
    size, each = 64, 16
    first = (torch.arange(each, dtype=torch.int32) * (size // each)).repeat(size)
    indptr = torch.arange(0, size * each + 1, each, dtype=torch.int32)
    A = indptr, first.clone(), torch.rand(size * each), (size, size)
    B = torch.randn(size, 8)
    for number in range(40):
        C = torch.sparse_csr_tensor(*A[:3], A[3]).to_dense() @ B
        torch.testing.assert_close(st.spmm(A, B), C)
        for _ in range(2):  # the allocator gives the freed memory out again
            A[1].data = first + number % 4


@pytest.mark.parametrize("part", [0, 1, 2])
def test_memory_is_kept_while_its_address_is_compared(part):
    A, B = arrays(), torch.randn(20, 8)
    check(A, B)
    memory = weakref.ref(A[part].untyped_storage())
    A[part].data = A[part].clone()
    assert memory() is not None, "new memory could get the same address"
    check(A, B)
    gc.collect()
    assert memory() is None


def test_a_view_in_place_of_the_edges_is_noticed():
    A, B = edges(), torch.randn(20, 8)
    check(A, B)
    A[0].data = A[0].data[:, :30]  # the same address and count
    check(A, B)
    A[0].data = A[0].data.flip(0)[:, :9]
    st.spmm((A[0], None, (20, 30)), torch.randn(30, 8))


def test_a_shape_that_is_a_list_may_change():
    edge_index, _, shape = edges()
    A, B = (edge_index, None, [*shape]), torch.randn(20, 8)
    check(A, B)
    A[2][0] = 40
    assert st.spmm(A, B).shape == (40, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_autocast_and_modes_take_the_other_way(kind):
    A, B = KINDS[kind](), torch.randn(20, 8)
    check(A, B)
    tracked = B.clone().requires_grad_()
    C = st.spmm(A, tracked)
    C.sum().backward()
    torch.testing.assert_close(tracked.grad, dense(A).T @ torch.ones(30, 8))
    with torch.no_grad():
        assert not st.spmm(A, tracked).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert st.spmm(A, B).dtype is torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(st.spmm(A, B), dense(A) @ B)
    torch.testing.assert_close(torch.func.vmap(lambda b: st.spmm(A, b))(B.expand(3, 20, 8)),
                               (dense(A) @ B).expand(3, 30, 8))  # fmt: skip
    assert st.spmm(A, B, reduce="max").shape == (30, 8)
    torch.testing.assert_close(st.spmm(A, B[:, 0]), dense(A) @ B[:, 0])


def test_trained_values_have_gradients():
    A, B = arrays(), torch.randn(20, 8)
    check(A, B)
    A[2].requires_grad_()
    st.spmm(A, B).sum().backward()
    assert A[2].grad is not None and bool((A[2].grad != 0).any())


@pytest.mark.parametrize("kind", KINDS)
def test_an_operand_that_does_not_fit_is_refused_as_before(kind):
    A, B = KINDS[kind](), torch.randn(20, 8)
    check(A, B)
    with pytest.raises(ValueError, match="B must be of shape"):
        st.spmm(A, torch.randn(21, 8))
    with pytest.raises(TypeError):
        st.spmm(A, B.tolist())
    check(A, torch.complex(B, B).conj().imag)  # a negated view
    check(A, B.t().contiguous().t())


def test_what_torch_does_not_count_is_compared_by_content():
    with torch.inference_mode():
        A = arrays()
    B = torch.randn(20, 8)
    check(A, B)
    with torch.inference_mode():
        A[1][0] = 19 if int(A[1][0]) != 19 else 0
    check(A, B)
    shared = arrays()
    shared[1].share_memory_()
    check(shared, B)
    shared[1].numpy()[0] = 19 if int(shared[1][0]) != 19 else 0
    check(shared, B)


def test_values_of_another_type_or_order_are_copied(slow):
    B = torch.randn(20, 8)
    wide = (*arrays()[:2], CSR.values.double(), CSR.shape)
    mixed = torch.randperm(CSR.nnz)
    edge_index = torch.stack([CSR.row_ids(), CSR.indices.long()])[:, mixed]
    weighted = edge_index, CSR.values[mixed].clone(), CSR.shape
    for A, at in ((wide, 2), (weighted, 1)):
        st.spmm(A, B)
        A[at].mul_(2)
        slow.clear()
        torch.testing.assert_close(st.spmm(A, B), 2 * dense(arrays()) @ B)
        assert slow


def test_a_matrix_is_not_kept_alive_and_a_copy_is_another():
    A, B = tensor(), torch.randn(20, 8)
    check(A, B)
    check(A, B)
    check(A.clone(), B)
    assert len(module._entries) == 1
    del A
    gc.collect()
    assert len(module._entries) == 0
