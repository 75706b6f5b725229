"""Edge weights under torch.func, second derivatives, and graphs without nodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from sparsetile.nn import GATConv, GCNConv, GINConv, SAGEConv, aggregate

EDGES = [[0, 1, 2, 3, 3, 1, 2], [1, 2, 0, 0, 2, 3, 2]]  # one self-loop
NODES = 4
CALLS = {
    "gcn": lambda: GCNConv(3, 2),
    "gcn wide": lambda: GCNConv(3, 5),
    "gcn without normalisation": lambda: GCNConv(3, 2, normalize=False),
    "gcn without self-loops": lambda: GCNConv(3, 2, add_self_loops=False),
    "sums": lambda: aggregate,
    "means": lambda: lambda x, e, w: aggregate(x, e, w, reduce="mean"),
}


@pytest.fixture
def edges() -> Tensor:
    return torch.tensor(EDGES)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 3, dtype=torch.float64, generator=generator)
    return x, torch.rand(len(EDGES[0]), dtype=torch.float64, generator=generator) + 0.5


def layer(name: str):
    made = CALLS[name]()
    return made.double() if isinstance(made, torch.nn.Module) else made


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_in_edge_weights(name, edges):
    call, (x, w) = layer(name), inputs()
    w.requires_grad_()
    assert torch.autograd.gradcheck(lambda w: call(x, edges, w), w)
    assert torch.autograd.gradgradcheck(lambda w: call(x, edges, w), w)


@pytest.mark.parametrize("name", CALLS)
def test_grad_of_torch_func_in_edge_weights(name, edges):
    call, (x, w) = layer(name), inputs()
    found = grad(lambda w: call(x, edges, w).square().sum())(w)
    w.requires_grad_()
    call(x, edges, w).square().sum().backward()
    torch.testing.assert_close(found, w.grad)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_and_jacobians_over_edge_weights(name, edges):
    call, (x, w) = layer(name), inputs()
    many = torch.stack([w, 2 * w, w + 1])
    found = vmap(lambda w: call(x, edges, w))(many)
    torch.testing.assert_close(found, torch.stack([call(x, edges, w) for w in many]))
    jacobian = jacrev(lambda w: call(x, edges, w))(w)
    expected = torch.autograd.functional.jacobian(lambda w: call(x, edges, w), w)
    torch.testing.assert_close(jacobian, expected)


def test_per_sample_gradients_of_a_layer_and_its_weights(edges):
    conv, (x, w) = GCNConv(3, 2).double(), inputs()

    def loss(parameters: dict[str, Tensor], w: Tensor) -> Tensor:
        return functional_call(conv, parameters, (x, edges, w)).square().sum()

    parameters = {name: each.detach() for name, each in conv.named_parameters()}
    d_parameters, d_w = grad(loss, argnums=(0, 1))(parameters, w)
    w.requires_grad_()
    loss(dict(conv.named_parameters()), w).backward()
    torch.testing.assert_close(d_w, w.grad)
    for name, each in conv.named_parameters():
        torch.testing.assert_close(d_parameters[name], each.grad)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: GCNConv(3, 2),
        lambda: GCNConv(3, 5),
        lambda: SAGEConv(3, 2),
        lambda: SAGEConv(3, 2, aggr="max"),
        lambda: GINConv(torch.nn.Linear(3, 2)),
        lambda: GATConv(3, 2, heads=2),
    ],
)
def test_graphs_without_nodes(make, weighted):
    conv = make()
    x = torch.empty(0, 3, requires_grad=True)
    edges = torch.empty(2, 0, dtype=torch.int64)
    weight = (torch.empty(0),) if weighted and isinstance(conv, GCNConv) else ()
    out = conv(x, edges, *weight)
    assert out.shape[0] == 0
    out.sum().backward()
    assert x.grad.shape == (0, 3)


@pytest.mark.parametrize("normalize", [False, True])
def test_nodes_without_edges_and_an_empty_weight_of_each(normalize):
    """With normalisation each node has its own self-loop, whose value does not read a weight."""
    conv = GCNConv(3, 2, normalize=normalize)
    x, weight = torch.randn(NODES, 3), torch.empty(0, requires_grad=True)
    out = conv(x, torch.empty(2, 0, dtype=torch.int64), weight)
    own = conv.lin(x) if normalize else torch.zeros(NODES, 2)
    torch.testing.assert_close(out, own + conv.bias)
    out.sum().backward()
    assert weight.grad.shape == (0,)
