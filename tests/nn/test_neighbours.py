"""``aggregate`` joins the messages of neighbours as PyG's message passing does."""

from __future__ import annotations

import pytest
import torch

from sparsetile.nn import aggregate
from tests.nn.cases import (
    FLOWS,
    NODES,
    WIDTH,
    directed_graph,
    pyg,
    weights_of,
    without_parallel_edges,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def expected(x, edge_index, weight, reduce, flow="source_to_target"):
    layer = pyg.SimpleConv(reduce, flow=flow)
    return layer(x, edge_index, weight)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_neighbours_are_joined_as_in_pyg(reduce, flow):
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    found = aggregate(x, edge_index, reduce=reduce, flow=flow)
    torch.testing.assert_close(found, expected(x, edge_index, None, reduce, flow), **CLOSE)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_weights_scale_messages_as_in_pyg(reduce, tracked):
    edge_index = directed_graph()
    if reduce in ("max", "min"):
        edge_index = without_parallel_edges(edge_index)
    x = torch.randn(NODES, WIDTH, requires_grad=True)
    weights = [weights_of(edge_index).requires_grad_(tracked) for _ in range(2)]
    found = aggregate(x, edge_index, weights[0], reduce=reduce)
    theirs = expected(x, edge_index, weights[1], reduce)
    torch.testing.assert_close(found, theirs, **CLOSE)
    slope = torch.randn(NODES, WIDTH)
    grads = [torch.autograd.grad(result, x, slope, retain_graph=True) for result in (found, theirs)]
    torch.testing.assert_close(grads[0], grads[1], **CLOSE)
    if tracked:
        found.backward(slope)
        theirs.backward(slope)
        torch.testing.assert_close(weights[0].grad, weights[1].grad, **CLOSE)


def test_a_weighted_maximum_needs_distinct_edges():
    edge_index = directed_graph()
    with pytest.raises(ValueError, match="aggregate: edge_index must be without parallel edges"):
        aggregate(torch.randn(NODES, WIDTH), edge_index, weights_of(edge_index), reduce="max")


def test_two_sets_of_nodes():
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    x = torch.randn(20, WIDTH)
    found = aggregate((x, None), edge_index, size=(20, 9))
    dense = torch.zeros(9, 20).index_put((edge_index[1], edge_index[0]), torch.ones(60), True)
    torch.testing.assert_close(found, dense @ x, **CLOSE)


def test_rejects_features_that_are_no_matrix():
    with pytest.raises(ValueError, match="aggregate: x must be of shape"):
        aggregate(torch.randn(5), torch.zeros(2, 3, dtype=torch.int64), size=(5, 5))
