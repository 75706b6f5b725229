"""Arguments that several layers share: checked in one place, with one error each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error

__all__ = [
    "channels", "check_input", "check_weight", "checked_keep", "features", "flow_name", "glorot",
    "refuse_others", "reset", "sum_only", "width_pair",
]  # fmt: skip


def flow_name(layer: str, flow: object) -> str:
    """Return the direction in which messages flow along ``edge_index``, or raise."""
    return one_of(layer, "flow", flow, ("source_to_target", "target_to_source"))


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


def channels(layer: str, argument: str, value: object, lazy: bool = False) -> int:
    """Return a positive number of channels, or -1, that of the first input, if ``lazy``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(layer, argument, "a whole number", repr(value), "Give the width of x")
    if value < 1 and not (lazy and value == -1):
        raise value_error(
            layer, argument, "at least 1" + lazy * ", or -1", value,
            "Give the width itself" + lazy * ", or -1 for that of the first input",
        )  # fmt: skip
    return value


def width_pair(layer: str, value: object, lazy: bool = True) -> tuple[int, int]:
    """Return the widths of sources and targets: of a pair, or twice the same."""
    pair = value if isinstance(value, (tuple, list)) else (value,) * 2
    first, second = (channels(layer, "in_channels", width, lazy) for width in pair)
    return first, second


def features(layer: str, argument: str, x: object, width: int) -> Tensor:
    """Return ``x`` if it is a float tensor [..., nodes, width]; -1 is any width."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise type_error(layer, argument, "a float tensor", got, "Convert it with .float()")
    if x.dim() < 2 or width not in (-1, x.shape[-1]):
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


def reset(module: nn.Module) -> None:
    """Draw a module's weights again: by its own function, or by those of its parts."""
    own = getattr(module, "reset_parameters", None)
    if own is not None:
        own()
        return
    for part in module.children():
        reset(part)


def checked_keep(keep: Any, shape: tuple[int, int], block: int) -> Tensor:
    """Return which blocks of a weight of this shape are kept, or raise."""
    if not isinstance(keep, Tensor):
        raise type_error(
            "SparseLinear", "keep", "a tensor of True and False", type(keep).__name__,
            "Call SparseLinear.from_linear to prune a layer",
        )  # fmt: skip
    grid = (-(-shape[0] // block), -(-shape[1] // block))
    if keep.shape != grid:
        raise value_error(
            "SparseLinear", "keep", f"of shape {grid}, one for each block of {block}",
            tuple(keep.shape), "Pass the blocks to keep",
        )  # fmt: skip
    return keep.bool()


def check_weight(name: str, weight: Any) -> None:
    """Raise if this is not a dense weight of 16 bits or more."""
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.layout != torch.strided:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise type_error(
            name, "weight", "a dense tensor [out_features, in_features]", got,
            "Pass layer.weight",
        )  # fmt: skip
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise type_error(
            name, "weight", "float16, bfloat16, float32 or float64", weight.dtype,
            "Convert it first; for FP8, call quantize_() on the layer",
        )  # fmt: skip


def check_input(x: Any, weight: Tensor, in_features: int, layer: str = "SparseLinear") -> None:
    """Raise for an x that does not fit the weights as they are multiplied."""
    if not isinstance(x, Tensor):
        raise type_error(layer, "x", "a torch tensor", type(x).__name__, "Convert it first")
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise value_error(
            layer, "x", f"of shape [..., {in_features}]", tuple(x.shape),
            "The last dimension is in_features of the layer",
        )  # fmt: skip
    if x.device != weight.device:
        raise value_error(
            layer, "x", f"on {weight.device} like the weight", x.device,
            "Move one of them with .to(device)",
        )  # fmt: skip
    if x.dtype != weight.dtype:
        raise type_error(
            layer, "x", f"{weight.dtype} like the weight", x.dtype,
            f"Call x.to({weight.dtype}), or use torch.autocast",
        )  # fmt: skip
