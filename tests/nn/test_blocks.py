"""Sampled graphs are multiplied without a plan, with the results of canonical graphs."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.nn import GCNConv, GINConv, SAGEConv, aggregate, clear_graph_cache, sampled
from sparsetile.nn.cache import _Regime, find_graph
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.graph import SHORT_LIVED_CALLS
from sparsetile.nn.inputs import Given
from sparsetile.nn.sampled import SampledGraph, make_sampled
from tests.conftest import DEVICES

SOURCES, TARGETS, N = 40, 12, 6


@pytest.fixture(autouse=True)
def regime():
    """Graphs are short-lived, as they are after the first block of a loader."""
    clear_graph_cache()
    _Regime.short_lived = True
    yield
    clear_graph_cache()


def edges(by_target: bool = True, seed: int = 0) -> Tensor:
    """Edges with parallel ones among them; the last target has none."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SOURCES, (70,), generator=generator)
    target = torch.randint(TARGETS - 1, (70,), generator=generator)
    found = torch.stack([source, target])
    found = torch.cat([found, found[:, :9]], 1)
    return found[:, found[1].argsort(stable=True)] if by_target else found


def dense(edge_index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    A = torch.zeros(TARGETS, SOURCES, dtype=dtype)
    ones = torch.ones(edge_index.shape[1], dtype=dtype)
    return A.index_put_((edge_index[1], edge_index[0]), ones, accumulate=True)


def expected(x: Tensor, edge_index: Tensor, reduce: str) -> Tensor:
    A = dense(edge_index)
    out = A @ x.double()
    return out / A.sum(1, keepdim=True).clamp(min=1) if reduce == "mean" else out


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.new_zeros(TARGETS, x.shape[1])


@pytest.mark.parametrize("by_target", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_and_means_with_gradients(by_target: bool, reduce: str, dtype: torch.dtype):
    edge_index = edges(by_target)
    x = torch.randn(SOURCES, N).to(dtype).requires_grad_()
    grad = torch.randn(TARGETS, N).to(dtype)
    out = aggregate(pair(x), edge_index, reduce=reduce)
    (d_x,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    want = expected(wide, edge_index, reduce)
    (want_d,) = torch.autograd.grad(want, wide, grad.double())
    close = (
        {"rtol": 2e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(d_x.double(), want_d, **close)


def block_of(edge_index: Tensor) -> SampledGraph:
    given = Given("edges", edge_index)
    found, _ = find_graph("t", given, (SOURCES, TARGETS), edge_index.device, only_reduces=True)
    assert isinstance(found, SampledGraph)
    return found


def test_nothing_is_sorted_or_planned(monkeypatch: pytest.MonkeyPatch, calls_of):
    monkeypatch.setattr(SampledGraph, "canonical", property(lambda self: pytest.fail("sorted")))
    edge_index = edges()
    sorts = calls_of(torch, "sort")
    aggregate(pair(torch.randn(SOURCES, N)), edge_index, reduce="mean")
    assert not sorts


def test_gradients_of_gradients():
    edge_index = edges()
    x = torch.randn(SOURCES, N, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True)
    block = block_of(edge_index)
    for mean, relu in itertools.product((False, True), repeat=2):

        def product(x: Tensor, bias: Tensor, reduce="mean" if mean else "sum", relu=relu) -> Tensor:
            return block.aggregate(x, reduce=reduce, bias=bias, relu=relu)

        assert torch.autograd.gradcheck(product, (x, bias))
        assert torch.autograd.gradgradcheck(product, (x, bias), fast_mode=True)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])  # targets are the first of the sources
@pytest.mark.parametrize("joined", [False, True])
def test_layers_on_blocks_have_gradients_of_gradients(
    aggr: str, bias: bool, shared: bool, joined: bool, constants
):
    from sparsetile.nn import sage

    constants(sage, MOST_JOINED=2**26 if joined else 0)
    edge_index, width = edges(), N if shared else N + 1
    layer = SAGEConv((N, width), 3, aggr, bias=bias).double()
    double = {"dtype": torch.float64, "requires_grad": True}
    x, y = torch.randn(SOURCES, N, **double), torch.randn(TARGETS, width, **double)
    # A sampled graph that is used too often becomes a graph.
    constants(sampled, SHORT_LIVED_CALLS=10**9)

    def of_layer(x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        given = (x, x[:TARGETS] if shared else y), edge_index
        return torch.func.functional_call(layer, dict(zip(named, weights, strict=True)), given)

    named = dict(layer.named_parameters())
    want = expected(x, edge_index, aggr) @ layer.lin_l.weight.t()
    want = want + (x[:TARGETS] if shared else y) @ layer.lin_r.weight.t()
    want = want if layer.lin_l.bias is None else want + layer.lin_l.bias
    torch.testing.assert_close(of_layer(x, y, *named.values()), want)
    assert torch.autograd.gradcheck(of_layer, (x, y, *named.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(of_layer, (x, y, *named.values()), fast_mode=True)


def test_layers_on_blocks_heed_what_is_hooked_to_their_linear_maps():
    edge_index, x = edges(), torch.randn(SOURCES, N)

    def results() -> list[Tensor]:
        found = []
        for out in (N - 2, N + 2):
            torch.manual_seed(0)
            layer = SAGEConv(N, out)
            layer.lin_l.register_forward_hook(lambda _, given, made: 2 * made)
            layer.lin_r = torch.nn.Sequential(layer.lin_r, torch.nn.Tanh())
            found.append(layer((x, x[:TARGETS]), edge_index.clone()))
            with torch.no_grad():
                mean = expected(x, edge_index, "mean").float()
                want = 2 * torch.nn.functional.linear(mean, layer.lin_l.weight, layer.lin_l.bias)
                want = want + layer.lin_r(x[:TARGETS])
            torch.testing.assert_close(found[-1].detach(), want, rtol=1e-5, atol=1e-5)
        return found

    results()
    _Regime.short_lived = False  # a planned graph
    clear_graph_cache()
    results()


@pytest.mark.parametrize("by_target", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_what_a_block_does_not_take_is_what_the_graph_gives(
    by_target: bool, reduce: str, constants
):
    edge_index = edges(by_target)
    x = torch.randn(SOURCES, N)
    weight = torch.rand(edge_index.shape[1])

    def results() -> list[Tensor]:
        given = edge_index.clone()
        batch = torch.stack([x, 2 * x])
        found = [aggregate(pair(x), given, reduce=reduce)]
        found.append(aggregate((batch, batch[:, :TARGETS]), given, reduce=reduce))
        if reduce in ("sum", "mean"):
            found.append(aggregate(pair(x), given, weight, reduce=reduce))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(aggregate(pair(x), given, reduce=reduce))
        found.append(torch.func.vmap(lambda y: aggregate(pair(y), given, reduce=reduce))(batch))
        return found

    mine = results()
    constants(sampled, SAMPLED_DEVICES=())
    clear_graph_cache()
    _Regime.short_lived = True
    for found, want in zip(mine, results(), strict=True):
        tight = 2e-2 if found.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, want, rtol=tight, atol=tight)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_negative_views_keep_their_signs(reduce: str):
    edge_index, x = edges(), torch.randn(SOURCES, N)
    given = torch._neg_view(x).requires_grad_()
    out = aggregate(pair(given), edge_index, reduce=reduce)
    torch.testing.assert_close(out.double(), expected(-x, edge_index, reduce), rtol=1e-5, atol=1e-5)
    grad = torch.randn(TARGETS, N)
    (mine,) = torch.autograd.grad(out, given, torch._neg_view(grad), retain_graph=True)
    (want,) = torch.autograd.grad(out, given, -grad)
    torch.testing.assert_close(mine, want)


def test_a_block_that_stays_becomes_a_graph():
    edge_index, x = edges(), torch.randn(SOURCES, N)
    want = expected(x, edge_index, "mean").float()
    for _ in range(SHORT_LIVED_CALLS + 3):
        torch.testing.assert_close(aggregate(pair(x), edge_index, reduce="mean"), want)
    block = block_of(edge_index)
    assert block._canonical is not None and not block._canonical.short_lived
    ((kept,),) = (plans.values() for plans in block._canonical._plans.values())
    aggregate(pair(x), edge_index, reduce="mean")
    ((again,),) = (plans.values() for plans in block._canonical._plans.values())
    assert again is kept, "planned once"


def test_blocks_are_forgotten_with_their_edges():
    edge_index = edges()
    aggregate(pair(torch.randn(SOURCES, N)), edge_index)
    graphs = len(blocks_alive())
    del edge_index
    gc.collect()
    assert len(blocks_alive()) == graphs - 1
    assert _Regime.short_lived


def blocks_alive() -> list[SampledGraph | FreshGraph]:
    from sparsetile.nn.cache import _graphs

    kinds = SampledGraph, FreshGraph
    return [found for _, found in _graphs.values() if isinstance(found, kinds)]


def test_edges_that_name_no_node_are_named():
    x = torch.randn(SOURCES, N)
    for row, value in ((0, SOURCES), (1, TARGETS), (0, -1)):
        wrong = edges()
        wrong[row, 3] = value
        with pytest.raises(ValueError, match=rf"edge_index\[{row}\]"):
            aggregate(pair(x), wrong)


def test_no_edges_and_other_devices_have_no_block(constants):
    none = torch.empty(2, 0, dtype=torch.int64)
    assert make_sampled("t", none, True, (TARGETS, SOURCES)) is None
    out = aggregate(pair(torch.randn(SOURCES, N)), none)
    assert out.shape == (TARGETS, N) and not out.any()
    constants(sampled, SAMPLED_DEVICES=("cuda",))
    assert make_sampled("t", edges(), True, (TARGETS, SOURCES)) is None


@pytest.mark.parametrize("kind", [SAGEConv, GINConv])
def test_layers_of_blocks_are_those_of_graphs(kind: type, constants):
    torch.manual_seed(2)
    layer = SAGEConv(N, 5) if kind is SAGEConv else GINConv(torch.nn.Linear(N, 5))
    x, edge_index = torch.randn(SOURCES, N), edges(False)
    features = (x, x[:TARGETS])

    def step() -> list[Tensor]:
        layer.zero_grad()
        out = layer(features, edge_index.clone())
        out.square().sum().backward()
        return [out, *(parameter.grad.clone() for parameter in layer.parameters())]

    mine = step()
    constants(sampled, SAMPLED_DEVICES=())
    clear_graph_cache()
    for found, want in zip(mine, step(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def square(loops: bool, device: str = "cpu", nodes: int = 30) -> Tensor:
    """Edges among nodes, by target, with parallel ones."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(nodes, (2, 120), generator=generator)
    found = found if loops else found[:, found[0] != found[1]]
    return found[:, found[1].argsort(stable=True)].to(device)


def check_convolutions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCNConv on blocks beside the canonical graph's, with gradients."""
    for loops, wide, flow in itertools.product(
        (False, True), (5, 40), ("source_to_target", "target_to_source")
    ):
        torch.manual_seed(5)
        layer = GCNConv(N, wide, flow=flow).to(device)
        torch.nn.init.normal_(layer.bias)
        edge_index = square(loops, device)
        x = torch.randn(30, N, device=device, requires_grad=True)
        grad = torch.randn(30, wide, device=device)
        taken: list[object] = []
        convolve = SampledGraph.convolve

        def noted(self, *args, convolve=convolve, taken=taken):
            taken.append(convolve(self, *args))
            return taken[-1]

        def step(layer=layer, x=x, grad=grad, edge_index=edge_index) -> list[Tensor]:
            out = layer(x, edge_index.clone(), relu=True)
            leaves = (x, layer.lin.weight, layer.bias)
            return [out, *torch.autograd.grad(out, leaves, grad)]

        _Regime.short_lived = True
        with monkeypatch.context() as patch:
            patch.setattr(SampledGraph, "convolve", noted)
            mine = step()
            assert len(taken) == 1 and (taken[0] is None) == loops == _Regime.looped
            _Regime.short_lived = True
            step()
            assert len(taken) == (1 if loops else 2), "the next one is not tried"
        with monkeypatch.context() as patch:
            patch.setattr(sampled, "SAMPLED_DEVICES", ())
            clear_graph_cache()
            want = step()
        for found, expected_one in zip(mine, want, strict=True):
            torch.testing.assert_close(found, expected_one, rtol=1e-4, atol=1e-4)


def test_convolutions_of_blocks_are_those_of_graphs(monkeypatch: pytest.MonkeyPatch):
    check_convolutions("cpu", monkeypatch)


@pytest.mark.parametrize("passing", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [N - 2, N + 2])  # the product before or behind the linear map
def test_convolutions_heed_what_is_in_their_linear_maps_place(out: int, bias: bool, passing: bool):
    _Regime.short_lived = passing
    torch.manual_seed(7)
    layer = GCNConv(N, out, bias=bias)
    x, edge_index = torch.randn(30, N), square(False)
    plain = layer(x, edge_index.clone())
    weight = layer.lin.weight
    layer.lin = torch.nn.Linear(N, out, bias=False)
    layer.lin.weight = torch.nn.Parameter(weight / 2)
    layer.lin.register_forward_hook(lambda _, given, made: 2 * made)
    torch.testing.assert_close(layer(x, edge_index.clone()), plain)
    torch.testing.assert_close(layer(x, edge_index.clone(), relu=True), plain.relu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_convolutions_in_other_types(dtype: torch.dtype):
    torch.manual_seed(6)
    layer = GCNConv(N, 5).to(dtype)
    x, edge_index = torch.randn(30, N).to(dtype), square(False)
    A = torch.zeros(30, 30, dtype=torch.float64)
    A.index_put_((edge_index[1], edge_index[0]), A.new_ones(1), accumulate=True)
    A += torch.eye(30)
    scale = A.sum(1).rsqrt()
    want = scale[:, None] * A * scale @ (x.double() @ layer.lin.weight.double().T)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 3e-2, "atol": 3e-2}
    out = layer(x, edge_index)
    assert out.dtype is dtype and isinstance(blocks_alive()[-1], SampledGraph)
    torch.testing.assert_close(out.double(), want, **close)
    with torch.autocast("cpu", torch.bfloat16):
        half = GCNConv(N, 5)(torch.randn(30, N), square(False))
    assert half.dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("by_target", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_on_a_gpu(by_target: bool, reduce: str, dtype: torch.dtype):
    for n in (1, 7, 64, 130):
        edge_index = edges(by_target)
        x = torch.randn(SOURCES, n, device="cuda").to(dtype).requires_grad_()
        grad = torch.randn(TARGETS, n, device="cuda").to(dtype)
        given = edge_index.cuda()
        out = aggregate(pair(x), given, reduce=reduce)
        assert isinstance(next(reversed(blocks_alive())), FreshGraph)
        (d_x,) = torch.autograd.grad(out, x, grad)
        wide = x.detach().cpu().double().requires_grad_()
        want = expected(wide, edge_index, reduce)
        (want_d,) = torch.autograd.grad(want, wide, grad.cpu().double())
        tight = 4e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.cpu().double(), want, rtol=tight, atol=tight)
        torch.testing.assert_close(d_x.cpu().double(), want_d, rtol=tight, atol=tight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_targets_on_a_gpu_that_descend_by_one_are_found():
    edge_index = edges()
    first = int((edge_index[1].diff() == 1).nonzero()[0])  # the last entry of its row
    edge_index[:, [first, first + 1]] = edge_index[:, [first + 1, first]]
    x = torch.randn(SOURCES, N, device="cuda")
    out = aggregate(pair(x), edge_index.cuda(), reduce="sum")
    want = expected(x.cpu(), edge_index, "sum")
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_large_blocks_on_a_gpu_have_the_same_bits_in_every_run():
    generator = torch.Generator().manual_seed(7)
    source = (torch.rand(90_000, generator=generator) ** 3 * 30_000).long()  # hubs among them
    target = torch.randint(8_000, (90_000,), generator=generator).sort().values
    given = torch.stack([source, target]).cuda()
    x = torch.randn(30_000, 128, device="cuda", requires_grad=True)
    grad = torch.randn(8_000, 128, device="cuda")
    runs = []
    for _ in range(3):
        out = aggregate((x, x[:8_000]), given.clone(), reduce="mean")
        runs.append((out, *torch.autograd.grad(out, x, grad)))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    A = torch.sparse_coo_tensor(
        given.flip(0), torch.ones(90_000, device="cuda").double(), (8_000, 30_000)
    )
    count = torch.bincount(given[1], minlength=8_000).clamp(min=1).unsqueeze(1)
    want = torch.sparse.mm(A, x.detach().double()) / count
    torch.testing.assert_close(runs[0][0].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["int32", "columns of pairs", "inference"])
def test_edges_that_are_copied_first(how: str, device: str):
    edge_index, x = edges(), torch.randn(SOURCES, N)
    want = expected(x, edge_index, "mean").float()
    with torch.inference_mode(how == "inference"):
        given = edge_index.to(device).clone()
        if how == "int32":
            given = given.int()
        elif how == "columns of pairs":
            given = given.T.contiguous().T
        for _ in range(2):
            out = aggregate(pair(x.to(device)), given, reduce="mean")
            torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_hub_on_a_gpu_is_cut_into_pieces():
    source = torch.randint(50, (40_000,))
    target = torch.cat([torch.full((30_000,), 7), torch.randint(60, (10_000,))])
    x = torch.randn(50, 33, device="cuda", requires_grad=True)
    grad = torch.randn(60, 33, device="cuda")
    for given in (torch.stack([source, target]), torch.stack([source, target.sort().values])):
        out = aggregate((x, grad), given.cuda(), reduce="sum")
        (d_x,) = torch.autograd.grad(out, x, grad)
        A = torch.zeros(60, 50, dtype=torch.float64)
        A.index_put_((given[1], given[0]), A.new_ones(1), accumulate=True)
        want, want_d = A @ x.detach().cpu().double(), A.T @ grad.cpu().double()
        torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=2e-2)
        torch.testing.assert_close(d_x.cpu().double(), want_d, rtol=1e-4, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize(("row", "number"), [(0, SOURCES), (0, -1), (1, TARGETS), (1, 2**40)])
def test_an_edge_on_a_gpu_that_names_no_node_is_refused(reduce: str, row: int, number: int):
    given = edges()
    given[row, 17] = number
    given, x = given.cuda(), torch.randn(SOURCES, N, device="cuda")
    for _ in range(2):
        aggregate(pair(x), given, reduce=reduce)
        with pytest.raises(ValueError, match=rf"edge_index must be .*got {number} at edge 17"):
            st.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_other_demands_on_a_block_of_a_gpu():
    """Of one tensor, before and after its first product."""
    x = torch.randn(SOURCES, N, device="cuda")
    for by_target in (True, False):
        edge_index = edges(by_target)
        given = edge_index.cuda()
        dense_rows = dense(edge_index)
        for reduce in ("max", "sum", "max"):
            out = aggregate(pair(x), given, reduce=reduce).cpu().double()
            if reduce == "sum":
                want = dense_rows @ x.cpu().double()
            else:
                want = torch.zeros(TARGETS, N, dtype=torch.float64)
                for t in range(TARGETS - 1):
                    want[t] = x.cpu().double()[dense_rows[t] > 0].amax(0)
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        with torch.inference_mode():
            aggregate(pair(x), given.clone(), reduce="mean")
        with torch.autocast("cuda", torch.bfloat16):
            half = aggregate(pair(x), given.clone(), reduce="sum")
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(
            half.cpu().double(), dense_rows @ x.cpu().double(), rtol=4e-2, atol=4e-2
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("tracked", [False, True])
def test_layers_on_a_gpu_with_edges_in_and_out_of_order(tracked: bool):
    """What one block was says nothing of the next."""
    layer = SAGEConv(N, 5).cuda()
    x = torch.randn(SOURCES, N, device="cuda", requires_grad=tracked)
    for turn, by_target in enumerate((True, False, False, True, True)):
        edge_index = edges(by_target, seed=turn)
        _Regime.short_lived = True
        out = layer((x, x[:TARGETS]), edge_index.cuda())
        wide = x.detach().cpu().double().requires_grad_(tracked)
        mean = expected(wide, edge_index, "mean")
        state = [weight.detach().cpu().double() for weight in layer.parameters()]
        want = mean @ state[0].T + state[1] + wide[:TARGETS] @ state[2].T
        torch.testing.assert_close(out.detach().cpu().double(), want, rtol=1e-3, atol=1e-3)
        if tracked:
            (found,) = torch.autograd.grad(out.square().sum(), x)
            (right,) = torch.autograd.grad(want.square().sum(), wide)
            torch.testing.assert_close(found.cpu().double(), right, rtol=1e-2, atol=1e-2)
        wrong = edge_index.cuda()
        wrong[0, 3] = SOURCES
        layer((x, x[:TARGETS]), wrong)
        with pytest.raises(ValueError, match=rf"edge_index must be .*got {SOURCES} at edge 3"):
            st.synchronize()
