"""Layers of width -1 get the width of their first input, and draw the numbers that PyG draws."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsetile import nn as ours
from tests.nn.cases import NODES, WIDTH, directed_graph, gin_map, pyg

EDGES, EDGE_DIM = directed_graph(), 3
FEATURES = torch.randn(EDGES.shape[1], EDGE_DIM, dtype=torch.float64)
CLOSE = {"rtol": 1e-8, "atol": 1e-8}

# Name, arguments, whether edges have features.
LAZY: list[tuple[str, tuple[Any, ...], dict[str, Any], bool]] = [
    ("GCNConv", (-1, 5), {}, False),
    ("SAGEConv", (-1, 5), {}, False),
    ("SAGEConv", ((-1, -1), 5, "max"), {"bias": False}, False),
    ("SAGEConv", ((-1, WIDTH), 5), {"root_weight": False}, False),
    ("SAGEConv", ((WIDTH, -1), 5), {"project": True}, False),
    ("GraphConv", (-1, 5), {}, False),
    ("GraphConv", ((-1, -1), 12), {}, False),
    ("ChebConv", (-1, 5, 2), {}, False),
    ("GATConv", (-1, 5), {"heads": 2, "edge_dim": -1, "residual": True}, True),
    ("GATConv", ((-1, -1), 5), {"heads": 2, "concat": False}, False),
    ("GATConv", (WIDTH, 5), {"edge_dim": -1}, True),
    ("GATv2Conv", (-1, 5), {"heads": 2, "edge_dim": -1, "residual": True}, True),
    ("GATv2Conv", ((-1, -1), 5), {"heads": 2, "share_weights": True}, False),
    ("TransformerConv", (-1, 5), {"heads": 2, "edge_dim": -1, "beta": True}, True),
    ("TransformerConv", ((-1, -1), 5), {"bias": False, "root_weight": False}, False),
]


def call(layer: Any, featured: bool, x: Any = None, edges: Tensor = EDGES) -> Any:
    """Return the result for features in double precision."""
    x = torch.ones(NODES, WIDTH, dtype=torch.float64).cumsum(0) / NODES if x is None else x
    return layer(x, edges, *((FEATURES,) if featured else ()))


def assert_same_state(mine: Any, theirs: Any) -> None:
    first, second = mine.state_dict(), theirs.state_dict()
    assert list(first) == list(second)
    for key, value in first.items():
        assert is_lazy(value) == is_lazy(second[key]), key
        if not is_lazy(value):
            assert torch.equal(value, second[key]), key


@pytest.mark.parametrize("name, arguments, options, featured", LAZY)
def test_the_first_call_draws_what_pyg_draws(name, arguments, options, featured):
    results, layers = [], []
    for module in (ours, pyg):
        torch.manual_seed(11)
        layer = copy.deepcopy(getattr(module, name)(*arguments, **options).double())
        assert any(is_lazy(each) for each in layer.parameters())
        layer.reset_parameters()
        results += [call(layer, featured), torch.rand(1)]  # whoever draws next gets the same
        layers.append(layer)
    torch.testing.assert_close(results[0], results[2], **CLOSE)
    assert torch.equal(results[1], results[3])
    assert_same_state(*layers)
    assert not any(isinstance(each, ours.lazy.LazyMap) for each in used(layers[0]))
    for layer in layers:
        torch.manual_seed(3)
        layer.reset_parameters()
    assert_same_state(*layers)


def used(layer: Any) -> list[Any]:
    """Maps of a layer that a call has used; a TransformerConv may have one without."""
    return [each for each in layer.modules() if not is_lazy(getattr(each, "weight", None))]


@pytest.mark.parametrize("name, arguments, options, featured", LAZY)
def test_state_dicts_go_both_ways_before_and_after_the_first_call(
    name, arguments, options, featured
):
    mine, theirs = (getattr(each, name)(*arguments, **options).double() for each in (ours, pyg))
    theirs.load_state_dict(mine.state_dict())  # without weights
    mine.load_state_dict(theirs.state_dict())
    assert any(is_lazy(each) for each in mine.parameters())
    expected = call(theirs.double(), featured)  # PyG forgets the type of a map without a width
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(call(mine, featured), expected, **CLOSE)
    saved = io.BytesIO()
    torch.save(mine.state_dict(), saved)
    saved.seek(0)
    fresh = getattr(ours, name)(*arguments, **options).double()
    fresh.load_state_dict(torch.load(saved, weights_only=False))
    copied = copy.deepcopy(fresh)
    torch.testing.assert_close(call(fresh, featured), expected, **CLOSE)
    torch.testing.assert_close(call(copied, featured), expected, **CLOSE)


def test_edge_features_and_inner_layers_of_gine_and_gin_may_be_lazy():
    for name, more in (("GINEConv", {"edge_dim": -1}), ("GINConv", {})):
        layers = []
        for module in (ours, pyg):
            torch.manual_seed(5)
            layer = getattr(module, name)(gin_map(5), **more).double()
            layers.append(layer)
            call(layer, name == "GINEConv")
        assert_same_state(*layers)
    results = []
    for module in (ours, pyg):
        torch.manual_seed(5)
        results.append(call(module.GINConv(pyg.Linear(-1, 5)).double(), False))
    torch.testing.assert_close(*results, **CLOSE)


def test_cheb_conv_of_more_than_two_polynomials():
    # PyG's layer bypasses the hook that makes the third map.
    layer = ours.ChebConv(-1, 5, 4).double()
    result = call(layer, False)
    other = ours.ChebConv(WIDTH, 5, 4).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(call(other, False), result)


def test_targets_without_features_leave_their_map_without_a_width():
    x = torch.randn(NODES, WIDTH, dtype=torch.float64)
    for name in ("SAGEConv", "GraphConv", "GATConv"):
        pair, results = [], []
        for module in (ours, pyg):
            torch.manual_seed(2)
            pair.append(getattr(module, name)((-1, -1), 5).double())
            results.append(call(pair[-1], False, (x, None)))
        torch.testing.assert_close(*results, **CLOSE)
        assert any(is_lazy(each) for each in pair[0].parameters())
        assert_same_state(*pair)


def test_features_of_another_width_are_refused():
    x = torch.randn(NODES, WIDTH)
    for layer in (ours.GCNConv(-1, 5), ours.SAGEConv(-1, 5), ours.GATv2Conv(-1, 5)):
        layer(x, EDGES).sum().backward()
        with pytest.raises(ValueError, match="8 wide, as the layer's weights are"):
            layer(x[:, :5], EDGES)
    with pytest.raises(ValueError, match="in_channels must be at least 1"):
        ours.RGCNConv(-1, 5, 3)  # as in PyG
    with pytest.raises(ValueError, match="has in_features above 0"):
        ours.GINEConv(pyg.Linear(-1, 5), edge_dim=3)


def test_a_first_call_in_inference_mode_makes_weights_that_train():
    layer, x = ours.GCNConv(-1, 5), torch.randn(NODES, WIDTH)
    with torch.inference_mode():
        layer(x, EDGES)
    layer(x, EDGES).sum().backward()
    assert layer.lin.weight.grad is not None


def test_a_layer_is_traced_once_its_widths_are_known():
    net = ours.SAGEConv(-1, 5)
    x = torch.randn(NODES, WIDTH)
    expected = net(x, EDGES)
    traced = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x, EDGES), expected)
