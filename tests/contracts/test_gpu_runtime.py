"""How products behave on a GPU: streams, graphs, threads, memory, no hidden waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import sparsetile as st
from sparsetile.cache import spmm as spmm_module
from tests.contracts.cases import (
    assert_close,
    csr_of,
    equal_rows,
    random_matrix,
    runs_on_this_gpu,
    tf32,
    with_dense_row,
)
from tests.contracts.subjects import Subject, subjects

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

# Systems whose products are kernels of this library (dense only repairs with one).
OURS = [each for each in subjects() if each.system.kernels and each.system.devices == ("cuda",)]
ours = pytest.mark.parametrize("system", OURS, ids=str)


@pytest.fixture(autouse=True)
def _tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = getattr(request.node, "callspec", None)
    system = None if parameters is None else parameters.params.get("system")
    if system is not None and not runs_on_this_gpu(system.system.name):
        pytest.skip(f"{system} needs {system.system.architectures}")
    with tf32(system is not None and system.system.rounds_to_tf32):
        yield


def plan_of(system: Subject, n: int = 64) -> tuple[st.CSR, st.Plan]:
    csr = csr_of(with_dense_row(400, 6000, 11), dtype=system.element).to("cuda")
    return csr, system.plan(csr, n)


def dense(system: Subject, rows: int, n: int) -> torch.Tensor:
    return torch.randn(rows, n, device="cuda").to(system.element)


@ours
def test_runs_on_the_current_stream_after_what_was_queued_there(system):
    csr, plan = plan_of(system)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        B = dense(system, 6000, 64)
        C = plan @ B
    stream.synchronize()
    assert_close(C, csr, B)


@ours
def test_two_streams_do_not_disturb_each_other(system):
    _, plan = plan_of(system)
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [dense(system, 6000, 64) for _ in streams]
    torch.cuda.synchronize()
    expected = [plan @ B for B in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream, B in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append([plan @ B for _ in range(4)])
        torch.cuda.synchronize()
        for got, want in zip(results, expected, strict=True):
            assert all(system.same(C, want) for C in got)


@ours
def test_a_captured_graph_replays_with_new_input_and_new_values(system):
    csr, plan = plan_of(system)
    B = dense(system, 6000, 64)
    plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    for _ in range(3):
        B.copy_(dense(system, 6000, 64))
        graph.replay()
        torch.cuda.synchronize()
        assert system.same(C, plan @ B)
    fresh = torch.randn(csr.nnz, device="cuda").to(csr.values.dtype)
    plan.update_values(fresh)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(C, csr.with_values(fresh), B)


@pytest.mark.parametrize("rows", [300, 60_000])
@pytest.mark.parametrize("captured", [False, True])
@ours
def test_products_that_start_early_still_see_what_came_before(system, captured, rows):
    """A kernel may start before its predecessor has ended; it must wait before it reads."""
    csr = csr_of(random_matrix(rows, rows, 5 / rows, seed=9)).to("cuda")
    values = (csr.values.sign() / 5).to(system.element)
    plan = system.plan(csr.with_values(values), 32)
    start = dense(system, rows, 32)
    steps = 24

    def chain(x: torch.Tensor, wait: bool) -> torch.Tensor:
        for step in range(steps):
            x = plan @ (x + 1 if step % 3 else x)  # sometimes another library's kernel between
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(start, wait=True)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(start, wait=False)
        for _ in range(20):
            found.fill_(float("nan"))
            graph.replay()
            assert system.same(found, expected)
    else:
        for _ in range(20):
            assert system.same(chain(start, wait=False), expected)


@ours
def test_never_waits_for_the_gpu(system):
    _, plan = plan_of(system)
    B = dense(system, 6000, 64)
    G = dense(system, 400, 64)
    plan @ B
    plan.T @ G
    plan.run(B, reduce="max")
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan @ B
        plan.T @ G
        plan.run(B, reduce="max")
        plan.run(B, out=G)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ours
def test_allocates_nothing_but_the_result(system):
    _, plan = plan_of(system)
    B = dense(system, 6000, 64)
    plan @ B
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    C = plan @ B
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    copies = plan.system == "half"  # of B, given back when the product ends
    assert after - before == 1 + copies
    assert C.shape == (400, 64)


@ours
def test_every_element_of_the_result_is_written(system):
    csr = csr_of(random_matrix(1003, 500, 0.002), dtype=system.element).to("cuda")
    plan = system.plan(csr, 33)
    for n in (1, 33, 127, 260):
        B = dense(system, 500, n)
        out = torch.full((1003, n), float("nan"), dtype=B.dtype, device="cuda")
        assert_close(plan.run(B, out=out), csr, B)


@ours
def test_threads_may_share_a_plan(system):
    csr, plan = plan_of(system)
    failures: list[str] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            B = dense(system, 6000, 64)
            results = [plan @ B for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            if not all(system.same(C, results[0]) for C in results):
                failures.append("runs differ")
            try:
                assert_close(results[0], csr, B)
            except AssertionError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [128, 200, 512])
def test_very_many_short_rows_are_right(dtype, n):
    csr = csr_of(random_matrix(90_001, 4000, 0.001), dtype=dtype).to("cuda")
    B = torch.randn(4000, n, device="cuda").to(dtype)
    assert_close(st.plan(csr, n, system="csr") @ B, csr, B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [23, 32, 128, 300])
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_rows_that_share_columns_are_right_with_non_finite_input(dtype, n, pattern):
    matrix = equal_rows(205, 6000)
    matrix.data[:] = torch.randn(matrix.nnz).numpy()
    matrix[100, 3000:] = 0  # rows that differ inside a bundle
    matrix.eliminate_zeros()
    csr = csr_of(matrix, pattern=pattern, dtype=dtype).to("cuda")
    plan = st.plan(csr, n, system="csr", dtype=dtype)
    assert "bundles" in plan.info["choices"]
    B = torch.randn(6000, n, device="cuda").to(dtype)
    assert_close(plan @ B, csr, B)
    B[4200] = float("inf")  # column 4200 is held by all rows but row 100
    finite = torch.isfinite(plan @ B).all(1)
    assert torch.equal(torch.nonzero(finite).flatten().cpu(), torch.tensor([100]))


def test_products_of_arrays_are_arrays_of_their_kind():
    cupy = pytest.importorskip("cupy")
    csr = csr_of(random_matrix(70, 50, 0.1)).to("cuda")
    plan, B = st.plan(csr, 16), torch.randn(50, 16, device="cuda")
    C = plan @ B
    theirs = plan @ cupy.from_dlpack(B)
    assert type(theirs) is cupy.ndarray and torch.equal(torch.from_dlpack(theirs), C)
    assert np.array_equal(plan @ B.cpu().numpy(), C.cpu().numpy())


def test_cupy_matrices_are_taken_as_they_are():
    cupyx = pytest.importorskip("cupyx.scipy.sparse")
    matrix = random_matrix(70, 50, 0.1)
    matrix.data = matrix.data.astype("float32")
    csr = csr_of(matrix).to("cuda")
    B = torch.randn(50, 16, device="cuda")
    for form in ("csr", "csc", "coo"):
        A = getattr(cupyx, f"{form}_matrix")(matrix.asformat(form))
        assert_close(st.spmm(A, B), csr, B)


@ours
def test_a_large_offset_into_B_and_C_is_right(system):
    """M·N and K·N past 2^31 elements: 64-bit offsets."""
    n, rows = 4096, 530_000
    dtype = torch.float16 if torch.float16 in system.system.dtypes else system.element
    if torch.cuda.mem_get_info()[0] < 3 * rows * n * dtype.itemsize:
        pytest.skip("needs 13 GB of GPU memory, 26 in float32")
    indptr = torch.arange(rows + 1, device="cuda")
    indices = torch.arange(rows, device="cuda").flip(0)
    B = torch.empty((rows, n), dtype=dtype, device="cuda")
    B.copy_(torch.arange(rows, device="cuda").remainder(1009).unsqueeze(1))
    C = system.plan((indptr, indices, None, (rows, rows)), n, dtype=dtype) @ B
    assert torch.equal(C[:, 0], B[:, 0].flip(0))
    assert torch.equal(C[:, n - 1], B[:, n - 1].flip(0))


def test_a_thread_without_a_context_may_launch_first():
    csr = csr_of(random_matrix(60, 50, 0.2)).to("cuda")
    plan, B = st.plan(csr, 16, system="csr"), torch.randn(50, 16, device="cuda")
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(plan @ B)
        results.append(plan.run(B, alpha=1.0, reduce="mean"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_close(results[0], csr, B)
    assert len(results) == 2


@ours
def test_rows_of_b_and_c_may_be_farther_apart_than_32_bits(system):
    size = system.element.itemsize
    stride = 2**32 // size
    if torch.cuda.mem_get_info()[0] < 5 * 2**32:
        pytest.skip("needs 20 GB of GPU memory")
    csr = csr_of(random_matrix(3, 3, 0.9, seed=1), dtype=system.element).to("cuda")
    plan, near = system.plan(csr, 64), dense(system, 3, 64)
    B, out = (
        torch.empty(2 * stride + 64, dtype=system.element, device="cuda")
        .as_strided((3, 64), (stride, 1))
        .copy_(near)
        for _ in range(2)
    )
    assert_close(plan @ B, csr, near)
    assert_close(plan.run(B, alpha=2.0) / 2, csr, near)
    assert plan.run(B, out=out) is out
    assert_close(out.contiguous(), csr, near)
    if system.element in (torch.float32, torch.float64):
        assert torch.equal(plan.run(B, reduce="max"), plan.run(near, reduce="max"))


@ours
def test_very_many_columns_at_odd_addresses_are_right(system):
    n = 8 * 65_535 + 17  # more slabs of eight columns than a grid is high
    csr = csr_of(random_matrix(5, 4, 0.7, seed=1), dtype=system.element).to("cuda")
    plan, B = system.plan(csr, 64), dense(system, 4, n)
    assert_close(plan @ B, csr, B)
    assert_close(plan.run(B, bias=torch.zeros(n, device="cuda")), csr, B)


@ours
def test_negative_views_keep_their_signs(system):
    csr, plan = plan_of(system)
    for n in (1, 64):
        X = dense(system, 6000, n)
        B = torch._neg_view(-X)
        assert B.is_neg()
        assert system.same(plan @ B, plan @ X)
        assert system.same(plan.run(B, alpha=2.0), plan.run(X, alpha=2.0))
    values = csr.values.clone()
    expected = plan @ X
    plan.update_values(torch._neg_view(-values))
    assert system.same(plan @ X, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_dense_products_in_16_bits_are_added_up_in_float32(dtype, lead):
    """torch lets cuBLAS add up in 16 bits unless told otherwise."""
    csr = csr_of(random_matrix(96, 8192, 0.8), dtype=dtype).to("cuda")
    plan = st.plan(csr, 512, system="dense")
    B = torch.randn(*lead, 8192, 512, device="cuda").to(dtype)
    C = plan @ B
    for one, b in zip(C if lead else [C], B if lead else [B], strict=True):
        assert_close(one, csr, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_dense_writes_into_a_transposed_result(dtype, lead, rows):
    """One row of columns that are no multiple of 16 bytes: cuBLAS refused the strides of it."""
    csr = csr_of(random_matrix(rows, 33, 0.6), dtype=dtype).to("cuda")
    plan = st.plan(csr, 64, system="dense")
    B = torch.randn(*lead, 33, 64, device="cuda").to(dtype)
    out = torch.full((*lead, 64, rows), torch.nan, device="cuda").to(dtype).mT
    for one, b in zip(plan.run(B, out=out) if lead else [plan.run(B, out=out)],
                      B if lead else [B], strict=True):  # fmt: skip
        assert_close(one, csr, b)
    assert out.isfinite().all()


def test_dense_scales_before_it_rounds():
    A = (torch.tensor([0, 2000]), torch.arange(2000), torch.full((2000,), 50.0), (1, 2000))
    plan = st.plan(A, 8, dtype=torch.float16, system="dense", device="cuda")
    C = plan.run(torch.ones(2000, 8, dtype=torch.float16, device="cuda"), alpha=0.01)
    torch.testing.assert_close(C.float(), torch.full((1, 8), 1000.0, device="cuda"))


def test_autocast_leaves_cusparse_in_float32():
    csr = csr_of(random_matrix(60, 50, 0.2)).to("cuda")
    plan, B = st.plan(csr, 16, system="cusparse"), torch.randn(50, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        C = plan @ B
    assert C.dtype is torch.float32
    assert_close(C, csr, B)


@pytest.mark.parametrize("grad", [False, True])
def test_a_kept_plan_dropped_while_another_stream_reads_it_keeps_its_memory(monkeypatch, grad):
    monkeypatch.setattr("sparsetile.cache.spmm.fresh_product", lambda A, B: None)
    csr = csr_of(random_matrix(4000, 4000, 0.01)).to("cuda")
    B = torch.randn(4000, 64, device="cuda", requires_grad=grad)
    st.clear_plan_cache()
    A = (csr.indptr, csr.indices, csr.values.clone(), csr.shape)
    expected = st.spmm(A, B).detach()
    (entry,) = spmm_module._entries.values()
    ((kept, _),) = entry.plans.values()
    sizes = [tensor.numel() * tensor.element_size() for tensor in kept.flat[0]]
    del entry, kept
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        C = st.spmm(A, B).detach()
    st.clear_plan_cache()
    others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes * 2]
    torch.cuda.synchronize()
    assert torch.equal(C, expected) and len(others) == 2 * len(sizes)


def test_scratch_of_a_thread_goes_with_it():
    with tf32(True):
        if not runs_on_this_gpu("bcsr"):
            pytest.skip("bcsr needs sm_90a")
        csr = csr_of(random_matrix(600, 6000, 0.02)).to("cuda")
        plan, B = st.plan(csr, 512, system="bcsr"), torch.randn(6000, 512, device="cuda")
        results: list[torch.Tensor] = []

        def once() -> None:
            thread = threading.Thread(target=lambda: results.append(plan @ B))
            thread.start()
            thread.join()
            results.clear()

        once()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            once()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
