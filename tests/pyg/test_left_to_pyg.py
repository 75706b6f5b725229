"""Calls that sparsetile leaves to PyG never start a layer of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile.pyg
from sparsetile import nn as ours
from sparsetile.pyg import forwards, matrix
from tests.host import OnGPU
from tests.nn.cases import NODES, WIDTH, directed_graph, pyg

EDGES = directed_graph()
FEATURES = torch.randn(EDGES.shape[1], 3)


def hooked(register: str) -> Any:
    layer = pyg.GATv2Conv(WIDTH, 5)
    getattr(layer, register)(lambda *given: None)
    return layer


def changed(**attributes: Any) -> Any:
    layer = pyg.GATv2Conv(WIDTH, 5)
    vars(layer).update(attributes)
    return layer


def own(name: str) -> Any:
    layer = pyg.GATv2Conv(WIDTH, 5)
    return vars(layer).update({name: getattr(layer, name)}) or layer


def plain() -> Any:
    return pyg.GATv2Conv(WIDTH, 5)


LEFT: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "decomposed": (lambda: pyg.GATv2Conv(WIDTH, 6, decomposed_layers=2), (EDGES,)),
    "explained": (lambda: changed(explain=True, _explain=True), (EDGES,)),
    "hooked": (lambda: hooked("register_propagate_forward_pre_hook"), (EDGES,)),
    "hooked edges": (lambda: hooked("register_edge_update_forward_hook"), (EDGES,)),
    "a message of its own": (lambda: own("message"), (EDGES,)),
    "another sum": (lambda: pyg.GATv2Conv(WIDTH, 5, aggr="median"), (EDGES,)),
    "features that it ignores": (lambda: pyg.GATConv(WIDTH, 5), (EDGES, FEATURES)),
    "edges of 16 bits": (plain, (EDGES.short(),)),
    "three rows of edges": (plain, (torch.cat([EDGES, EDGES[:1]]),)),
    "a vector of edges": (plain, (EDGES.flatten(),)),
    "a sparse tensor": (plain, (torch.eye(NODES).to_sparse_csr(),)),
    "features of another type": (
        lambda: pyg.GATv2Conv(WIDTH, 5, edge_dim=3),
        (EDGES, FEATURES.double()),
    ),
}


def outcome(layer: Any, *given: Any) -> Any:
    """The result of a layer, or the type of its error."""
    torch.default_generator.manual_seed(0)
    try:
        return layer(*given)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", LEFT)
def test_a_call_that_is_left_to_pyg_starts_no_layer_here(name, calls_of):
    make, given = LEFT[name]
    layer, x = make(), torch.randn(NODES, WIDTH)
    expected = outcome(layer, x, *given)
    started = calls_of(getattr(ours, type(layer).__name__), "forward")
    with sparsetile.pyg.patch():
        found = outcome(layer, x, *given)
    assert not started
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found is expected


def test_small_graphs_with_features_are_left_to_pyg_on_a_gpu(monkeypatch, constants):
    """A TransformerConv alone is: its products run head by head."""
    for module in (forwards, matrix):
        monkeypatch.setattr(module, "Tensor", OnGPU)
    started: list[str] = []
    for kind in (ours.TransformerConv, ours.GATv2Conv):
        name = kind.__name__
        monkeypatch.setattr(kind, "forward", lambda *_, name=name, **__: started.append(name))
    x, edges, features = (
        each.as_subclass(OnGPU) for each in (torch.randn(NODES, WIDTH), EDGES, FEATURES)
    )
    for least, expected in (
        (EDGES.shape[1] * 5, ["TransformerConv", "GATv2Conv"]),
        (EDGES.shape[1] * 5 + 1, ["GATv2Conv"]),
    ):
        constants(forwards, LEAST_BY_HEAD=least)
        for layer in (
            pyg.TransformerConv(WIDTH, 5, 2, edge_dim=3),
            pyg.GATv2Conv(WIDTH, 5, 2, edge_dim=3),
        ):
            with sparsetile.pyg.patch(), contextlib.suppress(Exception):
                layer(x, edges, features)
        assert started == expected
        started.clear()
