"""Graphs and pairs of layers, ours and PyG's, that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsetile import nn as ours

pyg = pytest.importorskip("torch_geometric.nn")

NODES = 40
WIDTH = 8
FLOWS = ["source_to_target", "target_to_source"]


def directed_graph(edges: int = 160, seed: int = 0) -> Tensor:
    """Random edges with parallel ones, self-loops (one twice), and five isolated nodes."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(NODES - 5, (2, edges), generator=generator)
    edge_index[:, 1] = edge_index[:, 0]
    edge_index[:, 2] = edge_index[:, 0]
    edge_index[:, 7] = 4
    edge_index[:, 30] = 9
    return edge_index


def weights_of(edge_index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(edge_index.shape[1], generator=generator, dtype=dtype) + 0.1


def without_parallel_edges(edge_index: Tensor) -> Tensor:
    return edge_index.unique(dim=1)


def gin_map(out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, out))


# Name -> (our layer, PyG's layer) of a width of results and a flow.
PAIRS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "gcn": lambda out, **more: (
        ours.GCNConv(WIDTH, out, **more),
        pyg.GCNConv(WIDTH, out, **more),
    ),
    "sage-mean": lambda out, **more: (
        ours.SAGEConv(WIDTH, out, **more),
        pyg.SAGEConv(WIDTH, out, **more),
    ),
    "sage-max": lambda out, **more: (
        ours.SAGEConv(WIDTH, out, "max", **more),
        pyg.SAGEConv(WIDTH, out, "max", **more),
    ),
    "sage-all-options": lambda out, **more: (
        ours.SAGEConv(WIDTH, out, "sum", True, False, True, False, **more),
        pyg.SAGEConv(WIDTH, out, "sum", True, False, True, False, **more),
    ),
    "gin": lambda out, **more: (
        ours.GINConv(gin_map(out), eps=0.25, **more),
        pyg.GINConv(gin_map(out), eps=0.25, **more),
    ),
    "gin-learned-eps": lambda out, **more: (
        ours.GINConv(gin_map(out), eps=0.25, train_eps=True, **more),
        pyg.GINConv(gin_map(out), eps=0.25, train_eps=True, **more),
    ),
    "graph": lambda out, **more: (
        ours.GraphConv(WIDTH, out, **more),
        pyg.GraphConv(WIDTH, out, **more),
    ),
    "graph-mean": lambda out, **more: (
        ours.GraphConv(WIDTH, out, "mean", **more),
        pyg.GraphConv(WIDTH, out, "mean", **more),
    ),
    "cheb": lambda out, **more: (
        ours.ChebConv(WIDTH, out, 3, **more),
        pyg.ChebConv(WIDTH, out, 3, **more),
    ),
    "cheb-random-walk": lambda out, **more: (
        ours.ChebConv(WIDTH, out, 5, "rw", **more),
        pyg.ChebConv(WIDTH, out, 5, "rw", **more),
    ),
    "v2": lambda out, **more: (
        ours.GATv2Conv(WIDTH, out, heads=3, **more),
        pyg.GATv2Conv(WIDTH, out, heads=3, **more),
    ),
    "v2-mean-residual": lambda out, **more: (
        ours.GATv2Conv(WIDTH, out, heads=2, concat=False, residual=True, **more),
        pyg.GATv2Conv(WIDTH, out, heads=2, concat=False, residual=True, **more),
    ),
    "v2-shared-without-loops": lambda out, **more: (
        ours.GATv2Conv(WIDTH, out, add_self_loops=False, share_weights=True, **more),
        pyg.GATv2Conv(WIDTH, out, add_self_loops=False, share_weights=True, **more),
    ),
    "transformer": lambda out, **more: (
        ours.TransformerConv(WIDTH, out, heads=3, **more),
        pyg.TransformerConv(WIDTH, out, heads=3, **more),
    ),
    "transformer-gated-mean": lambda out, **more: (
        ours.TransformerConv(WIDTH, out, heads=2, concat=False, beta=True, **more),
        pyg.TransformerConv(WIDTH, out, heads=2, concat=False, beta=True, **more),
    ),
    "gat": lambda out, **more: (
        ours.GATConv(WIDTH, out, heads=3, **more),
        pyg.GATConv(WIDTH, out, heads=3, **more),
    ),
    "gat-mean-residual": lambda out, **more: (
        ours.GATConv(WIDTH, out, heads=2, concat=False, residual=True, **more),
        pyg.GATConv(WIDTH, out, heads=2, concat=False, residual=True, **more),
    ),
    "gat-without-loops": lambda out, **more: (
        ours.GATConv(WIDTH, out, add_self_loops=False, negative_slope=0.4, **more),
        pyg.GATConv(WIDTH, out, add_self_loops=False, negative_slope=0.4, **more),
    ),
}


def assert_same(
    pair: tuple[Any, Any], x: Any, *graph: Any, close: dict[str, float] | None = None, **more: Any
) -> None:
    """Compare results, and gradients of all float inputs and of every parameter.

    ``x`` may be a pair. Every float tensor of ``graph`` gets a gradient, too.
    """
    close = close or {"rtol": 1e-4, "atol": 1e-5}
    outputs, gradients = [], []
    for layer in pair:
        given = [_tracked(each) for each in (x, *graph)]
        layer.zero_grad()
        out = layer(*given, **more)
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * slope).sum().backward()
        outputs.append(out)
        flat = [t for each in given for t in (each if isinstance(each, tuple) else (each,))]
        leaves = [t for t in flat if isinstance(t, Tensor) and t.requires_grad]
        named = {name: each.grad for name, each in layer.named_parameters()}
        gradients.append({**dict(enumerate(leaf.grad for leaf in leaves)), **named})
    torch.testing.assert_close(*outputs, **close)
    assert gradients[0].keys() == gradients[1].keys()
    for name, mine in gradients[0].items():
        theirs = gradients[1][name]
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, **close, msg=lambda m, n=name: f"{n}: {m}")


def _tracked(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(_tracked(each) for each in given)
    if type(given) is Tensor and given.is_floating_point() and given.layout is torch.strided:
        return given.detach().clone().requires_grad_()
    return given


def same_weights(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Give PyG's layer the weights of ours, biases that are not 0 among them."""
    mine, theirs = pair
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


class Largest(TorchDispatchMode):
    """Watches the largest tensor that torch's operations make."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.numbers = max(self.numbers, each.numel())
        return found
