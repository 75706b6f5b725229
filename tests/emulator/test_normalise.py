"""``normalise``: values over the roots of their rows' sums, and the gradient, on the host."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.intake import CSR
from sparsetile.layers import normalise
from sparsetile.layers.normalise import WeightMap, normalised_values, torch_values
from tests.emulator.build import HostKernel, host_compiler
from tests.emulator.products import load_on_host
from tests.host import one_processor
from tests.layers.weight_maps import gcn_map, random_edges

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def host_launches(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> list[HostKernel]:
    """Launch the kernel on the host; return what is loaded."""
    monkeypatch.setattr(normalise, "_takes", lambda csr, weight: csr.nnz > 0)
    return load_on_host(monkeypatch, folder, normalise, options=options, processors=one_processor)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    host_launches(monkeypatch, folder)


def assert_right(where: WeightMap, weight: Tensor, fill: float = 1.0) -> None:
    """Values and gradient agree with torch's operations in float64, and come again bit for bit."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    close = (
        {"rtol": 1e-12, "atol": 1e-12} if wide is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    )
    exact = weight.double().requires_grad_()
    want = torch_values(where, exact, fill)
    given = weight.clone().requires_grad_()
    got = normalised_values(where, given, fill, wide)
    assert got.dtype is wide
    torch.testing.assert_close(got.double(), want, equal_nan=True, **close)
    assert torch.equal(
        got.view(torch.uint8), normalised_values(where, weight, fill, wide).view(torch.uint8)
    )
    g = torch.linspace(-1, 1, got.numel(), dtype=torch.float64)
    (want_grad,) = torch.autograd.grad(want, exact, g)
    grads = [torch.autograd.grad(got, given, g.to(wide), retain_graph=True)[0] for _ in range(2)]
    assert grads[0].dtype is weight.dtype
    assert torch.equal(grads[0].view(torch.uint8), grads[1].view(torch.uint8))
    scale = float(want_grad[want_grad.isfinite()].abs().max()) if want_grad.numel() else 0.0
    eps = max(torch.finfo(weight.dtype).eps, 1e-13)
    bound = {"rtol": 20 * eps, "atol": 20 * eps * max(scale, 1.0)}
    torch.testing.assert_close(grads[0].double(), want_grad, equal_nan=True, **bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loops", ["keep", "replace", "append"])
@pytest.mark.parametrize(("nodes", "count"), [(1, 1), (33, 40), (70, 600)])
def test_values_and_gradient_are_torch_s(nodes: int, count: int, loops: str, dtype: torch.dtype):
    for parallel in (False, True):
        edges = random_edges(nodes, count, parallel=parallel)
        where = gcn_map(edges, nodes, loops)
        assert_right(where, torch.rand(edges.shape[1]).to(dtype) + 0.5, 2.0)


def test_rows_whose_weights_cancel_are_scaled_by_zero():
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    where, weight = gcn_map(edges, 4), torch.tensor([2.0, -2.0, 3.0, 0.0])
    assert_right(where, weight)
    values = normalised_values(where, weight, 1.0, torch.float32)
    assert torch.equal(values, torch.zeros(4))  # rows 1 and 2 have degree 0, columns as well


def test_rows_without_weight_get_no_gradient_from_nan():
    edges = torch.tensor([[0, 2, 0, 1, 2], [0, 0, 1, 1, 2]])  # row 1 has a negative degree
    where, weight = gcn_map(edges, 3), torch.tensor([2.0, -2.0, 1.0, -3.0, 1.0])
    assert_right(where, weight)
    given = weight.requires_grad_()
    (grad,) = torch.autograd.grad(normalised_values(where, given, 1.0, torch.float32).sum(), given)
    assert grad.isnan().tolist() == [False, False, True, True, False]


def test_negative_and_non_finite_degrees_give_what_torch_gives():
    edges = random_edges(40, 200)
    where, weight = gcn_map(edges, 40, "replace"), torch.rand(edges.shape[1])
    for index, number in ((3, -9.0), (50, math.inf), (80, math.nan), (100, -math.inf)):
        weight[index] = number
        got = normalised_values(where, weight, 1.0, torch.float32)
        want = torch_values(where, weight, 1.0)
        torch.testing.assert_close(got, want, equal_nan=True)
    assert got.isnan().any() and got.isfinite().any()


def test_no_edges_but_those_that_were_added():
    where = gcn_map(torch.empty(2, 0, dtype=torch.int64), 5, "replace")
    for dtype in (torch.float32, torch.float16):
        values = normalised_values(where, torch.empty(0, dtype=dtype), 2.0, torch.float32)
        torch.testing.assert_close(values, torch.ones(5))


@pytest.mark.parametrize("count", [255, 256, 257, 264, 1000, 5000])
def test_long_rows_and_columns_are_shared_by_a_thread_block(count: int):
    nodes = 5003
    others = torch.randperm(nodes, generator=torch.Generator().manual_seed(1))[:count]
    hubs = [torch.stack([others, torch.full_like(others, hub)]) for hub in (0, 1, 40)]
    hubs.append(torch.stack([torch.full_like(others, 7), others]))
    edges = torch.unique(torch.cat(hubs, 1), dim=1)
    assert_right(gcn_map(edges, nodes, "replace"), torch.rand(edges.shape[1]) + 0.5)


def test_all_threads_of_a_block_walk_a_long_row(monkeypatch: pytest.MonkeyPatch, folder: Path):
    nodes = count = 18_000
    busiest = []
    for target in (torch.zeros(count, dtype=torch.int64), torch.arange(count)):
        loaded = host_launches(monkeypatch, folder, counted=True)
        where = gcn_map(torch.stack([torch.arange(count), target]), nodes)
        normalised_values(where, torch.ones(count), 1.0, torch.float32)
        assert len(loaded) == 2
        busiest.append([max(kernel.steps) for kernel in loaded])
    for long, short in zip(*busiest, strict=True):
        assert 0 < long <= 1.2 * short


def test_second_derivatives_are_torch_s():
    edges = random_edges(12, 40)
    where = gcn_map(edges, 12, "replace")
    weight = (torch.rand(edges.shape[1], dtype=torch.float64) + 0.5).requires_grad_()

    def product(weight: Tensor) -> Tensor:
        return normalised_values(where, weight, 1.0, torch.float64)

    assert torch.autograd.gradcheck(product, weight)
    assert torch.autograd.gradgradcheck(product, weight)


def test_weights_of_other_types_and_layouts_are_taken():
    edges = random_edges(30, 100)
    where = gcn_map(edges, 30)
    weight = torch.randint(1, 5, (edges.shape[1],))
    want = torch_values(where, weight.double(), 1.0)
    strided = torch.stack([weight, weight], 1)[:, 0]
    for given in (weight, weight.half(), weight.double(), strided.float(), weight.bool()):
        for dtype in (torch.float32, torch.float64):
            got = normalised_values(where, given, 1.0, dtype)
            assert got.dtype is dtype
            if given.dtype is not torch.bool:
                torch.testing.assert_close(got.double(), want)


def test_a_matrix_that_was_given_takes_its_values_as_they_are():
    edges = random_edges(30, 100)
    csr = gcn_map(edges, 30).csr
    plain = CSR(csr.indptr, csr.indices, None, csr.shape, checked=True)
    assert WeightMap(plain).tensors == []
    assert_right(WeightMap(plain), torch.rand(csr.nnz) + 0.1)
