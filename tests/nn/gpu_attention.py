"""Checks of attention layers on a GPU that the files of several layers share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.nn.cases import NODES, WIDTH, directed_graph, without_parallel_edges

__all__ = [
    "assert_bits_are_the_same", "assert_memory_of_nodes", "assert_near_float64", "assert_replays",
    "assert_same_as_pyg", "hub_graph",
]  # fmt: skip

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Of float64, by the length of the whole difference: rounding of messages and gradients to the type,
# and what their sums add. Single elements may be far off: rounding turns a leaky ReLU near 0.
# Gradients of attention's vectors cancel: torch's operations on the CPU are up to 9e-5, 3e-2 and
# 6e-2 off on the same graph.
NEAR = {F32: 2e-3, F16: 5e-2, BF16: 1e-1}
MOST_TURNED = 0.03
# A sum that is 0 -> one of as many terms as large as its own.
_ZERO = {"lin_key.bias": "lin_query.bias"}


def hub_graph(nodes: int, edges: int, hub: int = 0) -> Tensor:
    """Random edges; node 0 has ``hub`` more in each direction; the last ten nodes have none."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(nodes - 10, (2, edges), generator=generator)
    spokes = torch.arange(hub) % (nodes - 10)
    centre = torch.zeros_like(spokes)
    both = [torch.stack([spokes, centre]), torch.stack([centre, spokes])]
    return torch.cat([drawn, *both], 1).unique(dim=1).cuda()


def _step(layer: Any, x: Tensor, edge_index: Tensor, features: Tensor | None) -> list[Tensor]:
    """Output, and gradients of x, of the features and of all parameters by name."""
    return list(_step_by_name(layer, x, edge_index, features).values())


def _step_by_name(
    layer: Any, x: Tensor, edge_index: Tensor, features: Tensor | None
) -> dict[str, Tensor]:
    leaves = [each.detach().requires_grad_() for each in (x, features) if each is not None]
    layer.zero_grad()
    out = layer(leaves[0], edge_index, *leaves[1:])
    slope = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * slope.to(out.dtype)).sum().backward()
    found = {"out": out.detach()} | {f"leaf {i}": leaf.grad for i, leaf in enumerate(leaves)}
    return found | {name: each.grad for name, each in sorted(layer.named_parameters())}


def _features(edge_index: Tensor, width: int | None) -> Tensor | None:
    return None if width is None else torch.randn(edge_index.shape[1], width, device="cuda")


def _close(found: list[Tensor], wanted: list[Tensor], near: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        scale = max(float(theirs.abs().max()), 1.0)
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=near, atol=near * scale)


def _near(found: dict[str, Tensor], wanted: dict[str, Tensor], near: float) -> None:
    for name, mine in found.items():
        mine, theirs = mine.double(), wanted[name].double()
        # A key's bias moves all scores of a target alike: its gradient is 0, and what is left of
        # the sum is rounding. Torch's operations leave 0.4 of it where the query's is 261 long.
        length = max(float(wanted[_ZERO.get(name, name)].norm()), 1.0)
        assert torch.isfinite(mine).all() and mine.shape == theirs.shape
        apart, scale = (mine - theirs).abs(), max(float(theirs.abs().max()), 1.0)
        off = apart > near * (scale + theirs.abs())
        assert off.double().mean() <= MOST_TURNED, f"{int(off.sum())} of {off.numel()}"
        assert apart.norm() <= near * length, (name, float(apart.norm()))


def assert_same_as_pyg(pair: tuple[Any, Any], edge_dim: int | None) -> None:
    mine, theirs = (each.cuda() for each in pair)
    edge_index = without_parallel_edges(directed_graph()) if edge_dim else directed_graph()
    edge_index, x = edge_index.cuda(), torch.randn(NODES, WIDTH, device="cuda")
    features = _features(edge_index, edge_dim)
    found = _step(mine, x, edge_index, features)
    _close(found, _step(theirs, x, edge_index, features), 2e-4)


def assert_near_float64(layer: Any, width: int, edge_dim: int | None, dtype: torch.dtype) -> None:
    """A graph with a hub and isolated nodes, against the layer's own path in float64."""
    edge_index = hub_graph(3000, 20_000, hub=2500)
    layer = layer.cuda().to(dtype)
    wide = copy.deepcopy(layer).double()
    x = torch.randn(3000, width, device="cuda").to(dtype)
    features = _features(edge_index, edge_dim)
    features = None if features is None else features.to(dtype)
    found = _step_by_name(layer, x, edge_index, features)
    given = None if features is None else features.double()
    _near(found, _step_by_name(wide, x.double(), edge_index, given), NEAR[dtype])


def assert_bits_are_the_same(layer: Any, width: int, edge_dim: int | None) -> None:
    edge_index = hub_graph(3000, 20_000, hub=2500)
    layer, x = layer.cuda(), torch.randn(3000, width, device="cuda")
    features = _features(edge_index, edge_dim)
    first = _step(layer, x, edge_index, features)
    for _ in range(5):
        for once, again in zip(first, _step(layer, x, edge_index, features), strict=True):
            assert torch.equal(once, again)


def assert_memory_of_nodes(layer: Any, width: int, out: int, edge_dim: int | None) -> None:
    """A training step allocates less than one tensor of edges x features."""
    nodes, edges = 20_000, 2_000_000
    edge_index = torch.randint(nodes, (2, edges), device="cuda").unique(dim=1)
    layer, x = layer.cuda(), torch.randn(nodes, width, device="cuda")
    features = _features(edge_index, edge_dim)
    _step(layer, x, edge_index, features)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(layer, x, edge_index, features)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 4 * edge_index.shape[1] * out


def assert_replays(layer: Any, width: int, edge_dim: int | None) -> None:
    """A captured forward pass follows new features of nodes."""
    edge_index = hub_graph(2000, 20_000)
    layer, x = layer.cuda().eval(), torch.randn(2000, width, device="cuda")
    features = _features(edge_index, edge_dim)
    more = () if features is None else (features,)
    with torch.no_grad():
        layer(x, edge_index, *more)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, edge_index, *more)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, layer(x, edge_index, *more))
