"""How calls of attention layers are computed: transformed, without features, by fused kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile import nn as ours
from sparsetile.nn import clear_graph_cache, gatv2, heads
from sparsetile.nn.graph import Graph
from tests.nn.cases import (
    FLOWS,
    NODES,
    WIDTH,
    directed_graph,
    pyg,
    same_weights,
    without_parallel_edges,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
EDGES = without_parallel_edges(directed_graph())
FEATURES = torch.randn(EDGES.shape[1], 3, generator=torch.Generator().manual_seed(8))
NAMES = ("GATConv", "GATv2Conv")


def pair_of(name: str, *arguments: Any, **named: Any) -> tuple[Any, Any]:
    mine = getattr(ours, name)(*arguments, **named)
    return same_weights((mine, getattr(pyg, name)(*arguments, **named)))


@pytest.fixture(autouse=True)
def _fresh():
    clear_graph_cache()
    yield
    clear_graph_cache()


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("fill", ["mean", "add"])
@pytest.mark.parametrize("name", NAMES)
def test_transformed_layers_give_self_loops_the_features_of_pyg(name, fill, flow):
    mine, theirs = pair_of(name, WIDTH, 5, heads=2, edge_dim=3, fill_value=fill, flow=flow)
    x, both = torch.randn(NODES, WIDTH), torch.stack([FEATURES, 2 * FEATURES])
    found = torch.func.vmap(lambda features: mine(x, EDGES, features))(both)
    for features, each in zip(both, found, strict=True):
        torch.testing.assert_close(each, theirs(x, EDGES, features), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_edge_dim_may_be_called_without_features(name):
    mine, theirs = pair_of(name, WIDTH, 5, heads=2, edge_dim=3)
    x = torch.randn(NODES, WIDTH)
    torch.testing.assert_close(mine(x, EDGES), theirs(x, EDGES), **CLOSE)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch's operations in place of the kernels, which layers take for tensors of the host."""
    seen: list[str] = []

    def bent(
        entries: Any, targets: Tensor, messages: Tensor, vector: Tensor, slope: float, *more: Any
    ) -> Tensor:
        total = targets[entries.rows] + messages[entries.flat[0][0].long()]
        if more[0] is not None:
            total = total + more[0] @ more[1].t()
        bent = torch.nn.functional.leaky_relu(total, slope).unflatten(1, vector.shape)
        seen.append("scores")
        return (bent * vector).sum(-1)

    def attend(entries: Any, messages: Tensor, scores: Tensor, *, bias: Any, **_: Any) -> Tensor:
        columns, count = entries.flat[0]
        exp = (scores - scores.max()).exp()
        total = exp.new_zeros(int(count), exp.shape[1]).index_add(0, entries.rows, exp)
        share = (exp / total[entries.rows]).unsqueeze(-1)
        each = (messages[columns.long()].unflatten(1, (exp.shape[1], -1)) * share).flatten(1)
        out = each.new_zeros(int(count), each.shape[1]).index_add(0, entries.rows, each)
        seen.append("sums")
        return out if bias is None else out + bias

    def rows_plan(graph: Graph, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        return [graph.csr.indices, torch.tensor(graph.shape[0])], ""

    monkeypatch.setattr(heads, "FUSED_ON", "cpu")
    monkeypatch.setattr(Graph, "rows_plan", rows_plan)
    monkeypatch.setattr(gatv2, "bent_scores", bent)
    monkeypatch.setattr(heads, "attend_entries", attend)
    return seen


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_fused_kernels_compute_what_needs_no_attention_returned(fused, edge_dim, concat):
    options = {"edge_dim": edge_dim, "concat": concat, "residual": True}
    mine, theirs = pair_of("GATv2Conv", WIDTH, 5, heads=2, **options)
    x, more = torch.randn(NODES, WIDTH), () if edge_dim is None else (FEATURES,)
    torch.testing.assert_close(mine(x, EDGES, *more), theirs(x, EDGES, *more), **CLOSE)
    assert fused == ["scores", "sums"]
    found, (_, attention) = mine(x, EDGES, *more, return_attention_weights=True)
    expected, (_, wanted) = theirs(x, EDGES, *more, return_attention_weights=True)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(attention, wanted, **CLOSE)
    assert len(fused) == 2, "kernels do not return it"
