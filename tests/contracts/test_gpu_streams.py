"""Whatever is built may be read on any stream, from the moment it is returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.nn import GATConv, GCNConv, SAGEConv, SparseLinear, clear_graph_cache
from tests.contracts.cases import csr_of, random_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

SIZE, N = 700, 48


@pytest.fixture(autouse=True)
def cold_caches() -> Iterator[None]:
    st.clear_plan_cache()
    clear_graph_cache()
    yield


def matrix(symmetric: bool = False) -> st.CSR:
    A = random_matrix(SIZE, SIZE, 0.02)
    return csr_of(A + A.T if symmetric else A).to("cuda")


def busy() -> torch.cuda.Stream:
    """A stream that has a long time to go before it does what it is given."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
    return stream


def transpose(plan: st.Plan, B: Tensor) -> Tensor:
    return plan.T @ B


def gradient(plan: st.Plan, B: Tensor) -> Tensor:
    leaf = B.clone().requires_grad_()
    return torch.autograd.grad(plan @ leaf, leaf, B)[0]


def mean_gradient(plan: st.Plan, B: Tensor) -> Tensor:
    leaf = B.clone().requires_grad_()
    return torch.autograd.grad(plan.run(leaf, reduce="mean"), leaf, B)[0]


def values_gradient(plan: st.Plan, B: Tensor) -> Tensor:
    values = torch.ones(plan.nnz, device="cuda", requires_grad=True)
    return torch.autograd.grad(plan.run(B, values=values), values, B)[0]


def lower(plan: st.Plan, B: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return plan @ B


def lower_maximum(plan: st.Plan, B: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return plan.run(B, reduce="max")


def narrow(plan: st.Plan, B: Tensor) -> Tensor:
    return plan @ B[:, :7]


USES: list[Callable[[st.Plan, Tensor], Tensor]] = [
    lambda plan, B: plan @ B, transpose, gradient, mean_gradient, values_gradient, lower,
    lower_maximum, narrow,
]  # fmt: skip
NAMES = ["product", "transpose", "gradient", "mean", "values", "lower", "lower max", "narrow"]


@pytest.mark.parametrize("system", ["csr", "acc", "rsh", "half", "dense"])
@pytest.mark.parametrize("use", USES, ids=NAMES)
def test_what_one_stream_builds_another_reads(use, system, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    csr, B = matrix(), torch.randn(SIZE, N, device="cuda")
    expected = use(st.plan(csr, N, system=system), B)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy()):
        plan = st.plan(csr, None if use is narrow else N, system=system)
    with torch.cuda.stream(busy()):
        use(plan, B)  # whatever is built lazily is built here
    with torch.cuda.stream(torch.cuda.Stream()):
        found = use(plan, B)
    torch.cuda.synchronize()
    if use is not narrow:  # which is planned for its own width
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("make", [GCNConv, GATConv, SAGEConv])
def test_layers_prepare_graphs_for_all_streams(make, weighted):
    if weighted and make is not GCNConv:
        pytest.skip("takes no weights")
    conv = make(16, 8).cuda()
    edges = torch.randint(SIZE, (2, 5000), device="cuda")
    x = torch.randn(SIZE, 16, device="cuda")
    weight = (torch.rand(5000, device="cuda"),) if weighted else ()
    expected = conv(x, edges.clone(), *weight)
    torch.cuda.synchronize()
    clear_graph_cache()
    with torch.cuda.stream(busy()):
        first = conv(x, edges, *weight)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = conv(x, edges, *weight)
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, expected)


def test_values_that_one_stream_takes_over_are_right_on_another():
    csr, B = matrix(), torch.randn(SIZE, N, device="cuda")
    values = csr.values.clone()
    A = (csr.indptr, csr.indices, values, csr.shape)
    st.spmm(A, B)
    values.mul_(2)
    expected = st.spmm((csr.indptr, csr.indices, values.clone(), csr.shape), B)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy()):
        first = st.spmm(A, B)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = st.spmm(A, B)
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.parametrize("tokens", [4, 300])
def test_a_block_sparse_layer_is_bound_for_all_streams(tokens):
    linear = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    layer = SparseLinear.from_linear(linear, sparsity=0.5).eval()
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = SparseLinear.from_linear(linear, sparsity=0.5).eval()(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(busy()):
            first = layer(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            second = layer(x)
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.parametrize("use", USES[:5], ids=NAMES[:5])
def test_memory_of_a_freed_plan_waits_for_the_streams_that_read_it(use):
    csr, B = matrix(), torch.randn(SIZE, N, device="cuda")
    plan = st.plan(csr, N)
    expected = use(plan, B)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy()):
        found = use(plan, B)
    del plan
    others = [torch.full((size,), -1, dtype=torch.int32, device="cuda")
              for size in (csr.nnz, csr.nnz, SIZE + 1, 4 * SIZE, 1000, 128) * 4]  # fmt: skip
    torch.cuda.synchronize()
    assert torch.equal(found, expected) and len(others) == 24


def layer(plan: st.Plan, B: Tensor) -> Tensor:
    return LAYER[0](B, LAYER[1])


LAYER: list = []  # made outside of the capture
BUILDS = {
    "plan": lambda plan, B: st.plan(plan._csr, N),
    "transpose": lambda plan, B: plan.T,
    "gradient": gradient,
    "layer": layer,
}


@pytest.mark.parametrize("name", BUILDS)
def test_building_is_refused_during_a_capture(name):
    plan, B = st.plan(matrix(), N), torch.randn(SIZE, N, device="cuda")
    LAYER[:] = [SAGEConv(N, 4).cuda(), torch.zeros(2, 3, dtype=torch.int64, device="cuda")]
    LAYER[0].lin_l(B)  # cuBLAS is loaded
    torch.cuda.synchronize()
    graph, error = torch.cuda.CUDAGraph(), ""
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            BUILDS[name](plan, B)
        except ValueError as raised:
            error = str(raised)  # its traceback would keep this graph until a later capture
        finally:
            graph.capture_end()
    LAYER.clear()
    assert "outside of a CUDA graph's capture" in error
    torch.cuda.synchronize()
    assert torch.isfinite(plan @ B).all()


def test_a_captured_layer_reads_plain_weights_at_each_replay():
    conv = GCNConv(16, 8).cuda().requires_grad_(False)
    edges = torch.randint(SIZE, (2, 5000), device="cuda")
    x, weight = torch.randn(SIZE, 16, device="cuda"), torch.rand(5000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            conv(x, edges, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = conv(x, edges, weight)
    weight.mul_(torch.rand_like(weight))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, conv(x, edges, weight.clone()))


def test_threads_that_ask_for_everything_at_once_get_the_right_bits():
    csr, B = matrix(), torch.randn(SIZE, N, device="cuda")
    reference = st.plan(csr, N)
    expected = [use(reference, B) for use in USES[:6]]
    for _ in range(20):
        plan, found, errors = st.plan(csr, N), {}, []
        torch.cuda.synchronize()
        barrier = threading.Barrier(len(expected))

        def body(number: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    barrier.wait()  # noqa: B023
                    found[number] = USES[number](plan, B)  # noqa: B023
                    torch.cuda.current_stream().synchronize()
            except Exception as error:
                errors.append(error)  # noqa: B023

        threads = [threading.Thread(target=body, args=(k,)) for k in range(len(expected))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for number, right in enumerate(expected):
            assert torch.equal(found[number], right)
