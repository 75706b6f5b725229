"""Plans for few products on a GPU: straight from A's arrays, then by a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.intake import as_csr
from sparsetile.plan.direct import DirectVariant
from sparsetile.plan.taken import taken
from tests.formats.row_lists import LISTS, matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

N = 32


def arrays(name: str, index: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Whole numbers, whose sums are exact."""
    csr = matrix(name).to("cuda")
    values = torch.randint(-3, 4, (csr.nnz,), device="cuda").float()
    return csr.indptr.to(index), csr.indices.to(index), values, csr.shape


def dense(A: tuple[Tensor, Tensor, Tensor, Any]) -> Tensor:
    indptr, indices, values, shape = A
    rows = torch.repeat_interleave(torch.arange(shape[0], device="cuda"), indptr.long().diff())
    made = torch.zeros(shape, device="cuda", dtype=torch.float64)
    return made.index_put_((rows, indices.long()), values.double())


def operand(rows: int, n: int = N) -> Tensor:
    return torch.randint(-4, 5, (rows, n), device="cuda").float()


def poison(shape: tuple[int, int]) -> None:
    """Leave NaN where a result will probably be."""
    torch.full(shape, torch.nan, device="cuda")


def direct(A: Any, **options: Any) -> tuple[st.Plan, DirectVariant]:
    plan = st.plan(A, N, expected_runs=3, **options)
    variant = plan._family.forward
    assert isinstance(variant, DirectVariant) and not variant.scheduled
    return plan, variant


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_canonical_arrays_are_copied_as_they_are(name, index):
    *_, values, shape = A = arrays(name, index)
    csr = as_csr(A)
    edges = torch.stack([csr.row_ids(), csr.indices.long()]).to(index)
    shuffled = torch.randperm(csr.nnz, device="cuda")
    for given in (A, (edges, values, shape), (edges[:, shuffled], values[shuffled], shape)):
        wanted, found = as_csr(given), taken(given, None)
        assert found is not None
        for field in ("indptr", "indices", "values", "entry_map"):
            mine, theirs = getattr(found, field), getattr(wanted, field)
            assert (mine is None) == (theirs is None), field
            assert mine is None or (mine.dtype is theirs.dtype and torch.equal(mine, theirs)), field


@pytest.mark.parametrize("place, value", [(0, 1), (40, 3), (40, -(2**40)), (40, 2**40), (-1, 7)])
def test_wrong_row_pointers_have_the_error_of_intake(place, value):
    indptr, indices, values, shape = arrays("some wide")
    indptr[place] = value
    with pytest.raises(ValueError) as wanted:
        as_csr((indptr, indices, values, shape), function="plan")
    with pytest.raises(ValueError) as found:
        st.plan((indptr, indices, values, shape), N)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("value", [-1, 4096, 2**33])
def test_wrong_columns_have_the_error_of_intake(value):
    indptr, indices, values, shape = arrays("some wide")
    indices[100] = value
    edges = torch.stack([torch.zeros_like(indices), indices])
    for A in ((indptr, indices, values, shape), (edges, values, shape)):
        with pytest.raises(ValueError) as wanted:
            as_csr(A, function="plan")
        with pytest.raises(ValueError) as found:
            st.plan(A, N)
        assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("name", ["one row", "one hub", "around a window", "hubs"])
def test_products_before_and_after_the_schedule(name):
    A = arrays(name)
    plan, variant = direct(A)
    B, wanted = operand(A[3][1]), dense(A)
    variant.later.left = 3
    for number in range(1, 6):
        poison((A[3][0], N))
        assert torch.equal((plan @ B).double(), wanted @ B.double())
        assert variant.scheduled == (number >= 3)


def test_epilogues_and_values_without_a_schedule():
    A = arrays("hubs")
    plan, variant = direct(A)
    B, wanted = operand(4096), dense(A)
    sums = wanted @ B.double()
    bias = torch.arange(float(N), device="cuda")
    found = plan.run(B, alpha=2.0, bias=bias, relu=True)
    assert torch.equal(found.double(), (2 * sums + bias).relu())
    out = torch.full((A[3][0], N), torch.nan, device="cuda")
    assert plan.run(B, out) is out and torch.equal(out.double(), sums)
    counts = A[0].diff().clamp(min=1).unsqueeze(1)
    torch.testing.assert_close(plan.run(B, reduce="mean").double(), sums / counts)
    plan.update_values(2 * A[2])
    assert torch.equal((plan @ B).double(), 2 * sums)
    assert not variant.scheduled
    assert torch.equal(plan.run(B, reduce="max"), st.plan(A, N).update_values(2 * A[2]).run(
        B, reduce="max"))  # fmt: skip
    assert variant.scheduled


def test_gradients_without_a_schedule():
    A = arrays("hubs")
    plan, _ = direct(A)
    B = operand(4096).requires_grad_()
    C = plan @ B
    G = operand(A[3][0])
    C.backward(G)
    assert torch.equal(B.grad.double(), dense(A).T @ G.double())


def test_a_captured_product_keeps_its_arrays():
    A = arrays("hubs")
    plan, variant = direct(A)
    B = operand(4096)
    plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    assert variant.later is None and not variant.scheduled
    variant.schedule()
    for factor in (1.0, 3.0):
        plan.update_values(factor * A[2])
        C.fill_(torch.nan)
        graph.replay()
        assert torch.equal(C.double(), factor * (dense(A) @ B.double()))


def test_another_stream_may_use_the_plan():
    A = arrays("hubs")
    B, wanted = operand(4096), dense(A)
    other = torch.cuda.Stream()
    for _ in range(5):
        plan, _ = direct(A)
        with torch.cuda.stream(other):
            C = plan @ B
        del plan
        torch.full((A[1].numel(),), -1, device="cuda")  # may get the plan's memory
        torch.cuda.synchronize()
        assert torch.equal(C.double(), wanted @ B.double())


def test_a_plan_of_pieces_in_several_levels():
    lengths = torch.tensor([3, 70_000, 0, 1025, 200_000], device="cuda")
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    indices = torch.cat([torch.arange(each, device="cuda") for each in lengths.tolist()])
    values = torch.randint(-1, 2, (indices.numel(),), device="cuda").float()
    A = (indptr, indices, values, (5, 200_000))
    B = operand(200_000, 8)
    wanted = torch.sparse_csr_tensor(
        indptr, indices, values.double(), A[3], check_invariants=False
    ) @ B.double()  # fmt: skip
    for options in ({"system": "csr"}, {"expected_runs": 3}):
        assert torch.equal((st.plan(A, 8, **options) @ B).double(), wanted)
