"""Layers of graphs that are new in each call: what tests on the host and on a GPU compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsetile import nn as ours

__all__ = ["LAYERS", "assert_like_pyg", "assert_twice_differentiable", "new_edges"]

FEATURES = 12


class _Weighted(nn.Module):
    """A layer of edges whose weights follow from their nodes, times one that may be trained."""

    def __init__(self, conv: nn.Module, trained: bool = False) -> None:
        super().__init__()
        self.conv = conv
        self.factor = nn.Parameter(torch.ones(1)) if trained else None

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weight = ((7 * edges[0] + edges[1]) % 5 + 1).to(x.dtype) / 4
        if self.factor is not None:
            # PyG's gradient of parallel self-loops goes to all of them, though one is used.
            weight = torch.where(edges[0] == edges[1], weight, weight * self.factor)
        return self.conv(x, edges, weight)  # type: ignore[no-any-return]


# name -> how a module makes the layer, for features of some width.
LAYERS = {
    "gcn": lambda M, out: M.GCNConv(FEATURES, out),
    "gcn without loops": lambda M, out: M.GCNConv(FEATURES, out, add_self_loops=False),
    "gcn without norm": lambda M, out: M.GCNConv(FEATURES, out, normalize=False),
    "sage": lambda M, out: M.SAGEConv(FEATURES, out),
    "sage sum": lambda M, out: M.SAGEConv(FEATURES, out, aggr="sum"),
    "sage max": lambda M, out: M.SAGEConv(FEATURES, out, aggr="max"),
    "sage min": lambda M, out: M.SAGEConv(FEATURES, out, aggr="min"),
    "graph conv": lambda M, out: M.GraphConv(FEATURES, out),
    "gin": lambda M, out: M.GINConv(nn.Linear(FEATURES, out)),
    "gat": lambda M, out: M.GATConv(FEATURES, out // 2, 2),
    "gatv2": lambda M, out: M.GATv2Conv(FEATURES, out // 2, 2),
    "transformer": lambda M, out: M.TransformerConv(FEATURES, out // 2, 2),
    "weighted gcn": lambda M, out: _Weighted(M.GCNConv(FEATURES, out)),
    "weighted gcn without norm": lambda M, out: _Weighted(
        M.GCNConv(FEATURES, out, normalize=False)
    ),
    "weighted graph conv": lambda M, out: _Weighted(M.GraphConv(FEATURES, out)),
    "weighted mean": lambda M, out: _Weighted(M.GraphConv(FEATURES, out, aggr="mean")),
    "gcn with trained weights": lambda M, out: _Weighted(M.GCNConv(FEATURES, out), True),
    "graph conv with trained weights": lambda M, out: _Weighted(M.GraphConv(FEATURES, out), True),
}


def new_edges(nodes: int, edges: int, seed: int, hub: bool = False) -> Tensor:
    """Edges in any order, with parallel ones and self-loops; the last node has none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(nodes - 1, (2, edges), generator=generator)
    drawn[:, ::17] = drawn[:1, ::17]
    if hub:
        drawn[0, ::3] = 1
        drawn[1, 1::3] = 2
    return torch.cat([drawn, drawn[:, :9]], 1)


def _step(layer: nn.Module, x: Tensor, edges: Tensor, grad: Tensor) -> list[Tensor]:
    """The result, and gradients of x and of the parameters by name."""
    x = x.detach().requires_grad_()
    named = dict(sorted(layer.named_parameters()))
    out = layer(x, edges)
    return [out, *torch.autograd.grad(out, (x, *named.values()), grad)]


def assert_like_pyg(
    name: str, edges: Tensor, nodes: int, out: int, device: str, dtype: torch.dtype
) -> None:
    """A layer's results and gradients are those of PyG's in float64."""
    import torch_geometric.nn as pyg

    torch.manual_seed(5)
    theirs = LAYERS[name](pyg, out).double()
    mine = LAYERS[name](ours, out)
    mine.load_state_dict(theirs.state_dict())
    mine = mine.to(device, dtype)
    x = torch.randn(nodes, FEATURES).to(dtype)
    grad = torch.randn(nodes, out).to(dtype)
    with torch.no_grad():
        for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            other.copy_(own)  # what rounding left
    want = _step(theirs, x.double(), edges, grad.double())
    given = edges.to(device)
    found = _step(mine, x.to(device), given, grad.to(device))
    again = _step(mine, x.to(device), given.clone(), grad.to(device))
    tight = 1e-4 if dtype is torch.float32 else 0.05
    for place, (own, other, same) in enumerate(zip(found, want, again, strict=True)):
        scale = max(float(other.detach().abs().max()), 1.0)
        error = float((own.detach().cpu().double() - other.detach()).abs().max())
        assert error <= tight * scale, f"{name}, result {place}: {error} of {scale}"
        assert torch.equal(own, same), f"{name}, result {place}: other bits"


def assert_twice_differentiable(make: Any, edges: Tensor, nodes: int, device: str) -> None:
    """Gradients of gradients are those of torch's operations on the same layer in float64."""
    import torch_geometric.nn as pyg

    torch.manual_seed(5)
    theirs, mine = make(pyg, 4).double(), make(ours, 4)
    mine.load_state_dict(theirs.state_dict())
    mine = mine.to(device)
    x, found = torch.randn(nodes, FEATURES), []
    for layer, given, dtype in ((theirs, edges, torch.float64), (mine, edges.to(device), None)):
        operand = x.to(given.device, dtype).requires_grad_()
        weight = next(iter(layer.parameters()))
        out = layer(operand, given)
        (first,) = torch.autograd.grad((out**3).sum(), operand, create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), (operand, weight)))
    for want, got in zip(*found, strict=True):
        scale = max(float(want.abs().max()), 1.0)
        assert float((got.cpu().double() - want).abs().max()) <= 1e-4 * scale
