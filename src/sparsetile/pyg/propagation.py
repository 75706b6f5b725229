"""``MessagePassing.propagate`` of an ``edge_index`` without messages of size edges × features.

A layer qualifies if its messages are neighbours, or neighbours times one weight per edge, and its
aggregation is a sum, mean, max or min. Such a layer either has the default ``message`` and
``aggregate``, or a ``message_and_aggregate`` for sparse matrices, which gets
:class:`sparsetile.pyg.matrix.Edges` here. Everything else runs in PyG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.pyg import reasons
from sparsetile.pyg.matrix import REDUCES, Edges, refusal
from sparsetile.pyg.reporting import count
from sparsetile.pyg.wrapping import take_place

__all__ = ["HOOKS", "new_propagate"]

HOOKS = tuple(
    f"_{function}_forward{when}_hooks"
    for function in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("_pre", "")
)


def new_propagate(
    original: Callable[..., Any], base: type, active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return the replacement of a layer class's ``propagate``; ``base`` is ``MessagePassing``.

    ``active``: whether the patch is on. Copies of the function that PyG keeps do nothing once it is
    off.
    """

    def propagate(
        original: Callable[..., Any], self: Any, edge_index: Any, *arguments: Any, **given: Any
    ) -> Any:
        if active():
            found = reasons.POSITIONAL if arguments else _fused(self, base, edge_index, given)
            name = f"{type(self).__name__}.propagate"
            if not isinstance(found, str):
                count(name)
                return found[0]
            count(name, found)
        return original(self, edge_index, *arguments, **given)

    return take_place(original, propagate)


def _fused(layer: Any, base: Any, edge_index: Any, given: dict[str, Any]) -> tuple[Any] | str:
    """Return the result of ``propagate``, or why PyG's own must run."""
    if why := reasons.traced() or _disqualified(layer, base):
        return why
    inputs = dict(given)
    size, weight = inputs.pop("size", None), inputs.get("edge_weight")
    wanted = set(layer.inspector.get_param_names("message"))
    if "x_j" not in wanted or wanted - {"x_j", "edge_weight"}:
        return reasons.MESSAGES
    if "edge_weight" not in wanted:
        weight = None
    x = inputs.get("x")
    found = _sizes(layer, x, edge_index, size)
    if isinstance(found, str):
        return found
    sources, sizes = found
    if weight is not None:
        if why := refusal(sources, weight):
            return why
        if weight.layout is not torch.strided or weight.shape != edge_index.shape[1:]:
            return reasons.WEIGHT_SHAPE
    update = layer.inspector.get_param_names("update")
    if any(name not in inputs for name in update):
        return reasons.ARGUMENTS
    fuses = type(layer).message_and_aggregate is not base.message_and_aggregate
    names = layer.inspector.get_param_names("message_and_aggregate") if fuses else []
    if any(name not in inputs for name in names):
        return reasons.ARGUMENTS
    adjacency = Edges.read("propagate", edge_index, weight, sizes, sources, layer.aggr, layer.flow)
    if isinstance(adjacency, str):
        return adjacency
    if fuses:
        out = layer.message_and_aggregate(adjacency, **{name: inputs[name] for name in names})
    else:
        out = adjacency.multiply(sources)
    return (layer.update(out, **{name: inputs[name] for name in update}),)


def _disqualified(layer: Any, base: Any) -> str:
    """Return why a product cannot compute the layer's messages and aggregation, or ""."""
    if not isinstance(layer.aggr, str) or layer.aggr not in REDUCES:
        return reasons.OTHER_REDUCE
    if layer.explain:
        return reasons.EXPLAINED
    kind = type(layer)
    if kind.aggregate is not base.aggregate:
        return "the layer has an aggregate of its own"
    if layer.decomposed_layers > 1:
        return reasons.DECOMPOSED
    if "message" in vars(layer):
        return reasons.REPLACED
    if any(getattr(layer, name, None) for name in HOOKS):
        return reasons.HOOKED
    # A message of its own is known to be a product only if the layer says how to fuse it.
    if layer.fuse or (
        kind.message is base.message and kind.message_and_aggregate is base.message_and_aggregate
    ):
        return ""
    fuses = kind.message_and_aggregate is not base.message_and_aggregate
    return "fuse is off" if fuses else reasons.MESSAGES


def _sizes(layer: Any, x: Any, edge_index: Any, size: Any) -> tuple[Tensor, tuple[int, int]] | str:
    """Return the features of the sources, and how many sources and targets there are.

    If PyG must compute, return why.
    """
    pair = tuple(x) if isinstance(x, (tuple, list)) else (x, x)
    forward = layer.flow == "source_to_target"
    if len(pair) != 2:
        return "x is not a tensor or a pair"
    if why := refusal(pair[0]):
        return why
    if pair[1] is not None and not (isinstance(pair[1], Tensor) and pair[1].dim() >= 2):
        return "features of the targets are not one row for each node"
    # Of a pair PyG sends the first, whatever the flow. With target_to_source that makes sense only
    # if both have the same nodes.
    if not forward and (pair[1] is None or pair[1].shape[-2] != pair[0].shape[-2]):
        return "two sets of nodes with flow target_to_source"
    sources = pair[0]
    if layer.node_dim != -2 and (layer.node_dim != 0 or sources.dim() != 2):
        return "node_dim is not that of rows"
    if kind_of(edge_index) is Kind.EDGE_INDEX:
        known = list(edge_index.sparse_size())
    elif type(edge_index) is Tensor and edge_index.layout is torch.strided:
        known = [None, None] if size is None else list(size)
    else:
        return reasons.MATRIX
    if edge_index.dtype not in (torch.int32, torch.int64):
        return reasons.NOT_EDGES
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return reasons.NOT_EDGES
    if edge_index.device != sources.device:
        return reasons.DEVICES
    # Dimension j is that of the sources, i that of the targets. PyG reports mismatches.
    j, i = (0, 1) if forward else (1, 0)
    counts: dict[int, int] = {j: sources.shape[-2]}
    if isinstance(x, (tuple, list)) and pair[1] is not None:
        counts[i] = pair[1].shape[-2]
    for dim, number in counts.items():
        if known[dim] is None:
            known[dim] = number
        elif known[dim] != number:
            return reasons.SIZES
    targets = known[i] if known[i] is not None else known[j]
    return sources, (known[j], targets)
