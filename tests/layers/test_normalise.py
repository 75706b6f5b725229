"""GCN's normalisation of values: torch's operations, and the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsetile.layers.normalise import WeightMap, normalised_values, torch_values
from tests.layers.weight_maps import gcn_map, random_edges

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


def dense_values(edges: Tensor, weight: Tensor, nodes: int, fill: float) -> Tensor:
    """D^-1/2 (A + fill I) D^-1/2 as a dense matrix in float64; self-loops are replaced."""
    A = torch.zeros(nodes, nodes, dtype=torch.float64)
    diagonal = torch.full((nodes,), fill, dtype=torch.float64)
    for (source, target), each in zip(edges.T.tolist(), weight.double().tolist(), strict=True):
        if source == target:
            diagonal[source] = each
        else:
            A[target, source] += each
    A += torch.diag(diagonal)
    scale = A.sum(1).pow(-0.5)
    return scale[:, None] * A * scale


@pytest.mark.parametrize("parallel", [False, True])
def test_values_are_those_of_the_dense_formula(device: torch.device, parallel: bool):
    edges = random_edges(40, 300, parallel=parallel)
    weight = torch.rand(edges.shape[1]) + 0.5
    where = gcn_map(edges.to(device), 40, "replace")
    got = normalised_values(where, weight.to(device), 2.0, torch.float32).cpu().double()
    csr = where.csr.to("cpu")
    want = dense_values(edges, weight, 40, 2.0)[csr.row_ids(), csr.indices.long()]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_cpu_gives_the_bits_of_the_operations_one_by_one():
    edges = random_edges(50, 400)
    where, weight = gcn_map(edges, 50), torch.randn(edges.shape[1])
    csr = where.csr
    values = csr.canonical_values(weight)
    degree = torch.segment_reduce(values, "sum", lengths=csr.row_lengths())
    scale = torch.where(degree == 0, 0.0, degree.pow(-0.5))
    want = scale[csr.row_ids()] * values * scale[csr.indices.long()]
    got = normalised_values(where, weight, 1.0, torch.float32)
    assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    assert got.isnan().any()  # negative degrees


@pytest.mark.parametrize("parallel", [False, True])
def test_torch_differentiates_it_twice_and_in_transforms(parallel: bool):
    edges = random_edges(9, 20, parallel=parallel)
    where = gcn_map(edges, 9, "append")
    weight = (torch.rand(edges.shape[1], dtype=torch.float64) + 0.5).requires_grad_()

    def product(weight: Tensor) -> Tensor:
        return torch_values(where, weight, 1.0)

    assert torch.autograd.gradcheck(product, weight, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, weight)
    reverse = torch.func.jacrev(product)(weight.detach())
    torch.testing.assert_close(torch.func.jacfwd(product)(weight.detach()), reverse)
    torch.testing.assert_close(torch.autograd.functional.jacobian(product, weight), reverse)


def test_no_entries_give_no_values(device: torch.device):
    where = gcn_map(torch.empty(2, 0, dtype=torch.int64, device=device), 3)
    weight = torch.empty(0, device=device)
    assert normalised_values(where, weight, 1.0, torch.float32).shape == (0,)


def test_a_map_names_all_that_it_holds():
    edges = random_edges(20, 60)
    assert WeightMap(gcn_map(edges, 20).csr).tensors
    where = gcn_map(edges, 20, "replace")
    before = len(where.tensors)
    where.prepare_gradients()
    assert len(where.tensors) == before + 2


@pytest.mark.parametrize("loops", ["keep", "replace", "append"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("nodes", [1, 700, 150_000])
@pytest.mark.parametrize("where_on", [pytest.param("cuda", marks=on_gpu)])
def test_the_kernel_gives_what_torch_gives(
    where_on: str, nodes: int, dtype: torch.dtype, loops: str
):
    edges = random_edges(nodes, 4 * nodes)
    hub = torch.stack([torch.arange(nodes), torch.zeros(nodes, dtype=torch.int64)])
    edges = torch.unique(torch.cat([edges, hub, hub.flip(0)], 1), dim=1).to(where_on)
    where = gcn_map(edges[:, edges[0] != edges[1]] if loops == "replace" else edges, nodes, loops)
    numbers = edges.shape[1] if loops != "replace" else int((edges[0] != edges[1]).sum())
    weight = (torch.rand(numbers, device=where_on) + 0.5).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    exact, given = weight.double().requires_grad_(), weight.clone().requires_grad_()
    want, got = torch_values(where, exact, 2.0), normalised_values(where, given, 2.0, wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    g = torch.randn(got.shape, dtype=torch.float64, device=where_on)
    (want_grad,) = torch.autograd.grad(want, exact, g)
    (grad,) = torch.autograd.grad(got, given, g.to(wide), retain_graph=True)
    (again,) = torch.autograd.grad(got, given, g.to(wide))
    assert torch.equal(grad, again)
    assert torch.equal(got, normalised_values(where, weight, 2.0, wide))
    eps = max(torch.finfo(dtype).eps, 1e-6)
    largest = float(want_grad.abs().max()) if want_grad.numel() else 0.0
    atol = 20 * eps * max(largest, 1.0)
    torch.testing.assert_close(grad.double(), want_grad, rtol=20 * eps, atol=atol)


def test_rows_without_weight_get_no_gradient_from_nan(device: torch.device):
    edges = torch.tensor([[0, 2, 0, 1, 2], [0, 0, 1, 1, 2]])  # row 1 has a negative degree
    weight = torch.tensor([2.0, -2.0, 1.0, -3.0, 1.0], device=device, requires_grad=True)
    values = normalised_values(gcn_map(edges.to(device), 3), weight, 1.0, torch.float32)
    (grad,) = torch.autograd.grad(values.sum(), weight)
    assert grad.isnan().tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("where_on", [pytest.param("cuda", marks=on_gpu)])
def test_the_kernel_is_captured_and_replayed_with_new_weights(where_on: str):
    edges = random_edges(500, 3000).to(where_on)
    where = gcn_map(edges, 500)
    where.prepare_gradients()
    weight = (torch.rand(edges.shape[1], device=where_on) + 0.5).requires_grad_()
    g = torch.randn(where.csr.nnz, device=where_on)

    def step() -> tuple[Tensor, Tensor]:
        values = normalised_values(where, weight, 1.0, torch.float32)
        return values, torch.autograd.grad(values, weight, g)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        weight.mul_(torch.rand_like(weight) + 0.1)
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where_on", [pytest.param("cuda", marks=on_gpu)])
def test_the_kernel_waits_for_nothing_and_allocates_its_results_alone(where_on: str):
    edges = random_edges(5000, 50_000).to(where_on)
    where, weight = gcn_map(edges, 5000), torch.rand(edges.shape[1], device=where_on)
    normalised_values(where, weight, 1.0, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        values = normalised_values(where, weight, 1.0, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= values.nbytes + 4 * 5000 + 2 * 512  # of torch's allocator
