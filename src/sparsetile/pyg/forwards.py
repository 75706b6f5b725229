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
from sparsetile.nn.fresh import GROUPED_ON
from sparsetile.pyg import matrix, reasons
from sparsetile.pyg.matrix import REDUCES, refusal
from sparsetile.pyg.propagation import HOOKS
from sparsetile.pyg.reporting import count
from sparsetile.pyg.wrapping import take_place

__all__ = ["LAYERS", "new_forward"]

# Numbers of edges × channels of a head below which a TransformerConv with edges' features is left
# to PyG on a GPU: ours takes the host 2.8 ms a step whatever the size (H200, 8 heads: PyG 1.9 ms at
# 89,000 edges × 8 channels, 2.6 at 89,000 × 32; 4.9 at 186,000 × 32, where ours takes 3.8).
LEAST_BY_HEAD = 3_500_000
# Layers that need no plan of a GPU's edges, unless edges have features or attention is dropped.
_WITHOUT_PLAN = ("GATConv", "GATv2Conv", "TransformerConv")
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
    derived = f"a class derived from {kind.__name__}"

    def forward(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
        if active():
            own = type(self) is kind
            found = _computed(self, signature, arguments, named) if own else derived
            name = f"{type(self).__name__}.forward"
            if not isinstance(found, str):
                count(name)
                return found[0]
            count(name, found)
        return original(self, *arguments, **named)

    return take_place(original, forward)


def _computed(
    layer: Any, signature: inspect.Signature, arguments: Any, named: Any
) -> tuple[Any] | str:
    """Return the result of ``forward``, or why PyG's own must run."""
    if why := reasons.traced() or _disqualified(layer):
        return why
    try:
        given = dict(signature.bind(layer, *arguments, **named).arguments)
    except TypeError as error:
        return reasons.first_sentence(error)
    del given["self"]
    if why := _refusal(layer, given):
        return why
    kind = getattr(ours, type(layer).__name__)
    own = kind.__new__(kind)
    # Parameters, modules and buffers are PyG's own dictionaries.
    vars(own).update(vars(layer))
    vars(own).update(LAYERS[type(layer).__name__](layer), _name=type(layer).__name__)
    try:
        return (own.forward(**given),)
    except (TypeError, ValueError) as error:
        return reasons.first_sentence(error)  # PyG reports what is wrong, or supports it


def _disqualified(layer: Any) -> str:
    """Return why a layer may not compute what its class says, or ""."""
    if layer.explain:
        return reasons.EXPLAINED
    if layer.decomposed_layers > 1:
        return reasons.DECOMPOSED
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCES:
        return reasons.OTHER_REDUCE
    if any(getattr(layer, name, None) for name in (*HOOKS, *_EDGE_HOOKS)):
        return reasons.HOOKED
    if any(name in vars(layer) for name in ("forward", "message", "edge_update")):
        return reasons.REPLACED
    bound = getattr(vars(layer).get("propagate"), "__func__", None)
    if "propagate" in vars(layer) and not _is_generated(bound, type(layer)):
        return reasons.REPLACED
    return "parameters have no shape yet" if any(map(is_lazy, layer.parameters())) else ""


def _is_generated(function: Any, kind: Any) -> bool:
    """Whether PyG generated a ``propagate``, which it binds to layers that were explained."""
    return function is not None and inspect.unwrap(function) is inspect.unwrap(
        kind._jinja_propagate
    )


def _refusal(layer: Any, given: dict[str, Any]) -> str:
    """Return why sparsetile does not compute a call's operands as PyG, or ""."""
    edges = given["edge_index"]
    if kind_of(edges) is Kind.EDGE_INDEX:
        if given.get("return_attention_weights") is not None:
            return "attention weights of an EdgeIndex"
    elif type(edges) is not Tensor or edges.layout is not torch.strided:
        return "the graph is a sparse matrix"
    if edges.dtype not in (torch.int32, torch.int64) or edges.dim() != 2 or edges.shape[0] != 2:
        return reasons.NOT_EDGES
    if why := _other_operands(layer, edges, given):
        return why
    if torch.is_autocast_enabled(edges.device.type):
        return reasons.AUTOCAST
    if given.get("edge_attr") is not None:
        if _ignores_features(layer):
            return "the layer ignores edge_attr without edge_dim"
        if _is_small(layer, edges):
            return "few edges: PyG is faster on a GPU"
    left = edges.device.type in matrix.LEFT_TO_PYG and type(edges) is Tensor
    if left and _needs_no_plan(layer, edges, given):
        return ""
    return reasons.SHORT_LIVED if left and is_short_lived(edges) else ""


def _needs_no_plan(layer: Any, edges: Tensor, given: dict[str, Any]) -> bool:
    """Whether a layer multiplies edges of a GPU that are new in each step as they are."""
    return (
        type(layer).__name__ in _WITHOUT_PLAN
        and edges.device.type == GROUPED_ON
        and layer.edge_dim is None
        and given.get("return_attention_weights") is None
        and not (layer.training and layer.dropout)
    )


def _other_operands(layer: Any, edges: Tensor, given: dict[str, Any]) -> str:
    """Return why the features or weights are not such as a layer here takes, or ""."""
    operands = [each for each in _tensors(given) if each is not edges]
    if any(each.device != edges.device for each in operands):
        return reasons.DEVICES
    dtype = next((each.dtype for each in layer.parameters()), None)
    floats = [each for each in operands if each.is_floating_point()]
    # A number per graph, and numbers of nodes and relations, have other shapes and types.
    for each in floats:
        if each.dim() >= 2 and (why := refusal(each)):
            return why
    if any(each.dtype is not dtype for each in floats):
        return "features and parameters have different types"
    if edges.device.type not in ("cpu", "cuda"):
        return f"edges are on {edges.device.type}"
    if "edge_type" in given and dtype not in (torch.float32, torch.float64):
        return "PyG's result is float32"
    return ""


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
