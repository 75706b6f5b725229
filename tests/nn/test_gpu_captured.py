"""``captured`` on a GPU: training equals eager training, and what cannot be captured is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

import sparsetile as st
import sparsetile.pyg
from sparsetile.nn import (
    GATConv,
    GCNConv,
    RGCNConv,
    SAGEConv,
    aggregate,
    captured,
    clear_graph_cache,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

NODES, EDGES, WIDTH, CLASSES, STEPS = 2000, 20_000, 32, 8, 12
Optimizer = torch.optim.Optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam-fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of torch in float32 too; no graph of another test is known."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    clear_graph_cache()
    yield
    clear_graph_cache()


def graph_of(seed: int = 0, symmetric: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(NODES, (2, EDGES), generator=generator)
    edges = torch.cat([edges, edges.flip(0)], 1) if symmetric else edges
    return edges.unique(dim=1).cuda()


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Features and labels, other ones for every step."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(NODES, WIDTH, generator=generator).cuda(),
            torch.randint(CLASSES, (NODES,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


class Net(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module], drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.drop = layer(WIDTH, 64), nn.BatchNorm1d(64), drop
        self.second = layer(64, CLASSES)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        wide = self.norm(self.first(x, edges)).relu()
        return self.second(dropout(wide, self.drop, self.training), edges)


def step_of(
    net: nn.Module, optimizer: Optimizer, scaler: Any = None, dtype: torch.dtype | None = None
) -> Callable[..., Tensor]:
    def step(x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        cast = torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext()
        with cast:
            loss = cross_entropy(net(x, edges).float(), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return step


def both(
    net: nn.Module, make: Callable[..., Optimizer], edges: Tensor, *,
    scales: bool = False, dtype: torch.dtype | None = None,
) -> tuple[list[float], list[float], nn.Module, nn.Module]:  # fmt: skip
    """Losses of eager and of captured training from the same state, and both models."""
    found: list[list[float]] = []
    nets = [net.cuda(), copy.deepcopy(net).cuda()]
    for number, each in enumerate(nets):
        optimizer = make(each.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if scales else None
        step = step_of(each, optimizer, scaler, dtype)
        x, labels = batches(1)[0]
        if number:
            step = captured(step, x, edges, labels, optimizer=optimizer, scaler=scaler)
        torch.manual_seed(5)
        found.append([step(x, edges, labels).item() for x, labels in batches()])
    return found[0], found[1], nets[0], nets[1]


def assert_same_losses(found: list[float], expected: list[float]) -> None:
    """The first losses are of the same weights; later ones differ by sums in another order."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-2)


class Relations(nn.Module):
    """RGCNConv with three relations, drawn once for the edges."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv, self.types = RGCNConv(wide, out, 3), torch.empty(0)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if not self.types.numel():
            self.types = edges.sum(0) % 3
        return self.conv(x, edges, self.types)  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "max": lambda wide, out: SAGEConv(wide, out, aggr="max"),
    "rgcn": Relations,
    "gat": lambda wide, out: GATConv(wide, out // 4, heads=4),
}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_captured_training_is_eager_training(layer, symmetric):
    torch.manual_seed(0)
    net = Net(LAYERS[layer])
    eager, replayed, one, other = both(net, OPTIMIZERS["adam"], graph_of(symmetric=symmetric))
    assert_same_losses(replayed, eager)
    assert one.norm.num_batches_tracked == other.norm.num_batches_tracked == STEPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_start_from_their_first_step(name):
    torch.manual_seed(0)
    eager, replayed, _, _ = both(Net(GCNConv), OPTIMIZERS[name], graph_of())
    assert_same_losses(replayed, eager)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINConv"])
def test_layers_of_pyg_under_the_patch(name):
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)

    def layer(wide: int, out: int) -> nn.Module:
        if name != "GINConv":
            return getattr(pyg, name)(wide, out)
        return pyg.GINConv(nn.Sequential(nn.Linear(wide, out), nn.ReLU(), nn.Linear(out, out)))

    with sparsetile.pyg.patch():
        eager, replayed, _, _ = both(Net(layer), OPTIMIZERS["adam"], graph_of())
    assert_same_losses(replayed, eager)


def test_modules_of_torch_alone():
    torch.manual_seed(0)

    class Plain(nn.Linear):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return super().forward(x)

    eager, replayed, _, _ = both(Net(Plain), OPTIMIZERS["sgd"], graph_of())
    assert_same_losses(replayed, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler(dtype):
    torch.manual_seed(0)
    eager, replayed, _, _ = both(
        Net(SAGEConv), OPTIMIZERS["adam-fused"], graph_of(), scales=True, dtype=dtype
    )
    assert replayed == pytest.approx(eager, rel=0.05)


def test_a_step_that_overflows_is_left_out_by_the_scaler_at_the_replay():
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    step = captured(train, torch.ones(2, 4, device="cuda"), optimizer=optimizer, scaler=scaler)
    assert scaler.get_scale() == 64.0
    before = net.weight.detach().clone()
    step(torch.full((2, 4), torch.inf, device="cuda"))
    assert torch.equal(net.weight, before) and scaler.get_scale() == 32.0
    step(torch.ones(2, 4, device="cuda"))
    assert not torch.equal(net.weight, before) and scaler.get_scale() == 32.0


def test_a_scaler_needs_a_fused_optimizer():
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer must be one with fused=True if a GradScaler"):
        captured(net, torch.ones(2, 4, device="cuda"), optimizer=optimizer,
                 scaler=torch.amp.GradScaler("cuda"))  # fmt: skip


def test_training_goes_on_eagerly_after_replays_and_replays_after_it():
    torch.manual_seed(0)
    net, edges = Net(GCNConv).cuda(), graph_of()
    other = copy.deepcopy(net)
    found = []
    for each in (net, other):
        optimizer = OPTIMIZERS["adam"](each.parameters())
        step = step_of(each, optimizer)
        eager = [step(x, edges, labels).item() for x, labels in batches()[:4]]
        again = step
        if each is other:
            x, labels = batches(1)[0]
            again = captured(step, x, edges, labels, optimizer=optimizer)
        middle = [again(x, edges, labels).item() for x, labels in batches()[4:8]]
        middle += [step(x, edges, labels).item() for x, labels in batches()[8:10]]
        found.append([*eager, *middle, *(again(x, edges, y).item() for x, y in batches()[10:])])
    assert_same_losses(found[1], found[0])


@pytest.mark.parametrize("layer", ["gcn", "gat"])
def test_dropout_draws_anew_at_each_replay_and_again_from_a_seed(layer):
    edges, x = graph_of(), batches(1)[0][0]
    net = Net(LAYERS[layer], drop=0.5).cuda()
    if layer == "gat":
        net.first.dropout = 0.5
    step = captured(lambda x, edges: net(x, edges), x, edges)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([step(x, edges).clone() for _ in range(3)])
    first, second, third = runs[0]
    assert not torch.equal(first, second) and not torch.equal(second, third)
    for one, again in zip(*runs, strict=True):
        assert torch.equal(one, again)


def test_random_numbers_go_on_as_if_nothing_was_captured():
    torch.manual_seed(3)
    expected = torch.rand(5, device="cuda"), torch.rand(5)
    torch.manual_seed(3)
    captured(lambda x: dropout(x), torch.ones(9, device="cuda"))
    assert torch.equal(torch.rand(5, device="cuda"), expected[0])
    assert torch.equal(torch.rand(5), expected[1])


def test_inputs_with_new_values_and_new_edge_weights():
    edges, net = graph_of(), GCNConv(WIDTH, 8).cuda()
    weights = [torch.rand(edges.shape[1], device="cuda") + 0.1 for _ in range(3)]
    step = captured(lambda x, edges, w: net(x, edges, w), batches(1)[0][0], edges, weights[0])
    for (x, _), weight in zip(batches(3), weights, strict=True):
        expected = net(x, edges, weight).detach()
        torch.testing.assert_close(step(x, edges, weight), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"inputs\[1\] must be the graph that the step"):
        step(x, edges.flip(1).clone(), weight)
    assert step.inputs[1] is edges and step.inputs[0] is not x


def test_wrong_shapes_types_and_devices_are_refused_and_change_nothing():
    edges, net = graph_of(), GCNConv(WIDTH, 8).cuda()
    x = batches(1)[0][0]
    step = captured(net, x, edges)
    expected = step(x, edges).clone()
    for wrong in (x[:-1], x.half(), x.cpu(), x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"captured: inputs\[0\] must be"):
            step(wrong, edges)
    with pytest.raises(ValueError, match=r"captured: inputs\[1\] must be on cuda:0, got cpu"):
        captured(net, x, edges.cpu())
    assert torch.equal(step(x, edges), expected)


def reads_the_loss(net: nn.Module, optimizer: Optimizer) -> Callable[..., Tensor]:
    step = step_of(net, optimizer)
    seen: list[float] = []

    def wrong(x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        loss = step(x, edges, labels)
        seen.append(loss.item())
        return loss

    return wrong


def makes_a_graph(net: nn.Module, optimizer: Optimizer) -> Callable[..., Tensor]:
    """It waits once the graph is planned: eager calls before the capture need not."""
    step = step_of(net, optimizer)
    return lambda x, edges, labels: step(x, edges.clone(), labels)


def waits_for_the_device(net: nn.Module, optimizer: Optimizer) -> Callable[..., Tensor]:
    """torch does not notice this wait before the capture."""
    step = step_of(net, optimizer)

    def wrong(x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        loss = step(x, edges, labels)
        torch.cuda.synchronize()
        return loss

    return wrong


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (reads_the_loss, "captured: step must be free of waits for the GPU"),
        (makes_a_graph, "captured: step must be (work that a CUDA graph|free of waits)"),
        (waits_for_the_device, "captured: step must be (work that a CUDA graph|free of waits)"),
    ],
)
def test_a_step_that_cannot_be_captured_is_refused_and_the_device_still_works(make, text):
    torch.manual_seed(0)
    net, edges = Net(GCNConv, drop=0.5).cuda(), graph_of()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    before = [each.clone() for each in net.state_dict().values()]
    (x, labels), stream = batches(1)[0], torch.cuda.current_stream()
    with pytest.raises(ValueError, match=text) as raised:
        captured(make(net, optimizer), x, edges, labels, optimizer=optimizer)
    assert isinstance(raised.value.__cause__, Exception)
    del raised
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.testing.assert_close(list(net.state_dict().values()), before, rtol=0, atol=0)
    assert not optimizer.state and not optimizer.param_groups[0]["capturable"]
    assert all(each.grad is None for each in net.parameters())
    step = step_of(net, optimizer)  # eager and captured steps are possible afterwards
    assert torch.isfinite(step(x, edges, labels))
    replay = captured(step, x, edges, labels, optimizer=optimizer)
    assert torch.isfinite(replay(x, edges, labels))
    torch.cuda.synchronize()


def test_a_step_on_the_host_or_with_numbers_as_results_is_refused():
    x = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="returns tensors on cuda:0, got float"):
        captured(lambda x: 1.0, x)
    host = torch.ones(3)
    with pytest.raises(ValueError, match="returns tensors on cuda:0, got cpu"):
        captured(lambda x: host * 2, x)


def test_memory_does_not_grow_and_gradients_keep_their_place():
    net, edges = Net(GCNConv).cuda(), graph_of()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    x, labels = batches(1)[0]
    step = captured(step_of(net, optimizer), x, edges, labels, optimizer=optimizer)
    step(x, edges, labels)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    places = [each.grad.data_ptr() for each in net.parameters()]
    for _ in range(100):
        optimizer.zero_grad()  # eager code between replays
        step(x, edges, labels)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert [each.grad.data_ptr() for each in net.parameters()] == places


@pytest.mark.parametrize("zeroing", ["in place", "outside", "last"])
def test_gradients_are_eager_ones_wherever_they_are_zeroed(zeroing):
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(WIDTH, CLASSES).cuda()
        optimizer = OPTIMIZERS["sgd"](net.parameters())

        def step(x: Tensor, labels: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            if zeroing == "in place":
                optimizer.zero_grad(set_to_none=False)
            loss = cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            if zeroing == "last":
                optimizer.zero_grad()
            return loss

        run = captured(step, *batches(1)[0], optimizer=optimizer) if capture else step
        losses = []
        for x, labels in batches():
            if zeroing == "outside":
                optimizer.zero_grad()
            losses.append(run(x, labels).item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_the_plans_that_a_graph_reads_outlive_the_cache():
    edges, net = graph_of(), Net(GCNConv).cuda().eval()
    x = batches(1)[0][0]
    expected = net(x, edges).detach()
    step = captured(net, x, edges)
    clear_graph_cache()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for _ in range(40):  # more than the cache holds; they would take the memory of freed plans
        aggregate(x, graph_of(seed=2).clone())
        filled = [torch.full((n,), 7, device="cuda") for n in (100, 10_000, 1_000_000)]
    del filled
    torch.testing.assert_close(step(x, edges), expected, rtol=1e-4, atol=1e-4)


def test_inference_in_inference_mode():
    edges, net = graph_of(), Net(SAGEConv).cuda().eval()
    x = batches(1)[0][0]
    with torch.inference_mode():
        step = captured(net, x, edges)
        for given, _ in batches(3):
            torch.testing.assert_close(step(given, edges), net(given, edges), rtol=1e-4, atol=1e-4)


def test_within_an_outer_autocast_weights_are_cast_at_each_replay():
    net = nn.Linear(WIDTH, 8).cuda()
    x = batches(1)[0][0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        net(x)  # fills autocast's cache
        step = captured(net, x)
        with torch.no_grad():
            net.weight.mul_(2)
            net.bias.zero_()
        found = step(x).clone()
    expected = torch.nn.functional.linear(x.bfloat16(), net.weight.bfloat16())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_learning_rate_on_the_gpu_may_change():
    net = nn.Linear(4, 4, bias=False).cuda()
    nn.init.ones_(net.weight)
    rate = torch.tensor(1e-6, device="cuda")
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    x = torch.ones(2, 4, device="cuda")

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step = captured(train, x, optimizer=optimizer)
    first = [step(x).item() for _ in range(2)]
    optimizer.param_groups[0]["lr"].fill_(0.1)
    step(x)
    assert first[1] == pytest.approx(first[0], rel=1e-4) and step(x).item() < 0.95 * first[0]


def test_a_replay_on_another_stream():
    edges, net = graph_of(), GCNConv(WIDTH, 8).cuda()
    step = captured(net, batches(1)[0][0], edges)
    stream = torch.cuda.Stream()
    for x, _ in batches(4):
        expected = net(x, edges).detach()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(x, edges).clone()
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_in_the_step_compares_all_systems_before_the_capture():
    edges = graph_of()
    plan = st.plan((edges.flip(0), None, (NODES, NODES)), n=64)
    x = torch.randn(NODES, 64, device="cuda")
    step = captured(lambda x: plan @ x, x)
    assert plan._family.forward.later is None
    torch.testing.assert_close(step(x), plan @ x, rtol=1e-4, atol=1e-4)
