"""``forward`` of PyG's layers that are more than a product: by the layer of the same name here.

PyG has stored tensors of edges × features before such a layer calls ``propagate``, so that its
whole ``forward`` is replaced. The layer here works on the parameters and modules of PyG's object,
which stays as it is. Calls that it does not support run in PyG, whose errors the user then sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsetile import nn as ours
from sparsetile.core.checks import reduce_name
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.nn.cache import is_short_lived
from sparsetile.pyg import matrix
from sparsetile.pyg.matrix import REDUCES, takes
from sparsetile.pyg.propagation import HOOKS
from sparsetile.pyg.wrapping import take_place

__all__ = ["LAYERS", "new_forward"]

# Numbers of edges × channels of a head below which a TransformerConv with edges' features is left
# to PyG on a GPU: a head's products take the host 1.25 ms a step, PyG's passes 0.095 ns a number
# (H200, 8 × 32, 200,000 and 1 M edges: 10.0 and 15.0 ms, PyG 4.9 and 23.0).
LEAST_BY_HEAD = 13_000_000
_EDGE_HOOKS = ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")


def _attention(layer: Any, sources: Any, targets: Any) -> dict[str, Any]:
    return {"_widths": (sources.weight.shape[1], targets.weight.shape[1])}


def _of_gat(layer: Any) -> dict[str, Any]:
    if layer.lin is not None:
        return _attention(layer, layer.lin, layer.lin)
    return _attention(layer, layer.lin_src, layer.lin_dst)


def _of_rgcn(layer: Any) -> dict[str, Any]:
    given = layer.in_channels
    pair = (given, given) if isinstance(given, int) else tuple(given)
    return {"_widths": pair, "aggr": reduce_name("RGCNConv", layer.aggr)}


# Name -> what the layer here has beside the attributes of PyG's.
LAYERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ChebConv": lambda layer: {"in_channels": layer.lins[0].weight.shape[1]},
    "FastRGCNConv": _of_rgcn,
    "GATConv": _of_gat,
    "GATv2Conv": lambda layer: _attention(layer, layer.lin_l, layer.lin_r),
    "GINEConv": lambda layer: {
        "edge_dim": None if layer.lin is None else layer.lin.weight.shape[1]
    },
    "RGCNConv": _of_rgcn,
    "TransformerConv": lambda layer: {
        **_attention(layer, layer.lin_key, layer.lin_query),
        "add_self_loops": False,
    },
}


def new_forward(
    original: Callable[..., Any], kind: type, active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return the replacement of the ``forward`` of one of :data:`LAYERS`."""
    signature = inspect.signature(original)

    def forward(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
        if type(self) is kind and active() and not torch.compiler.is_compiling():
            found = _computed(self, signature, arguments, named)
            if found is not None:
                return found[0]
        return original(self, *arguments, **named)

    return take_place(original, forward)


def _computed(
    layer: Any, signature: inspect.Signature, arguments: Any, named: Any
) -> tuple[Any] | None:
    """Return the result of ``forward``, or None if PyG's own must run."""
    try:
        given = dict(signature.bind(layer, *arguments, **named).arguments)
    except TypeError:
        return None
    del given["self"]
    if not _qualifies(layer) or not _takes_call(layer, given):
        return None
    kind = getattr(ours, type(layer).__name__)
    own = kind.__new__(kind)
    # Parameters, modules and buffers are PyG's own dictionaries.
    vars(own).update(vars(layer))
    vars(own).update(LAYERS[type(layer).__name__](layer), _name=type(layer).__name__)
    try:
        return (own.forward(**given),)
    except (TypeError, ValueError):
        return None  # PyG reports what is wrong, or supports it


def _qualifies(layer: Any) -> bool:
    """Whether a layer computes what its class says."""
    if torch.jit.is_tracing() or layer.explain or layer.decomposed_layers > 1:
        return False
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCES:
        return False
    if any(getattr(layer, name, None) for name in (*HOOKS, *_EDGE_HOOKS)):
        return False
    if any(name in vars(layer) for name in ("forward", "message", "edge_update", "propagate")):
        return False
    return not any(is_lazy(each) for each in layer.parameters())


def _takes_call(layer: Any, given: dict[str, Any]) -> bool:
    """Whether the operands are tensors of one type and device, and the graph is given by edges."""
    edges = given["edge_index"]
    if kind_of(edges) is Kind.EDGE_INDEX:
        if given.get("return_attention_weights") is not None:
            return False
    elif type(edges) is not Tensor or edges.layout is not torch.strided:
        return False
    if edges.dtype not in (torch.int32, torch.int64) or edges.dim() != 2 or edges.shape[0] != 2:
        return False
    dtype = next((each.dtype for each in layer.parameters()), None)
    operands = [each for each in _tensors(given) if each is not edges]
    floats = [each for each in operands if each.is_floating_point()]
    if any(each.device != edges.device for each in operands):
        return False
    # A number per graph, and numbers of nodes and relations, have other shapes and types.
    wide = [each for each in floats if each.dim() >= 2]
    if not all(takes(each) for each in wide) or any(each.dtype is not dtype for each in floats):
        return False
    if torch.is_autocast_enabled(edges.device.type) or edges.device.type not in ("cpu", "cuda"):
        return False
    if "edge_type" in given and dtype not in (torch.float32, torch.float64):
        return False  # PyG's result is float32
    if given.get("edge_attr") is not None and (_ignores_features(layer) or _is_small(layer, edges)):
        return False
    left = edges.device.type in matrix.LEFT_TO_PYG and type(edges) is Tensor
    return not (left and is_short_lived(edges))


def _is_small(layer: Any, edges: Tensor) -> bool:
    """Whether PyG's operations end sooner on a GPU: of a TransformerConv with edges' features."""
    by_head = type(layer).__name__ == "TransformerConv" and edges.is_cuda
    return by_head and edges.shape[1] * layer.out_channels < LEAST_BY_HEAD


def _ignores_features(layer: Any) -> bool:
    """Whether a layer drops edges' features without a word."""
    return hasattr(layer, "heads") and layer.lin_edge is None


def _tensors(given: dict[str, Any]) -> Iterator[Tensor]:
    for each in given.values():
        for part in each if isinstance(each, (tuple, list)) else (each,):
            if isinstance(part, Tensor):
                yield part
