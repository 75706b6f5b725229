"""``spmm``: one plan per matrix, found again, never keeping the matrix, never out of date."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.cache import spmm as module
from sparsetile.intake import write_npz
from tests.contracts.cases import assert_close, csr_of, random_matrix
from tests.plans import variant_of

MATRIX = random_matrix(30, 20, 0.2).astype(np.float32)


pytestmark = pytest.mark.usefixtures("planned_on_cpu")


@pytest.fixture(autouse=True)
def cold_cache() -> Iterator[None]:
    st.clear_plan_cache()
    yield
    st.clear_plan_cache()


@pytest.fixture
def plans(calls_of) -> list[Any]:
    """A call for every plan that spmm made."""
    return calls_of(module, "build_plan")


def sparse_csr() -> torch.Tensor:
    return torch.sparse_csr_tensor(
        torch.from_numpy(MATRIX.indptr.astype(np.int64)),
        torch.from_numpy(MATRIX.indices.astype(np.int64)),
        torch.from_numpy(MATRIX.data.copy()),
        MATRIX.shape,
        check_invariants=True,
    )


def csr_tuple() -> tuple:
    csr = csr_of(MATRIX)
    return csr.indptr, csr.indices, csr.values, csr.shape


def edge_tuple() -> tuple:
    csr = csr_of(MATRIX)
    order = torch.randperm(csr.nnz)
    edges = torch.stack([csr.row_ids(), csr.indices.long()])[:, order]
    return edges, csr.values[order], csr.shape


def numpy_tuple() -> tuple:
    return MATRIX.indptr.copy(), MATRIX.indices.copy(), MATRIX.data.copy(), MATRIX.shape


INPUTS: dict[str, Callable[[], object]] = {
    "torch CSR": sparse_csr,
    "torch COO": lambda: sparse_csr().to_sparse_coo(),
    "torch CSC": lambda: sparse_csr().to_sparse_csc(),
    "scipy CSR": lambda: MATRIX.copy(),
    "scipy COO": lambda: MATRIX.tocoo(copy=True),
    "CSR": lambda: csr_of(MATRIX),
    "CSR tuple": csr_tuple,
    "edge tuple": edge_tuple,
    "NumPy tuple": numpy_tuple,
}


def values_of(A) -> torch.Tensor | np.ndarray:
    """The values inside A, as something that can be written to."""
    if isinstance(A, torch.Tensor):
        return A._values() if A.layout == torch.sparse_coo else A.values()
    if isinstance(A, tuple):
        return A[-2]
    return A.values if isinstance(A, st.CSR) else A.data


def operand(n: int = 4, **kwargs) -> torch.Tensor:
    return torch.randn(20, n, **kwargs)


# -- one plan a matrix --------------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_a_matrix_is_planned_once_and_the_result_is_right(name, plans):
    A = INPUTS[name]()
    for _ in range(3):
        B = operand()
        assert_close(st.spmm(A, B), csr_of(MATRIX), B)
    assert len(plans) == 1


@pytest.mark.parametrize("change", [{"n": 9}, {"dtype": torch.float64}], ids=["width", "dtype"])
def test_another_width_or_type_of_B_is_another_plan_of_the_same_matrix(plans, change):
    A = sparse_csr()
    st.spmm(A, operand())
    B = operand(**change)
    assert_close(st.spmm(A, B), csr_of(MATRIX), B)
    st.spmm(A, operand())
    assert len(plans) == 2 and len(module._entries) == 1


def test_determinism_asked_for_later_is_another_plan(plans):
    A = sparse_csr()
    st.spmm(A, operand())
    torch.use_deterministic_algorithms(True)
    try:
        st.spmm(A, operand())
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call.result.deterministic for call in plans] == [False, True]


def test_two_matrices_of_equal_content_have_a_plan_each(plans):
    first, second = sparse_csr(), sparse_csr()
    st.spmm(first, operand())
    st.spmm(second, operand())
    assert len(plans) == 2


def test_a_new_tuple_of_the_same_tensors_is_the_same_matrix(plans):
    indptr, indices, values, shape = csr_tuple()
    for _ in range(3):
        st.spmm((indptr, indices, values, shape), operand())
    st.spmm([indptr, indices, values, list(shape)], operand())
    assert len(plans) == 1


def test_clearing_the_cache_forgets_every_plan(plans):
    A = sparse_csr()
    st.spmm(A, operand())
    st.clear_plan_cache()
    assert not module._entries and not module._paths
    st.spmm(A, operand())
    assert len(plans) == 2


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "amin"])
def test_every_reduction_uses_the_same_plan(plans, reduce):
    A, B = sparse_csr(), operand()
    st.spmm(A, B)
    assert torch.equal(
        st.spmm(A, B, reduce=reduce), st.plan(A, 4, device="cpu").run(B, reduce=reduce)
    )
    assert len(plans) == 1


def test_autocast_plans_in_the_lower_precision(plans):
    A, B = sparse_csr(), operand()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        C = st.spmm(A, B)
    assert C.dtype is torch.bfloat16 and plans[0].result.dtype is torch.bfloat16


# -- life and death -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, grad",
    [
        ("scipy CSR", False),
        *(
            (name, grad)
            for name in ("torch CSR", "CSR", "CSR tuple", "edge tuple")
            for grad in (False, True)
        ),
    ],
)
def test_a_plan_goes_when_its_matrix_goes(name, grad):
    A = INPUTS[name]()
    if grad:
        (A if isinstance(A, torch.Tensor) else values_of(A)).requires_grad_()
    parts = [p for p in A if isinstance(p, torch.Tensor)] if isinstance(A, tuple) else [A]
    watched = [weakref.ref(part) for part in parts]
    C = st.spmm(A, operand())
    assert len(module._entries) == 1
    kept = weakref.ref(next(iter(next(iter(module._entries.values())).plans.values()))[0])
    del A, parts, C
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert kept() is None and not module._entries


def test_the_death_of_one_part_of_a_tuple_is_enough():
    indptr, indices, values, shape = csr_tuple()
    st.spmm((indptr, indices, values, shape), operand())
    del values
    gc.collect()
    assert not module._entries


def test_a_new_matrix_at_the_address_of_a_dead_one_is_not_mistaken_for_it():
    for scale in range(1, 40):
        A = MATRIX * scale
        B = operand()
        assert_close(st.spmm(A, B), csr_of(MATRIX * scale), B)
        del A


# -- change -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_values_changed_in_place_are_noticed_without_planning_anew(name, plans):
    A, B = INPUTS[name](), operand()
    st.spmm(A, B)
    values_of(A)[:] *= -3
    assert_close(st.spmm(A, B), csr_of(MATRIX * -3), B)
    values_of(A)[0] = 0
    changed = st.plan(A, 4, device="cpu")
    assert torch.equal(st.spmm(A, B), changed @ B)
    assert len(plans) == 1


@pytest.mark.parametrize("name", ["CSR tuple", "CSR", "NumPy tuple", "scipy CSR"])
def test_a_pattern_changed_in_place_is_noticed(name, plans):
    A, B = INPUTS[name](), operand()
    st.spmm(A, B)
    indices = A.indices if name in ("CSR", "scipy CSR") else A[1]
    row = int(np.diff(MATRIX.indptr).argmax())
    last = MATRIX.indptr[row + 1] - 1
    assert indices[last] < 19, "the case must leave room"
    indices[last] = 19
    assert torch.equal(st.spmm(A, B), st.plan(A, 4, device="cpu") @ B)
    assert len(plans) == 2
    st.spmm(A, B)
    assert len(plans) == 2


def test_a_pattern_that_gets_values_and_loses_them_is_noticed():
    indptr, indices, values, shape = csr_tuple()
    B = operand()
    pattern = csr_of(MATRIX, pattern=True)
    assert_close(st.spmm((indptr, indices, None, shape), B), pattern, B)
    assert_close(st.spmm((indptr, indices, values, shape), B), csr_of(MATRIX), B)
    assert_close(st.spmm((indptr, indices, None, shape), B), pattern, B)


def test_every_width_s_plan_gets_the_new_values(plans):
    A = sparse_csr()
    st.spmm(A, operand(4))
    st.spmm(A, operand(9))
    A.values().mul_(2)
    for n in (4, 9):
        B = operand(n)
        assert_close(st.spmm(A, B), csr_of(MATRIX * 2), B)
    assert len(plans) == 2


def test_a_result_does_not_change_when_the_matrix_does():
    A, B = sparse_csr(), operand()
    C = st.spmm(A, B)
    before = C.clone()
    A.values().zero_()
    st.spmm(A, B)
    assert torch.equal(C, before)


@pytest.mark.parametrize("other_stream", [False, True])
def test_new_values_are_written_into_a_plan_that_one_stream_uses(plans, other_stream):
    """Another stream may still read the old ones: then they are read in the product instead."""
    indptr, indices, values, shape = csr_tuple()
    A, B = (indptr, indices, values.double(), shape), operand()  # the plan holds a copy in float32
    st.spmm(A, B)
    (entry,) = module._entries.values()
    if other_stream:
        entry.streams.add(7)
    held = variant_of(plans[0].result).values.clone()
    A[2].mul_(3)
    for _ in range(2):
        assert_close(st.spmm(A, B), csr_of(MATRIX * 3), B)
    now = variant_of(plans[0].result).values
    assert torch.equal(now, held if other_stream else 3 * held) and len(plans) == 1


# -- files --------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = []
    for number in range(10):
        path = tmp_path / f"{number}.npz"
        write_npz(path, csr_of(MATRIX * (number + 1)))
        made.append(path)
    return made


def test_a_path_is_planned_once_however_it_is_written(plans, files, monkeypatch):
    B = operand()
    monkeypatch.chdir(files[0].parent)
    for path in (files[0], str(files[0]), "0.npz", Path("0.npz")):
        assert_close(st.spmm(path, B), csr_of(MATRIX), B)
    assert len(plans) == 1


def test_a_file_that_changed_is_read_again(plans, files):
    B = operand()
    st.spmm(files[0], B)
    write_npz(files[0], csr_of(MATRIX * 5))
    os.utime(files[0], ns=(1, 1))
    assert_close(st.spmm(files[0], B), csr_of(MATRIX * 5), B)
    assert len(plans) == 2


def test_only_the_most_recent_paths_are_kept(plans, files):
    for path in files:
        st.spmm(path, operand())
    assert len(module._paths) == module.MAX_PATHS == 8 and not len(module._entries)
    st.spmm(files[9], operand())
    st.spmm(files[2], operand())
    assert len(plans) == 10
    st.spmm(files[0], operand())
    assert len(plans) == 11


def test_a_path_in_use_is_not_the_one_that_is_forgotten(plans, files):
    for path in files:
        st.spmm(files[0], operand())
        st.spmm(path, operand())
    assert len(plans) == 10


def test_a_missing_file_is_told_each_time_and_does_not_grow_the_cache(tmp_path):
    for _ in range(20):
        with pytest.raises(FileNotFoundError, match="must be an existing file"):
            st.spmm(tmp_path / "absent.npz", operand())
    assert len(module._entries) <= 1


# -- gradients ----------------------------------------------------------------------------------


def reference_gradients(B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of sum((A B)^2) for A's values in canonical order and for B."""
    csr = csr_of(MATRIX)
    values = csr.values.clone().requires_grad_()
    b = B.detach().clone().requires_grad_()
    rows, columns = csr.row_ids(), csr.indices.long()
    C = torch.zeros(30, B.shape[1]).index_add(0, rows, values.unsqueeze(1) * b[columns])
    (C**2).sum().backward()
    return values.grad, b.grad


@pytest.mark.parametrize("name", ["torch CSR", "CSR", "CSR tuple", "edge tuple"])
def test_gradients_flow_into_values_and_operand(name):
    A, B = INPUTS[name](), operand(requires_grad=True)
    leaf = A if name == "torch CSR" else values_of(A)
    leaf.requires_grad_()
    for _ in range(2):  # the second time with the kept plan
        leaf.grad = B.grad = None
        (st.spmm(A, B) ** 2).sum().backward()
        expected_values, expected_B = reference_gradients(B)
        found = leaf.grad.values() if name == "torch CSR" else leaf.grad
        if name == "edge tuple":
            place = st.plan(A, 4, device="cpu")._csr.entry_map
            found = torch.empty_like(found).scatter(0, place, found)
        assert torch.allclose(found, expected_values, rtol=1e-4, atol=1e-4)
        assert torch.allclose(B.grad, expected_B, rtol=1e-4, atol=1e-4)


def test_gradients_of_B_alone_flow_through_a_plain_matrix():
    B = operand(requires_grad=True)
    (st.spmm(MATRIX.copy(), B) ** 2).sum().backward()
    assert torch.allclose(B.grad, reference_gradients(B)[1], rtol=1e-4, atol=1e-4)


def test_no_graph_is_made_when_none_is_asked_for():
    A = sparse_csr().requires_grad_()
    with torch.no_grad():
        assert not st.spmm(A, operand()).requires_grad
    assert st.spmm(A, operand()).requires_grad


def test_edge_weights_are_trained_through_spmm(plans):
    edges, weight, shape = edge_tuple()
    weight.requires_grad_()
    B, goal = operand(), torch.randn(30, 4)
    optimiser = torch.optim.SGD([weight], lr=0.5)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        loss = ((st.spmm((edges, weight, shape), B) - goal) ** 2).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert len(plans) == 1


def test_two_layers_over_one_matrix_share_a_backward(monkeypatch):
    """On a GPU the values of a sparse tensor count as changed at every call; so they do here."""
    fingerprint = module.fingerprint
    monkeypatch.setattr(module, "fingerprint", lambda A: (fingerprint(A)[0], object()))
    square = random_matrix(20, 20, 0.2).astype(np.float32)
    A = torch.from_numpy(square.toarray()).to_sparse_csr()
    B = operand(requires_grad=True)
    st.spmm(A, torch.relu(st.spmm(A, B))).sum().backward()
    found, B.grad = B.grad, None
    full = torch.from_numpy(square.toarray())
    (full @ torch.relu(full @ B)).sum().backward()
    assert torch.allclose(found, B.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", INPUTS)
def test_an_array_of_numpy_gives_one(kind):
    A, B = INPUTS[kind](), np.asfortranarray(operand().numpy())
    full = MATRIX.toarray()
    for each in (B, B[::-1][::-1], B[:, 0]):
        C = st.spmm(A, each)
        assert type(C) is np.ndarray and C.dtype == each.dtype
        np.testing.assert_allclose(C, full @ each, rtol=1e-4, atol=1e-5)
    largest = st.spmm(A, B, "max")
    assert type(largest) is np.ndarray and np.array_equal(
        largest, st.spmm(A, torch.from_numpy(B), "max").numpy()
    )


# -- mistakes -----------------------------------------------------------------------------------


def test_an_operand_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError) as caught:
        st.spmm(sparse_csr(), [[1.0, 2.0]])
    assert str(caught.value) == (
        "spmm: B must be a torch tensor or an array of NumPy or cupy, got list. "
        "Use torch.as_tensor."
    )


def test_an_operand_of_another_shape_is_refused():
    for given in (torch.ones(19), torch.tensor(1.0), torch.ones(4, 20), torch.ones(2, 19, 3)):
        with pytest.raises(ValueError) as caught:
            st.spmm(sparse_csr(), given)
        assert str(caught.value) == (
            f"spmm: B must be of shape [..., 20, N], got {tuple(given.shape)}. "
            "A is 30x20: B needs one row per column of A."
        )


def test_edges_without_a_shape_that_miss_the_last_nodes_say_so():
    edges = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError) as caught:
        st.spmm((edges, None), torch.ones(5, 2))
    assert str(caught.value) == (
        "spmm: B must be of shape [..., 3, N], got (5, 2). The largest number in edge_index makes "
        "A 3x3: pass (edge_index, weight, shape) if A is larger."
    )
    assert st.spmm((edges, None, (5, 5)), torch.ones(5, 2)).shape == (5, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_an_operand_of_whole_numbers_is_refused_with_a_cast(dtype):
    with pytest.raises(
        TypeError, match=r"^spmm: B must be of type .* Cast it with B\.to\(torch\.fl"
    ):
        st.spmm(sparse_csr(), torch.ones(20, 4, dtype=dtype))


def test_a_dense_matrix_is_refused():
    with pytest.raises(TypeError, match=r"^spmm: A must be a sparse matrix, got a dense tensor"):
        st.spmm(torch.ones(30, 20), operand())
    with pytest.raises(TypeError, match=r"^spmm: A must be a sparse matrix, got an edge_index"):
        st.spmm(torch.zeros(2, 9, dtype=torch.int64), operand())


def test_threads_share_the_cache(plans):
    A, inputs = sparse_csr(), [operand() for _ in range(8)]
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(10):
            results[number] = st.spmm(A, inputs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(plans) == 1 and len(results) == 8
    for number, C in results.items():
        assert_close(C, csr_of(MATRIX), inputs[number])


def test_a_matrix_of_scipy_s_old_kind_works_too(plans):
    A, B = sp.csr_matrix(MATRIX), operand()
    assert_close(st.spmm(A, B), csr_of(MATRIX), B)
    st.spmm(A, B)
    assert len(plans) == 1


def test_the_plans_of_a_matrix_are_bounded_and_the_latest_stay(plans, constants):
    constants(module, MAX_PLANS=3)
    A = csr_tuple()
    for n in (1, 2, 3, 1, 4):
        assert_close(st.spmm(A, torch.ones(20, n)), csr_of(MATRIX), torch.ones(20, n))
    (entry,) = module._entries.values()
    assert [key[0] for key in entry.plans] == [3, 1, 4]
    assert len(plans) == 4
    st.spmm(A, torch.ones(20, 2))
    assert len(plans) == 5, "what was dropped is planned again"


def test_a_plan_tells_the_allocator_of_every_tensor_it_keeps(monkeypatch):
    plan = st.plan(csr_tuple(), 4)
    plan.flat_with_transpose()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan @ torch.ones(20, 4)
    recorded: list[tuple[int, object]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: recorded.append((id(self), stream))
    )
    cast = plan._family.known(False, torch.bfloat16, plan.n)
    kept = [*plan.flat[0], plan._variant.values, cast.values, plan.T._variant.values]
    variant_of(plan).device = torch.device("cuda", 0)
    plan.record_stream("stream")
    assert {id(tensor) for tensor in kept} <= {where for where, _ in recorded}
    assert {stream for _, stream in recorded} == {"stream"}


def test_a_pyg_graph_is_planned_once_and_its_weights_are_trained(plans):
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1, 1], [1, 0, 2]])
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    graph = data.Data(edge_index=edges, edge_weight=weight, num_nodes=3)
    B = torch.tensor([[1.0], [10.0], [100.0]])
    C = st.spmm(graph, B)
    assert C.tolist() == [[10.0], [302.0], [0.0]]
    C.sum().backward()
    assert weight.grad.tolist() == [10.0, 1.0, 100.0]
    st.spmm(graph, B)
    assert len(plans) == 1
    assert torch.equal(st.spmm((edges, weight.detach()), B), C.detach())
    followed = st.plan(graph, 1)
    weight.grad = None
    (followed @ B).sum().backward()
    assert weight.grad.tolist() == [10.0, 1.0, 100.0]
