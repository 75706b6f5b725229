"""Training under autocast, with and without a GradScaler, follows training in float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import sparsetile.pyg
from sparsetile.nn import GCNConv, aggregate
from tests.nn.cases import NODES, PAIRS, WIDTH, directed_graph, pyg, weights_of

HALVES = [torch.bfloat16, torch.float16]


def train(layer, dtype, steps=12, scale=None):
    """Return the losses of a classifier of one layer; ``dtype`` None trains in float32."""
    torch.manual_seed(1)
    x, edge_index, labels = torch.randn(NODES, WIDTH), directed_graph(), torch.arange(NODES) % 3
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = layer(x, edge_index)
        loss = cross_entropy(out.float(), labels)
        optimiser.zero_grad()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype is torch.float32 for p in layer.parameters())
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    return losses


def layer_of(name):
    torch.manual_seed(0)
    return PAIRS[name](3)[0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "sage-max", "gin", "gat-mean-residual"])
def test_autocast_trains_as_float32_does(name, dtype):
    expected = train(layer_of(name), None)
    assert expected[-1] < expected[0]
    found = train(layer_of(name), dtype, scale=2.0**10)
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["gcn", "sage-mean", "sage-max", "gin", "gat"])
def test_results_under_autocast_are_of_its_type(name, dtype):
    with torch.autocast("cpu", dtype=dtype):
        assert layer_of(name)(torch.randn(NODES, WIDTH), directed_graph()).dtype is dtype


def test_a_scaled_loss_gives_the_gradients_of_the_loss():
    plain, scaled = layer_of("gcn"), layer_of("gcn")
    assert train(scaled, torch.bfloat16, scale=2.0**8) == pytest.approx(
        train(plain, torch.bfloat16), rel=1e-3
    )


def test_a_step_whose_gradients_overflow_is_skipped():
    layer, edge_index = GCNConv(WIDTH, 3), directed_graph()
    x = torch.full((NODES, WIDTH), 1e4)
    before = [p.detach().clone() for p in layer.parameters()]
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = layer(x, edge_index)
    scaler.scale(out.float().square().sum()).backward()
    scaler.step(optimiser)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_edge_weights_come_in_the_weights_own_type(dtype):
    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH)
    grads = []
    for enabled in (False, True):
        weight = weights_of(edge_index).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            out = aggregate(x, edge_index, weight)
        out.float().sum().backward()
        assert weight.grad.dtype is torch.float32
        grads.append(weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.05, atol=0.1)


def test_patched_layers_train_under_autocast():
    torch.manual_seed(0)
    expected = train(pyg.GCNConv(WIDTH, 3), None)
    torch.manual_seed(0)
    layer = pyg.GCNConv(WIDTH, 3)
    with sparsetile.pyg.patch():
        x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, edge_index)
        torch.testing.assert_close(out.float(), layer(x, edge_index), rtol=0.05, atol=0.05)
        losses = train(layer, torch.bfloat16)
    assert losses == pytest.approx(expected, rel=0.05)
