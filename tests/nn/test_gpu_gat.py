"""GATConv's kernels on a GPU: results of PyG and of torch's path, bits, memory, CUDA graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tools.attention import attended
from torch import Tensor

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.kernels import KERNELS
from sparsetile.layers.graph_attention import attention_layer, graph_attention
from sparsetile.nn import GATConv, clear_graph_cache
from tests.nn import gpu_attention as checks
from tests.nn.cases import FLOWS, NODES, PAIRS, WIDTH, directed_graph, pyg, same_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
GATS = [name for name in PAIRS if name.startswith("gat")]
# Of float64: rounding of messages and gradients to the type, and what their sums add.
NEAR = {F32: 5e-5, F16: 5e-3, BF16: 4e-2}


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines allow TF32 by their environment: what is compared here is in float32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def graph_of(nodes: int, edges: int, hub: int = 0, seed: int = 0) -> Tensor:
    """Random edges; node 0 has ``hub`` more in each direction; the last ten nodes have none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(nodes - 10, (2, edges), generator=generator)
    spokes = torch.arange(hub) % (nodes - 10)
    centre = torch.zeros_like(spokes)
    both = [torch.stack([spokes, centre]), torch.stack([centre, spokes])]
    return torch.cat([drawn, *both], 1).unique(dim=1).cuda()


def torch_path(layer: GATConv) -> GATConv:
    layer._fuses = lambda *given: False  # type: ignore[method-assign]
    return layer


def results(layer: Any, x: Tensor, edge_index: Any) -> list[Tensor]:
    """Output, and gradients of the features and of all parameters by name."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(leaf, edge_index)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * weights.to(out.dtype)).sum().backward()
    named = sorted(layer.named_parameters())
    return [out.detach(), leaf.grad, *(each.grad for _, each in named)]


def assert_close(found: list[Tensor], wanted: list[Tensor], near: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        scale = max(float(theirs.abs().max()), 1.0)
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=near, atol=near * scale)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", GATS)
def test_results_and_gradients_are_pyg_s(name, flow):
    mine, theirs = (each.cuda() for each in same_weights(PAIRS[name](5, flow=flow)))
    x, edge_index = torch.randn(NODES, WIDTH, device="cuda"), directed_graph().cuda()
    assert_close(results(mine, x, edge_index), results(theirs, x, edge_index), 1e-4)


@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128), (3, 20), (2, 7), (16, 8), (4, 300)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_hubs_and_isolated_nodes_are_as_in_float64(dtype, heads, width):
    edge_index = graph_of(3000, 20_000, hub=2500)
    shape = (3000, 3000)
    plan = st.plan((edge_index.flip(0), None, shape), heads * width, dtype=F32)
    plan.flat_with_transpose()
    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    given = [draw(3000, heads, width).to(dtype), draw(3000, heads), draw(3000, heads)]
    given = [each.requires_grad_() for each in given]
    out = graph_attention(plan.flat, *given, None, None, None, 0.2)  # type: ignore[arg-type]
    grad = draw(*out.shape).to(dtype)
    found = torch.autograd.grad(out, given, grad)
    wanted = attended(plan._csr, *given, 0.2)  # type: ignore[arg-type]
    right = torch.autograd.grad(wanted, given, grad.double())
    for mine, theirs in zip([out, *found], [wanted, *right], strict=True):
        near = NEAR[dtype] * max(float(theirs.detach().abs().max()), 1.0)
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=NEAR[dtype], atol=near)


def step_of(heads: int, width: int, dtype: torch.dtype, nodes: int = 3000) -> dict[str, Tensor]:
    """Messages, vectors and bias of a layer, all differentiable."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    drawn = {
        "messages": draw(nodes, heads * width).to(dtype),
        "first": draw(1, heads, width) / width**0.5,
        "second": draw(1, heads, width) / width**0.5,
        "bias": draw(heads * width),
    }
    return {name: each.requires_grad_() for name, each in drawn.items()}


def step_in_float64(csr: st.CSR, given: dict[str, Tensor]) -> Tensor:
    messages, first, second, bias = (each.double() for each in given.values())
    by_head = messages.view(len(messages), first.shape[1], -1)
    scores = ((by_head * vector).sum(-1) for vector in (first, second))
    return attended(csr, by_head, *scores, 0.2) + bias  # type: ignore[arg-type]


# Heads of one slab, with lanes that are a power of two or not, and of several slabs.
@pytest.mark.parametrize(
    "heads, width",
    [(8, 32), (8, 8), (1, 128), (1, 252), (5, 44), (1, 31), (3, 5), (8, 7), (1, 300)],
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_all_gradients_of_a_step_are_as_in_float64(dtype, heads, width):
    plan = st.plan((graph_of(3000, 20_000, hub=2500).flip(0), None, (3000, 3000)), 64, dtype=F32)
    plan.flat_with_transpose()
    given = step_of(heads, width, dtype)
    leaves = list(given.values())
    out = attention_layer(plan.flat, *leaves[:3], None, None, leaves[3], 0.2)  # type: ignore[arg-type]
    grad = torch.randn(out.shape, device="cuda").to(dtype)
    found = torch.autograd.grad(out, leaves, grad)
    wanted = step_in_float64(plan._csr, given)
    right = torch.autograd.grad(wanted, leaves, grad.double())
    for mine, theirs in zip([out, *found], [wanted, *right], strict=True):
        near = NEAR[dtype] * max(float(theirs.detach().abs().max()), 1.0)
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=NEAR[dtype], atol=near)


@pytest.mark.parametrize("nodes", [1, 70, 20_000, 300_000])
@pytest.mark.parametrize("heads, width", [(1, 4), (8, 32), (3, 5)])
def test_sums_over_nodes_have_one_order(nodes, heads, width):
    loops = torch.arange(nodes, device="cuda")
    plan = st.plan((torch.stack([loops, loops]), None, (nodes, nodes)), 64, dtype=F32)
    plan.flat_with_transpose()
    given = step_of(heads, width, F32, nodes)
    leaves = list(given.values())
    out = attention_layer(plan.flat, *leaves[:3], None, None, leaves[3], 0.2)  # type: ignore[arg-type]
    grad = torch.randn_like(out)
    runs = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(3)]
    for run in runs[1:]:
        for first, again in zip(runs[0], run, strict=True):
            assert torch.equal(first, again)
    wanted = grad.double().sum(0)
    near = 1e-5 * max(float(grad.double().abs().sum(0).max()) ** 0.5, 1.0)
    torch.testing.assert_close(runs[0][3].double(), wanted, rtol=1e-5, atol=near)


def test_threads_and_streams_share_prepared_launches():
    edge_index = graph_of(3000, 20_000, hub=2500)
    layer = GATConv(16, 8, heads=4).cuda()
    xs = [torch.randn(3000, 16, device="cuda") for _ in range(4)]
    weights = torch.linspace(-1, 1, 3000 * 32, device="cuda").view(3000, 32)

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(layer(leaf, edge_index), [leaf, *layer.parameters()], weights)

    def elsewhere(x: Tensor) -> tuple[Tensor, ...]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found = [gradients(x) for _ in range(20)]
        stream.synchronize()
        return found[-1]

    expected = [gradients(x) for x in xs]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(elsewhere, xs), expected, strict=True):
            assert_close(list(found), list(right), 1e-6)  # cuBLAS may choose otherwise


def test_a_gradient_that_is_not_finite_stays_with_its_neighbours():
    edge_index = graph_of(500, 3000)
    layer, x = GATConv(8, 16, heads=2).cuda(), torch.randn(500, 8, device="cuda")
    x.requires_grad_()
    out = layer(x, edge_index)
    grad = torch.randn_like(out)
    grad[17] = torch.nan
    (found,) = torch.autograd.grad(out, x, grad)
    touched = torch.zeros(500, dtype=torch.bool, device="cuda")
    touched[edge_index[0][edge_index[1] == 17]] = True
    touched[17] = True
    assert torch.equal(found.isnan().any(1), touched)


def test_gradients_that_torch_sees_are_the_same():
    edge_index = graph_of(500, 4000)
    layer, x = GATConv(16, 8, heads=2).cuda(), torch.randn(500, 16, device="cuda")
    leaves = [x.requires_grad_(), *layer.parameters()]
    out = layer(x, edge_index).square().sum()
    plain = torch.autograd.grad(out, leaves, retain_graph=True)
    seen = torch.autograd.grad(out, leaves, create_graph=True)
    assert_close([each.detach() for each in seen], list(plain), 1e-4)


def test_a_step_launches_few_kernels():
    edge_index = graph_of(2000, 20_000)
    layer = GATConv(16, 8, heads=4).cuda()
    x, grad = torch.randn(2000, 16, device="cuda"), torch.randn(2000, 32, device="cuda")
    results(layer, x, edge_index)
    x.requires_grad_()
    layer.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        layer(x, edge_index).backward(grad)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    launched = [each.name for each in seen.events() if each.device_type == device]
    assert sum(name in KERNELS for name in launched) == 6
    assert not [name for name in launched if "at::native" in name], "dense products are cuBLAS's"


def test_a_hub_of_a_hundred_thousand_edges():
    nodes = 110_000
    edge_index = graph_of(nodes, 50_000, hub=100_000)
    layer = GATConv(16, 8, heads=4).cuda()
    x = torch.randn(nodes, 16, device="cuda")
    found = results(layer, x, edge_index)
    theirs = results(torch_path(layer), x, edge_index)
    exact = results(layer.double(), x.double(), edge_index)
    # Terms of the hub's gradients nearly cancel: each is judged by what torch loses in float32.
    for mine, other, right in zip(found, theirs, exact, strict=True):
        scale = float(right.abs().max())
        lost = float((other - right).abs().max())
        assert float((mine - right).abs().max()) <= max(2 * lost, 1e-4 * scale)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_two_runs_have_the_same_bits(dtype, dropout):
    edge_index = graph_of(5000, 60_000, hub=3000)
    layer = GATConv(64, 32, heads=8, dropout=dropout).cuda().to(dtype)
    x = torch.randn(5000, 64, device="cuda", dtype=dtype)
    runs = []
    for _ in range(3):
        torch.manual_seed(7)
        runs.append(results(layer, x, edge_index))
    clear_graph_cache()  # also with a new plan
    torch.manual_seed(7)
    runs.append(results(layer, x, edge_index))
    for run in runs[1:]:
        for first, again in zip(runs[0], run, strict=True):
            assert torch.equal(first, again)


def test_dropout_draws_what_torch_s_path_draws():
    edge_index = torch.randint(300, (2, 3000), device="cuda")  # with parallel edges
    layer, x = GATConv(16, 8, heads=2, dropout=0.4).cuda(), torch.randn(300, 16, device="cuda")
    torch.manual_seed(3)
    found = results(layer, x, edge_index)
    torch.manual_seed(3)
    assert_close(found, results(torch_path(layer), x, edge_index), 1e-4)


def peak(layer: Any, x: Tensor, edge_index: Tensor) -> int:
    """Bytes that a step takes beside what is there before, after one that prepares the graph."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results(layer, x, edge_index)
        most = torch.cuda.max_memory_allocated() - before
    return most


@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128)])
def test_peak_memory_is_at_most_half_of_pyg_s(heads, width):
    edge_index = graph_of(20_000, 400_000)
    x = torch.randn(20_000, 64, device="cuda")
    mine, theirs = GATConv(64, width, heads=heads), pyg.GATConv(64, width, heads=heads)
    assert 2 * peak(mine.cuda(), x, edge_index) <= peak(theirs.cuda(), x, edge_index)


def test_nothing_of_edges_times_features_is_stored():
    edge_index = graph_of(2000, 800_000)
    layer, x = GATConv(16, 64, heads=4).cuda(), torch.randn(2000, 16, device="cuda")
    entries = edge_index.shape[1]
    # One float32 per edge and head is a 64th of that.
    assert peak(layer, x, edge_index) < entries * 4 * 4 + 64 * 2000 * 256 * 4


@pytest.mark.parametrize("name", GATS)
def test_autocast_gives_results_near_those_of_float32(name):
    mine, _ = PAIRS[name](5)
    mine = mine.cuda()
    x = torch.randn(NODES, WIDTH, device="cuda", requires_grad=True)
    expected = mine(x, directed_graph().cuda())
    with torch.autocast("cuda", dtype=BF16):
        result = mine(x, directed_graph().cuda())
    scale = expected.abs().max().item()
    torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05 * scale)
    result.float().sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_the_rows_that_read_it(value):
    edge_index = graph_of(500, 3000)
    layer, x = GATConv(8, 16, heads=2).cuda(), torch.randn(500, 8, device="cuda")
    x[17] = value
    out = layer(x, edge_index)
    touched = torch.zeros(500, dtype=torch.bool, device="cuda")
    touched[edge_index[1][edge_index[0] == 17]] = True
    touched[17] = True
    assert torch.equal(out.isnan().any(1), touched)
    torch.testing.assert_close(out, torch_path(layer)(x, edge_index), equal_nan=True, **CLOSE)


def test_a_training_step_in_a_cuda_graph():
    edge_index = graph_of(2000, 20_000, hub=1500)
    layer = GATConv(16, 8, heads=4).cuda()
    x = torch.randn(2000, 16, device="cuda", requires_grad=True)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=False)
        out = layer(x, edge_index)
        out.square().sum().backward()
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    x.grad.zero_()
    graph.replay()
    replayed = [captured.clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    x.grad.zero_()
    eager = [step().detach(), x.grad, *(p.grad for p in layer.parameters())]
    assert_close(replayed, eager, 1e-6)  # cuBLAS may choose otherwise in a graph


def test_no_step_waits_for_the_gpu():
    edge_index = graph_of(2000, 20_000, hub=1500)
    layer = GATConv(16, 8, heads=4).cuda()
    x = torch.randn(2000, 16, device="cuda")
    results(layer, x, edge_index)
    leaf, grad = x.clone().requires_grad_(), torch.randn(2000, 32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(leaf, edge_index).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_layer_with_a_plan_is_one_graph():
    edge_index = graph_of(500, 4000)
    layer = GATConv(16, 8, heads=2, add_self_loops=False).cuda()
    x = torch.randn(500, 16, device="cuda")
    plan = ours.gcn_plan(edge_index, 500, 16)
    expected = results(layer, x, plan)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    out = compiled(leaf, plan)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
    (out * weights).sum().backward()
    named = sorted(layer.named_parameters())
    assert_close([out.detach(), leaf.grad, *(p.grad for _, p in named)], expected, 1e-5)


def test_gradients_of_gradients_are_refused_with_the_way_out():
    edge_index = graph_of(500, 4000)
    layer, x = GATConv(16, 8).cuda(), torch.randn(500, 16, device="cuda", requires_grad=True)
    (found,) = torch.autograd.grad(layer(x, edge_index).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="attend: gradients must be of first order"):
        found.sum().backward()
    out, _ = layer(x, edge_index, return_attention_weights=True)
    (found,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    found.sum().backward()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_views_that_are_not_aligned(dtype):
    edge_index = graph_of(300, 3000)
    plan = st.plan((edge_index.flip(0), None, (300, 300)), 64)
    of_source = torch.randn(300, 2, device="cuda")
    memory = torch.randn(300 * 64 + 1, device="cuda").to(dtype)
    messages = memory[1:].view(300, 2, 32)
    with torch.no_grad():
        out = graph_attention(plan.flat, messages, of_source, None, None, None, None, 0.2)
        same = graph_attention(plan.flat, messages.clone(), of_source, None, None, None, None, 0.2)
    torch.testing.assert_close(out, same, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("flow", FLOWS)
def test_features_of_edges_are_those_of_pyg(flow):
    options = {"heads": 3, "edge_dim": 3, "flow": flow}
    pair = GATConv(WIDTH, 5, **options), pyg.GATConv(WIDTH, 5, **options)
    checks.assert_same_as_pyg(same_weights(pair), 3)


@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128), (3, 20), (2, 7), (4, 300)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_features_of_edges_at_hubs_are_as_in_float64(dtype, heads, width):
    checks.assert_near_float64(GATConv(16, width, heads=heads, edge_dim=6), 16, 6, dtype)


def test_features_of_edges_have_one_order_of_sums_and_no_messages():
    checks.assert_bits_are_the_same(GATConv(16, 8, heads=4, edge_dim=6), 16, 6)
    checks.assert_memory_of_nodes(GATConv(64, 32, heads=8, edge_dim=4), 64, 256, 4)
    checks.assert_replays(GATConv(16, 8, heads=4, edge_dim=4), 16, 4)
