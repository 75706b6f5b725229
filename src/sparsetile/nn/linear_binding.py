"""What inference of a SparseLinear on a GPU keeps between calls.

A bound layer has its launches prepared. It holds as long as the module has the tensors that it was
made of, in the same places, as they were: few and cheap comparisons, in each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsetile.core.epoch import epoch
from sparsetile.plan import block_linear as operators
from sparsetile.plan.dispatch import lasting
from sparsetile.systems.bcsr.layer import BoundLayer
from sparsetile.systems.shared.geometry import ACCESS_BYTES

if TYPE_CHECKING:
    from sparsetile.nn.linear import SparseLinear

__all__ = ["Bound", "rebound", "version_of"]

_PLAIN_TYPES = (Tensor, nn.Parameter)  # subclasses may hold their numbers elsewhere
_FUSED_TYPES = (torch.bfloat16, torch.float16)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class Bound:
    """A bound layer, and the parameters and buffers that it was made of."""

    def __init__(
        self, layer: BoundLayer, module: SparseLinear, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.layer, self.dtype, self.device = layer, layer.dtype, layer.device
        self.weight, self.bias = weight, bias
        self.weight_at = weight.data_ptr()
        self.bias_at = None if bias is None else bias.data_ptr()
        # Held, so that nothing else comes to lie at these addresses.
        self._memory = [each.detach() for each in (weight, bias) if each is not None]
        self.exponent = module.weight_exponent
        self.row_ptr, self.col_idx = module.block_row_ptr, module.block_col_idx
        self.activation, self.prefer = module.activation, module.prefer
        # Tensors of inference mode do not count how often they are written to.
        self._counts = not any(
            each is not None and each.is_inference() for each in (self.row_ptr, self.col_idx, bias)
        )
        self._versions = self._count()
        self._epoch = epoch()

    def _count(self) -> tuple[int, int, int]:
        """Of the lists work items were made, and of the bias a copy; weights are read as they
        lie."""
        bias = 0 if self.bias is None else version_of(self.bias)
        return version_of(self.row_ptr), version_of(self.col_idx), bias

    def _same_epoch(self) -> bool:
        """Whether no optimiser has made a step since: fused ones raise no count of writes."""
        return self.bias is None or self._epoch == epoch()

    def _lies(self, module: SparseLinear, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the module has the same tensors, in the same places."""
        buffers = module._buffers
        return (
            weight is self.weight
            and weight.data_ptr() == self.weight_at
            and bias is self.bias
            and (bias is None or bias.data_ptr() == self.bias_at)
            and buffers["block_row_ptr"] is self.row_ptr
            and buffers["block_col_idx"] is self.col_idx
            and buffers["weight_exponent"] is self.exponent
            and module.activation is self.activation
            and module.prefer is self.prefer
        )

    def holds(self, module: SparseLinear, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the module has the same tensors, in the same places, as they were."""
        if not self._lies(module, weight, bias) or not self._same_epoch():
            return False
        if not self._counts:
            return self._count() == self._versions
        rows, columns, biases = self._versions
        return (
            self.row_ptr._version == rows
            and self.col_idx._version == columns
            and (bias is None or bias._version == biases)
        )

    def renewed(self, module: SparseLinear, weight: Tensor, bias: Tensor | None) -> bool:
        """Read the bias again; False where something else has changed, too."""
        now, when = self._count(), epoch()
        if now[:2] != self._versions[:2] or not self._lies(module, weight, bias):
            return False
        self.layer.renew_bias()
        if not torch.cuda.is_current_stream_capturing():  # a replay does it, and did not yet
            self._versions, self._epoch = now, when
        return True


@lasting
def _bind(module: SparseLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Bound | None:
    """Make what inference on a GPU calls; None where weights or x are not plain ones."""
    exponent = module._buffers["weight_exponent"]
    if not (
        _on_gpu(x)
        and type(weight) in _PLAIN_TYPES
        and (bias is None or type(bias) in _PLAIN_TYPES)
        and x.device == weight.device
        and x.dtype in _FUSED_TYPES
        and (x.dtype is weight.dtype or exponent is not None)
        and weight.is_contiguous()
        and weight.data_ptr() % ACCESS_BYTES == 0
        and not weight.is_neg()
    ):
        return None
    module._ready()
    flat = module._flat
    assert flat is not None
    layer = BoundLayer(
        operators.block_layer(module._recipe), (flat[0], flat[1], flat[2]), weight.detach(),
        bias, module.activation, x.dtype, exponent,
        dense=module.prefer == "speed" and exponent is None,
    )  # fmt: skip
    bound = Bound(layer, module, weight, bias)
    if not torch.cuda.is_current_stream_capturing():  # what a graph makes is filled by replays
        module._bound = bound
    return bound


def rebound(module: SparseLinear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Bound | None:
    """After the first call, and where a parameter, a buffer or the type of x has changed."""
    bound = module._bound
    if (
        bound is not None
        and x.dtype is bound.dtype
        and x.device == bound.device
        and bound.renewed(module, weight, bias)
    ):
        return bound
    return _bind(module, x, weight, bias)
