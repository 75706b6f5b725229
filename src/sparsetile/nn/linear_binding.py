"""Prepared launches for inference of a SparseLinear on a GPU, kept between calls.

A bound layer is valid while the module has the same tensors, at the same addresses, unchanged. Each
call checks that with a few cheap comparisons. The kernels read weights and bias in place: what is
written into them is read by the next call.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsetile.core.streams import settle
from sparsetile.launch.epilogue import readable_bias
from sparsetile.launch.geometry import ACCESS_BYTES
from sparsetile.layers import block_linear as operators
from sparsetile.layers.block_layer import BoundLayer
from sparsetile.nn.dense_copy import BUILDING, keeps_dense
from sparsetile.plan.modes import outside_modes

# A ``SparseLinear``, whose file imports this one.
Layer: TypeAlias = Any

__all__ = ["Bound", "rebound", "version_of"]

_PLAIN_TYPES = (Tensor, nn.Parameter)  # subclasses may store their data elsewhere
_FUSED_TYPES = (torch.bfloat16, torch.float16)


def version_of(tensor: Tensor) -> int:
    """torch's version counter; -1 for tensors of inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _place(module: Layer, weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    """The module's tensors and their addresses, and its settings."""
    buffers = module._buffers
    row_ptr, col_idx = buffers["block_row_ptr"], buffers["block_col_idx"]
    exponent = buffers["weight_exponent"]
    return (
        id(weight), weight.data_ptr(), id(bias), None if bias is None else bias.data_ptr(),
        id(row_ptr), row_ptr.data_ptr(), id(col_idx), col_idx.data_ptr(), id(exponent),
        None if exponent is None else exponent.data_ptr(), module.activation, module.prefer,
    )  # fmt: skip


class Bound:
    """A bound layer, and the parameters and buffers that it was made of."""

    def __init__(
        self, layer: BoundLayer, module: Layer, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.layer, self.dtype, self.device = layer, layer.dtype, layer.device
        self.exponent = module.weight_exponent
        self.row_ptr, self.col_idx = module.block_row_ptr, module.block_col_idx
        self._place = _place(module, weight, bias)
        # References, so that neither objects nor addresses are reused. The layer has the lists'.
        held = [each for each in (weight, bias, self.exponent) if each is not None]
        self._memory = [*held, *(each.detach() for each in held)]
        # Tensors of inference mode have no version counter.
        self._counts = not (self.row_ptr.is_inference() or self.col_idx.is_inference())
        self._versions = self._count()

    def _count(self) -> tuple[int, int]:
        """Versions of the two lists: work items were made of them."""
        return version_of(self.row_ptr), version_of(self.col_idx)

    def holds(self, module: Layer, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the module has the same tensors, at the same addresses, with the same lists."""
        if _place(module, weight, bias) != self._place:
            return False
        if not self._counts:
            return self._count() == self._versions
        rows, columns = self._versions
        return self.row_ptr._version == rows and self.col_idx._version == columns


@outside_modes
def _bind(module: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Bound | None:
    """Bind the layer for inference on a GPU; None if weights or x are not plain tensors."""
    exponent = module._buffers["weight_exponent"]
    if not (
        on_gpu(x)
        and type(weight) in _PLAIN_TYPES
        and (bias is None or type(bias) in _PLAIN_TYPES)
        and x.device == weight.device
        and x.dtype in _FUSED_TYPES
        and (x.dtype is weight.dtype or exponent is not None)
        and weight.is_contiguous()
        and weight.data_ptr() % ACCESS_BYTES == 0
        and not weight.is_neg()
        and (bias is None or readable_bias(bias))
    ):
        return None
    module._ready()
    flat = module._flat
    assert flat is not None
    layer = BoundLayer(
        operators.block_layer(module._recipe), (flat[0], flat[1], flat[2]), weight.detach(),
        None if bias is None else bias.detach(), module.activation, x.dtype, exponent,
        dense=keeps_dense(module),
    )  # fmt: skip
    bound = Bound(layer, module, weight, bias)
    if torch.cuda.is_current_stream_capturing():  # replays fill what a graph makes
        module._captured.append(bound)
    else:
        settle(bound.device)
        module._bound = bound
    return bound


def rebound(module: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Bound | None:
    """Bind again: at the first call, or if a parameter, a buffer or the type of x has changed."""
    with BUILDING:
        bound = module._bound
        if (
            bound is not None
            and x.dtype is bound.dtype
            and x.device == bound.device
            and bound.holds(module, weight, bias)
        ):  # another thread has bound it
            return bound
        return _bind(module, x, weight, bias)
