"""Arguments of a SparseLinear: checked in one place, with one error each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error

__all__ = ["check_input", "check_weight", "checked_keep"]


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


def check_input(x: Any, weight: Tensor, in_features: int) -> None:
    """Raise for an x that does not fit the weights as they are multiplied."""
    if not isinstance(x, Tensor):
        raise type_error(
            "SparseLinear", "x", "a torch tensor", type(x).__name__, "Convert it first"
        )
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise value_error(
            "SparseLinear", "x", f"of shape [..., {in_features}]", tuple(x.shape),
            "The last dimension is in_features of the layer",
        )  # fmt: skip
    if x.device != weight.device:
        raise value_error(
            "SparseLinear", "x", f"on {weight.device} like the weight", x.device,
            "Move one of them with .to(device)",
        )  # fmt: skip
    if x.dtype != weight.dtype:
        raise type_error(
            "SparseLinear", "x", f"{weight.dtype} like the weight", x.dtype,
            f"Call x.to({weight.dtype}), or use torch.autocast",
        )  # fmt: skip
