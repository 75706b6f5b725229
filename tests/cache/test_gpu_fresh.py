"""Products of arrays on a GPU, without and with a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
import sparsetile.functional as F
from sparsetile.cache import fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Long rows of several pieces, short ones, none.
LENGTHS = [0, 3, 1, 40_000, 17, 0, 700, 64, 65, 33, *range(50), 0]


def arrays(
    lengths: list[int], cols: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    indptr = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    size = (int(indptr[-1]),)
    indices = torch.randint(0, cols, size, device="cuda", generator=generator)
    values = torch.rand(size, device="cuda", generator=generator, dtype=torch.float64) - 0.5
    return indptr, indices, values.to(dtype)


def operand(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.rand(shape, device="cuda", generator=generator) - 0.5).to(dtype)


def close(C: Tensor, indptr: Tensor, indices: Tensor, values: Tensor | None, B: Tensor) -> None:
    """Compare with float64: the error of each element is within that of its own sum."""
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1, device="cuda"), indptr.diff())
    weights = torch.ones(len(indices), device="cuda") if values is None else values
    each = weights.double()[:, None] * B.double()[..., indices.long(), :]
    zeros = torch.zeros(C.shape, dtype=torch.float64, device="cuda")
    want, size = zeros.index_add(-2, rows, each), zeros.index_add(-2, rows, each.abs())
    unit = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}.get(C.dtype, 2.0**-24)
    bound = 64 * unit * size
    if C.dtype.itemsize == 2:
        bound += torch.finfo(C.dtype).eps * want.abs() + 1e-7
    assert ((C.double() - want).abs() <= bound + 1e-300).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 16, 32, 128, 200, 512])
def test_products_of_arrays_agree_with_float64(dtype: torch.dtype, n: int) -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, dtype)
    B = operand(3000, n, dtype=dtype)
    shape = (len(LENGTHS), 3000)
    close(F.spmm(indptr, indices, values, B), indptr, indices, values, B)
    close(F.spmm(indptr.int(), indices.int(), None, B), indptr, indices, None, B)
    close(st.spmm((indptr, indices, values, shape), B), indptr, indices, values, B)
    A = torch.sparse_csr_tensor(indptr, indices, values, size=shape)
    close(st.spmm(A, B), indptr, indices, values, B)


@pytest.mark.parametrize("seed", range(4))
def test_many_rows_agree_with_float64(seed: int) -> None:
    lengths = torch.randint(0, (3, 12, 60, 300)[seed], (30_000,)).tolist()
    indptr, indices, values = arrays(lengths, 20_000, torch.float32, seed)
    for n in (8, 64, 256):
        B = operand(20_000, n, dtype=torch.float32)
        close(F.spmm(indptr, indices, values, B), indptr, indices, values, B)


def test_gradients_agree_with_dense_ones() -> None:
    indptr, indices, values = arrays(LENGTHS[:12], 400, torch.float64)
    values.requires_grad_()
    B = operand(400, 24, dtype=torch.float64).requires_grad_()
    G = operand(12, 24, dtype=torch.float64, seed=2)
    rows = torch.repeat_interleave(torch.arange(12, device="cuda"), indptr.diff())
    dense = torch.zeros(12, 400, dtype=torch.float64, device="cuda")
    dense = dense.index_put((rows, indices), values, accumulate=True)
    want = torch.autograd.grad(dense @ B, (values, B), G)
    for _ in range(3):  # the transpose is made, kept, and found
        got = torch.autograd.grad(F.spmm(indptr, indices, values, B), (values, B), G)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("planned", [False, True])
def test_gradients_of_spmm_agree_with_dense_ones(
    monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    if planned:
        monkeypatch.setattr(fresh, "SHARE", 1e9)
    indptr, indices, values = arrays([3, 0, 40, 7], 60, torch.float64)
    indices = torch.cat([torch.randperm(60, device="cuda")[:n].sort().values for n in (3, 40, 7)])
    values.requires_grad_()
    B = operand(60, 24, dtype=torch.float64).requires_grad_()
    G = operand(4, 24, dtype=torch.float64, seed=2)
    rows = torch.repeat_interleave(torch.arange(4, device="cuda"), indptr.diff())
    dense = torch.zeros(4, 60, dtype=torch.float64, device="cuda")
    dense = dense.index_put((rows, indices), values)
    want = torch.autograd.grad(dense @ B, (values, B), G)
    for _ in range(3):
        got = torch.autograd.grad(st.spmm((indptr, indices, values, (4, 60)), B), (values, B), G)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_batches_and_means_agree_with_loops() -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(2, 3, 3000, 40, dtype=torch.float32)
    C = F.spmm(indptr, indices, values, B)
    for i in range(2):
        for j in range(3):
            assert torch.equal(C[i, j], F.spmm(indptr, indices, values, B[i, j]))
    mean = F.spmm(indptr, indices, values, B, reduce="mean")
    torch.testing.assert_close(mean * indptr.diff().clamp(min=1)[:, None], C, rtol=1e-4, atol=1e-4)


def test_nothing_waits_for_the_gpu() -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(3000, 64, dtype=torch.float32)
    st.spmm((indptr, indices, values, (len(LENGTHS), 3000)), B)
    F.spmm(indptr, indices, values, B)
    again = [each.clone() for each in (indptr, indices, values)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        F.spmm(*again, B)
        st.spmm((*again, (len(LENGTHS), 3000)), B)
        wanted = values.detach().requires_grad_()
        F.spmm(*again[:2], wanted, B).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_product_replays_with_new_arrays() -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(3000, 64, dtype=torch.float32)
    F.spmm(indptr, indices, values, B)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        C = F.spmm(indptr, indices, values, B)
    for seed in (5, 6):
        _, new_indices, new_values = arrays(LENGTHS, 3000, torch.float32, seed)
        indices.copy_(new_indices)
        values.copy_(new_values)
        C.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(C, F.spmm(indptr, new_indices, new_values, B))


def test_bits_are_the_same_in_every_run_and_on_every_stream() -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(3000, 96, dtype=torch.float32)
    first = F.spmm(indptr, indices, values, B)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            found.append(F.spmm(indptr, indices, values, B))
    torch.cuda.synchronize()
    assert all(torch.equal(each, first) for each in found)


@pytest.mark.parametrize("place", ["column", "column of 64 bits", "pointer"])
def test_wrong_indices_are_raised_by_a_later_call_and_break_nothing(place: str) -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(3000, 32, dtype=torch.float32)
    right = F.spmm(indptr, indices, values, B)
    if place != "pointer":
        wrong = indices.clone()
        # 2**32 + 5 is 5 in 32 bits, which B has.
        wrong[20_000] = 3000 if place == "column" else 2**32 + 5
        C = F.spmm(indptr, wrong, values, B)
        assert int(C.isnan().any(1).sum()) == 1
    else:
        wrong = indptr.clone()
        wrong[4] = 2**40
        F.spmm(wrong, indices, values, B)
    with pytest.raises(ValueError, match=r"spmm: (column indices|row pointers) must be"):
        st.synchronize()
    st.synchronize()
    assert torch.equal(F.spmm(indptr, indices, values, B), right)


def test_a_matrix_is_planned_once_its_products_have_cost_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    A = (indptr, indices, values, (len(LENGTHS), 3000))
    B = operand(3000, 64, dtype=torch.float32)
    made: list[int] = []
    plain = st.cache.spmm._planned
    monkeypatch.setattr(st.cache.spmm, "_planned", lambda *a: (made.append(0), plain(*a))[1])
    one = fresh.direct_seconds(len(LENGTHS), 3000, len(indices), 64, 4, B.device)
    cost = fresh.PLAN_SECONDS[0] + fresh.PLAN_SECONDS[1] * len(indices)
    before = int(cost / fresh.SHARE / one) + 1
    products = [st.spmm(A, B) for _ in range(before)]
    assert not made and all(torch.equal(each, products[0]) for each in products)
    for _ in range(20):
        close(st.spmm(A, B), indptr, indices, values, B)
    assert len(made) == 1
    values.mul_(2)  # seen by whatever multiplies now
    close(st.spmm(A, B), indptr, indices, values, B)
    indices.copy_(indices.flip(0))  # another pattern begins without a plan
    close(st.spmm(A, B), indptr, indices, values, B)
    assert len(made) == 1


def test_compiled_products_agree_with_eager_ones() -> None:
    indptr, indices, values = arrays(LENGTHS, 3000, torch.float32)
    B = operand(3000, 32, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(lambda *a: F.spmm(*a) * 2, fullgraph=True)
    got, want = compiled(indptr, indices, values, B), F.spmm(indptr, indices, values, B) * 2
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), B)[0], torch.autograd.grad(want.sum(), B)[0]
    )
