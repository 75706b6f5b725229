"""Arguments that several layers share: checked in one place, with one error each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error

__all__ = [
    "FLOWS",
    "channels",
    "features",
    "flow_name",
    "glorot",
    "refuse_others",
    "sum_only",
]

FLOWS = ("source_to_target", "target_to_source")


def flow_name(layer: str, flow: object) -> str:
    """Return the direction in which messages flow along ``edge_index``, or raise."""
    return one_of(layer, "flow", flow, FLOWS)


def sum_only(layer: str, aggr: object) -> None:
    """Refuse aggregations other than the sum that the layer is defined with."""
    if aggr not in ("add", "sum"):
        raise value_error(
            layer, "aggr", "'add' or 'sum'", repr(aggr),
            f"Use torch_geometric.nn.{layer} for other aggregations, or SAGEConv for mean and max",
        )  # fmt: skip


def refuse_others(layer: str, others: Mapping[str, Any]) -> None:
    """Raise for arguments of PyG's ``MessagePassing`` that this package does not have."""
    if others.get("node_dim", -2) == -2:
        others = {name: value for name, value in others.items() if name != "node_dim"}
    if others:
        raise type_error(
            layer, "arguments", "those of its signature", ", ".join(sorted(others)),
            f"Omit them, or use torch_geometric.nn.{layer}",
        )  # fmt: skip


def channels(layer: str, argument: str, value: object) -> int:
    """Return a positive number of channels; PyG's -1 (found at the first call) is refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(layer, argument, "a whole number", repr(value), "Give the width of x")
    if value < 1:
        raise value_error(
            layer, argument, "at least 1", value,
            "Give the width itself: it is not derived from the first input",
        )  # fmt: skip
    return value


def features(layer: str, argument: str, x: object, width: int) -> Tensor:
    """Return ``x`` if it is a float tensor [..., nodes, width]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise type_error(layer, argument, "a float tensor", got, "Convert it with .float()")
    if x.dim() < 2 or x.shape[-1] != width:
        raise value_error(
            layer, argument, f"of shape [..., nodes, {width}]", tuple(x.shape),
            "The last dimension is in_channels of the layer",
        )  # fmt: skip
    return x


@torch.no_grad()
def glorot(weight: Tensor) -> None:
    """Fill [..., fan_out, fan_in] uniformly within sqrt(6 / (fan_in + fan_out))."""
    bound = (6.0 / (weight.shape[-2] + weight.shape[-1])) ** 0.5
    nn.init.uniform_(weight, -bound, bound)
