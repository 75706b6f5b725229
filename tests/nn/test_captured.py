"""``captured`` on the CPU: the step itself, its errors, and what a capture resets.

``RepeatingGraph`` takes the place of CUDA graphs: what is tested is all but the GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

import sparsetile as st
import sparsetile.pyg
from sparsetile.core.epoch import epoch
from sparsetile.nn import GCNConv, RGCNConv, SAGEConv, captured, clear_graph_cache
from sparsetile.nn.training_state import TrainingState
from tests.captures import RepeatingGraph

NODES, WIDTH, CLASSES = 30, 8, 4
EDGES = torch.randint(NODES, (2, 90), generator=torch.Generator().manual_seed(0))
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
}
ZEROING = ["to none first", "in place first", "to none last", "outside"]


class Net(nn.Module):
    def __init__(self, layer: Any = GCNConv) -> None:
        super().__init__()
        self.first, self.norm = layer(WIDTH, 16), nn.BatchNorm1d(16)
        self.second = layer(16, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        wide = dropout(self.norm(self.first(x, edges)).relu(), training=self.training)
        return self.second(wide, edges)


def training(
    make: Make = OPTIMIZERS["adam"], zeroing: str = ZEROING[0], scaler: Any = None
) -> tuple[Callable[..., Tensor], Net, torch.optim.Optimizer]:
    """A step that depends on all that is to be reset: dropout, buffers, state, gradients."""
    torch.manual_seed(1)
    net = Net()
    optimizer = make(net.parameters())

    def step(x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        if zeroing.endswith("first"):
            optimizer.zero_grad(set_to_none=zeroing == ZEROING[0])
        loss = cross_entropy(net(x, edges), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if zeroing.endswith("last"):
            optimizer.zero_grad()
        return loss

    return step, net, optimizer


def batches(count: int = 6) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(NODES, WIDTH, generator=generator), EDGES,
            torch.randint(CLASSES, (NODES,), generator=generator),
        )
        for _ in range(count)
    ]  # fmt: skip


def losses(step: Callable[..., Tensor], optimizer: Any, zeroing: str = "") -> list[float]:
    torch.manual_seed(3)
    found = []
    for batch in batches():
        if zeroing == "outside":
            optimizer.zero_grad()
        found.append(step(*batch).item())
    return found


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> RepeatingGraph:
    return RepeatingGraph.put_into(monkeypatch)


# -- on the host -----------------------------------------------------------------------------------


def test_on_the_cpu_the_step_runs_as_it_is():
    eager, _, optimizer = training()
    expected = losses(eager, optimizer)
    step, _, optimizer = training()
    found = captured(step, *batches(1)[0], optimizer=optimizer)
    assert losses(found, optimizer) == expected
    assert not optimizer.param_groups[0]["capturable"]


def test_results_are_detached_and_keep_their_nesting():
    weight = torch.ones(3, requires_grad=True)
    step = captured(lambda pair: {"sums": [pair["a"] * weight, None]}, {"a": torch.ones(3)})
    found = step({"a": torch.full((3,), 2.0)})
    assert torch.equal(found["sums"][0], torch.full((3,), 2.0)) and found["sums"][1] is None
    assert not found["sums"][0].requires_grad


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((torch.ones(3),), r"inputs\[0\] must be float32 \[2\], as in the example, got .* \[3\]"),
        ((torch.ones(2).double(),), r"inputs\[0\] must be float32 .* got float64"),
        ((torch.ones(2, requires_grad=True),), r"inputs\[0\] must be without requires_grad"),
        ((torch.ones(2), torch.ones(2)), "inputs must be 1 tensors, nested as in the example"),
        (([torch.ones(2)],), r"inputs\[0\] must be a tensor, got list"),
        ((torch.ones(2, device="meta"),), r"inputs\[0\] must be on cpu, got meta"),
    ],
)
def test_inputs_unlike_the_example_are_refused(inputs, text):
    step = captured(lambda x: x, torch.ones(2))
    with pytest.raises((TypeError, ValueError), match=text):
        step(*inputs)
    step = captured(lambda pair: pair[0], [torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="inputs must be 2 tensors, nested as in the example"):
        step((torch.ones(2), torch.ones(2)))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="captured: step must be callable, got int"):
        captured(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"captured: inputs\[0\] must be a tensor, got int"):
        captured(lambda x: x, 3)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or"):
        captured(lambda x: x, torch.ones(2), optimizer=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"captured: inputs\[0\] must be without requires_grad"):
        captured(lambda x: x, torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="captured: step must be a function that returns tensors"):
        captured(lambda x: 1.0, torch.ones(2))(torch.ones(2))


# -- with a graph that repeats ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_replay_is_the_first_step(graph, name):
    eager, _, optimizer = training(OPTIMIZERS[name])
    expected = losses(eager, optimizer)
    step, net, optimizer = training(OPTIMIZERS[name])
    found = captured(step, *batches(1)[0], optimizer=optimizer)
    assert losses(found, optimizer) == pytest.approx(expected, rel=1e-6)
    assert graph.replays == len(expected) and net.norm.num_batches_tracked == len(expected)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_training_goes_on_from_the_state_that_there_is(graph, name):
    make = OPTIMIZERS[name]
    if name == "sgd":
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)
    found = []
    for capture in (False, True):
        step, _, optimizer = training(make)
        losses(step, optimizer)
        if capture:
            step = captured(step, *batches(1)[0], optimizer=optimizer)
        found.append(losses(step, optimizer))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("zeroing", ZEROING)
def test_gradients_are_those_of_the_step_wherever_they_are_zeroed(graph, zeroing):
    found = []
    for capture in (False, True):
        step, net, optimizer = training(zeroing=zeroing)
        for parameter in net.parameters():  # left by something before, and part of the first step
            if zeroing != "to none last":
                parameter.grad = torch.ones_like(parameter)
        if capture:
            step = captured(step, *batches(1)[0], optimizer=optimizer)
        run = losses(step, optimizer, zeroing)
        found.append((run, [each.grad for each in net.parameters()]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1])


def test_gradients_that_a_replay_would_not_read_are_refused(graph):
    step, net, optimizer = training(zeroing="to none last")
    replay = captured(step, *batches(1)[0], optimizer=optimizer)
    net.first.lin.weight.grad = torch.ones_like(net.first.lin.weight)
    with pytest.raises(ValueError, match="gradients must be None before the step, which sets them"):
        replay(*batches(1)[0])


def test_a_scaler_starts_from_its_state(graph, monkeypatch):
    checks = importlib.import_module("sparsetile.nn.captured")
    monkeypatch.setattr(checks, "check_optimizers", lambda *given: None)
    found = []
    for capture in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        step, _, optimizer = training(scaler=scaler)
        if capture:
            step = captured(step, *batches(1)[0], optimizer=optimizer, scaler=scaler)
        found.append((losses(step, optimizer), scaler.state_dict()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[1][1] == found[0][1] and found[0][1]["scale"] == 128.0


def test_relations_that_a_replay_would_not_follow_are_refused(graph):
    layer, x = RGCNConv(WIDTH, CLASSES, 3), torch.randn(NODES, WIDTH)
    kinds = torch.randint(3, (EDGES.shape[1],))
    step = captured(lambda x, edges, kinds: layer(x, edges, kinds), x, EDGES, kinds)
    assert step.inputs[1] is EDGES and step.inputs[2] is kinds and step.inputs[0] is not x
    clear_graph_cache()
    torch.testing.assert_close(step(2 * x, EDGES, kinds), layer(2 * x, EDGES, kinds).detach())
    for at, given in ((1, (x, EDGES.clone(), kinds)), (2, (x, EDGES, kinds.clone()))):
        with pytest.raises(ValueError, match=rf"inputs\[{at}\] must be the graph that the step"):
            step(*given)


def test_inputs_are_copied_unless_they_are_the_static_ones(graph):
    step = captured(lambda x: x * 2, torch.ones(3))
    example = torch.ones(3)
    (own,) = step.inputs
    assert own is not example
    assert torch.equal(step(torch.full((3,), 4.0)), torch.full((3,), 8.0))
    own.fill_(5.0)
    assert torch.equal(step(own), torch.full((3,), 10.0))
    assert torch.equal(example, torch.ones(3))


@pytest.mark.parametrize("layer", [GCNConv, SAGEConv])
def test_edges_are_not_copied_and_must_stay_as_they_are(graph, layer):
    edges, net = EDGES.clone(), layer(WIDTH, 4)
    x = batches(1)[0][0]
    step = captured(net, x, edges)
    assert step.inputs[1] is edges and step.inputs[0] is not x
    torch.testing.assert_close(step(x, edges), net(x, edges).detach())
    with pytest.raises(ValueError, match=r"inputs\[1\] must be the graph that the step"):
        step(x, edges.clone())
    edges[0, 0] = 1 - edges[0, 0].clamp(max=1)
    with pytest.raises(ValueError, match=r"inputs\[1\] must be .* got new content"):
        step(x, edges)


def test_edge_weights_are_copied_and_read_again_at_each_replay(graph):
    net, (x, edges, _) = GCNConv(WIDTH, 4), batches(1)[0]
    weights = torch.rand(3, edges.shape[1], generator=torch.Generator().manual_seed(0)) + 0.1
    step = captured(net, x, edges, weights[0])
    for weight in weights:
        torch.testing.assert_close(step(x, edges, weight), net(x, edges, weight).detach())


def test_edge_weights_that_pyg_s_layers_normalise_must_stay_as_they_are(graph):
    pyg = pytest.importorskip("torch_geometric.nn")
    (x, edges, _), weight = batches(1)[0], torch.ones(EDGES.shape[1])
    with sparsetile.pyg.patch():
        net = pyg.GCNConv(WIDTH, 4)
        step = captured(net, x, edges, weight)
        torch.testing.assert_close(step(x, edges, weight), net(x, edges, weight).detach())
        with pytest.raises(ValueError, match=r"inputs\[2\] must be the graph that the step"):
            step(x, edges, weight * 2)


def test_the_plans_of_a_graph_live_as_long_as_the_step(graph):
    edges, net = EDGES.clone(), GCNConv(WIDTH, 4)
    step = captured(net, batches(1)[0][0], edges)
    st.nn.clear_graph_cache()
    held = [type(each).__name__ for parts in step._held[0] for each in parts]
    assert "Graph" in held and "Plan" in held


def test_a_replay_announces_writes_of_a_step_that_trains(graph):
    step, _, optimizer = training()
    batch = batches(1)[0]
    trains = captured(step, *batch, optimizer=optimizer)
    before = epoch()
    trains(*batch)
    assert epoch() > before
    weight = torch.ones(3, requires_grad=True)
    reads = captured(lambda x: x * weight, torch.ones(3))
    before = epoch()
    reads(torch.ones(3))
    assert epoch() == before


def test_new_settings_of_the_optimizer_are_refused(graph):
    step, net, optimizer = training()
    batch = batches(1)[0]
    replay = captured(step, *batch, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"captured: lr must be 0\.01, as at the capture, got 0"):
        replay(*batch)
    optimizer.param_groups[0]["lr"] = 0.01
    net.first.lin.weight.data = net.first.lin.weight.data.clone()
    with pytest.raises(ValueError, match="parameters must be where they were at the capture"):
        replay(*batch)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="optimizer must be as it was at the capture, got a load"):
        replay(*batch)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    values = [each.clone() for each in net.state_dict().values()]
    grads = [each.grad for each in net.parameters()]
    return [values, grads, dict(optimizer.state), torch.get_rng_state()]


@pytest.mark.parametrize("when", range(1, 5))
def test_a_step_that_fails_leaves_everything_as_it_was(graph, when):
    step, net, optimizer = training()
    net.first.lin.weight.grad = torch.ones_like(net.first.lin.weight)
    calls = []

    def fails(*inputs: Tensor) -> Tensor:
        loss = step(*inputs)
        calls.append(loss)
        if len(calls) == when:
            optimizer.param_groups[0]["lr"] = 7.0
            raise RuntimeError("called a synchronizing CUDA operation")
        return loss

    before = state_of(net, optimizer)
    text = {3: "free of waits for the GPU, got one", 4: "can repeat, got RuntimeError: called a"}
    kind = ValueError if when > 2 else RuntimeError
    with pytest.raises(kind, match=text.get(when, "synchronizing")) as raised:
        captured(fails, *batches(1)[0], optimizer=optimizer)
    assert when < 3 or isinstance(raised.value.__cause__, RuntimeError)
    torch.testing.assert_close(state_of(net, optimizer), before, rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_an_optimizer_that_is_not_passed_is_refused(graph):
    step, _, _ = training()
    with pytest.raises(ValueError, match="optimizer must be every optimiser that the step runs"):
        captured(step, *batches(1)[0])


def test_state_that_a_graph_cannot_hold_is_refused(graph):
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1

    step, _, optimizer = training(partial(Counting, lr=0.1))
    with pytest.raises(ValueError, match="keeps its state on the GPU, got Counting, whose 'steps'"):
        captured(step, *batches(1)[0], optimizer=optimizer)
    dampened = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)
    step, _, optimizer = training(dampened)
    with pytest.raises(
        ValueError, match="one whose first state is known, got SGD before its first"
    ):
        captured(step, *batches(1)[0], optimizer=optimizer)


def test_settings_on_the_host_and_scalers_that_wait_are_refused():
    check = importlib.import_module("sparsetile.nn.captured_checks").check_optimizers
    weight = [torch.ones(2, requires_grad=True)]
    adam = torch.optim.Adam(weight, lr=torch.tensor(0.1))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="lr must be a number or a tensor on cuda:0, got a tensor"):
        check([adam], None, gpu)
    sgd = torch.optim.SGD(weight, lr=0.1)
    check([sgd], torch.amp.GradScaler("cpu", enabled=False), gpu)
    with pytest.raises(ValueError, match="optimizer must be one with fused=True if a GradScaler"):
        check([sgd], torch.amp.GradScaler("cpu"), gpu)


def test_casts_of_weights_from_before_are_not_reused(graph):
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured(lambda x: seen.append(torch.is_autocast_cache_enabled()), torch.ones(2))
        assert torch.is_autocast_cache_enabled()
    captured(lambda x: seen.append(torch.is_autocast_cache_enabled()), torch.ones(2))
    assert seen == [False] * 4 + [True] * 4


def test_a_state_of_a_meta_device_is_brought_to_its_parameter():
    weight = torch.ones(2, device="meta", requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(weight)}
    state = TrainingState([optimizer])
    state.make_capturable()
    assert optimizer.state[weight]["step"].device.type == "meta"
    assert optimizer.param_groups[0]["capturable"]
    state.restore()
    assert optimizer.state[weight]["step"] == 3.0
    assert not optimizer.param_groups[0]["capturable"]
