"""Models for several types of nodes and edges: PyG's ``to_hetero`` with the layers of this package.

PyG calls a layer for each type of edges if it is a ``MessagePassing``, and any other module as if
it computed numbers of edges. So PyG transforms a copy of the model in which such an object stands
for each layer; then the layers take their places again.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sparsetile.core.errors import describe
from sparsetile.nn.cheb import ChebConv
from sparsetile.nn.gcn import GCNConv
from sparsetile.nn.gin import GINConv
from sparsetile.nn.gine import GINEConv
from sparsetile.nn.heads import HeadsLayer
from sparsetile.nn.rgcn import RGCNConv
from sparsetile.nn.two_maps import TwoMaps

__all__ = ["to_hetero"]

_LAYERS = (ChebConv, GCNConv, GINConv, GINEConv, HeadsLayer, RGCNConv, TwoMaps)


def to_hetero(
    module: nn.Module, metadata: tuple[list[str], list[tuple[str, str, str]]], aggr: str = "sum",
    input_map: dict[str, str] | None = None, debug: bool = False,
) -> Any:  # fmt: skip
    """Return a model with a layer for each type of edges: PyG's ``to_hetero``, which it needs.

    ``torch_geometric.nn.to_hetero`` does not recognise the layers of ``sparsetile.nn``, and its
    result would be wrong. ``torch_geometric.nn.HeteroConv`` takes them as they are.

    Parameters
    ----------
    module : torch.nn.Module
        A model of one type of nodes and edges; not changed. PyG's layers may be among its layers.
    metadata : (list of str, list of (str, str, str))
        Types of nodes and of edges, as of ``HeteroData.metadata()``.
    aggr : {"sum", "mean", "min", "max", "mul"}
        How results of several types of edges are combined.
    input_map, debug
        As in PyG.

    Returns
    -------
    torch.fx.GraphModule
        Takes and returns dictionaries by type.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SAGEConv, to_hetero
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = SAGEConv((-1, -1), 4)
    ...
    ...     def forward(self, x, edge_index):
    ...         return self.conv(x, edge_index).relu()
    >>> types = ["user", "film"], [("user", "rates", "film"), ("film", "of", "user")]
    >>> net = to_hetero(Net(), types)
    >>> x = {"user": torch.randn(3, 8), "film": torch.randn(2, 6)}
    >>> edges = torch.tensor([[0, 1, 2], [1, 0, 1]])
    >>> out = net(x, {types[1][0]: edges, types[1][1]: edges.flip(0)})
    >>> out["film"].shape
    torch.Size([2, 4])
    """
    try:
        from torch_geometric import nn as pyg
    except ModuleNotFoundError as error:
        if error.name != "torch_geometric":
            raise  # PyG is installed, but one of its dependencies is missing
        raise ModuleNotFoundError(
            describe(
                "to_hetero", "torch_geometric", "installed", "no such package",
                "Run pip install torch-geometric",
            ),
            name=error.name,
        ) from None  # fmt: skip

    class Placeholder(pyg.MessagePassing):  # type: ignore[misc]
        """Stands for a layer while PyG transforms the model."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.add_self_loops = getattr(layer, "add_self_loops", False)  # which PyG checks

        def reset_parameters(self) -> None:
            self.layer.reset_parameters()  # type: ignore[operator]

        def __repr__(self) -> str:
            return repr(self.layer)

    module = copy.deepcopy(module)
    placed: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _LAYERS):
                parent._modules[name] = placed.setdefault(child, Placeholder(child))
    found = pyg.to_hetero(module, metadata, aggr, input_map, debug)
    for parent in list(found.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, Placeholder):
                parent._modules[name] = child.layer
    return found
