"""What a product of ``dense`` is predicted to take.

The larger of flops and bytes at 0.55 of both ceilings: what cuBLAS reached of them in development
readings on an H200, the repair's look at C included. C of 16-bit products is first made in float32
on a GPU, then rounded in a pass of its own.
"""

from __future__ import annotations

import torch

from sparsetile.systems.base import Request

__all__ = ["predict_dense"]

_SHARE = 0.55
# Plain FP32 and FP64 units have about 50 TFLOP/s where TF32 has 390.
_PLAIN_UNITS = 0.13
# Of an element of C that is stored in float32, read again and rounded, beside its 16 bits.
_ROUNDING_BYTES = 8


def predict_dense(request: Request) -> float:
    """Return the seconds of one product."""
    rows, cols = request.csr.shape
    item, n, ceilings = request.dtype.itemsize, request.n, request.machine
    exact = request.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    speedup = 4 / item
    if request.device.type == "cuda" and (exact or request.dtype is torch.float64):
        speedup = _PLAIN_UNITS
    flops = 2.0 * rows * cols * n / (ceilings.dense_flops * speedup)
    moved = item * (rows * cols + n * (cols + rows)) / ceilings.dram
    rounding = 0.0
    if request.device.type == "cuda" and item == 2:
        rounding = ceilings.launch + _ROUNDING_BYTES * rows * n / ceilings.dram
    return (ceilings.launch + max(flops, moved) + rounding) / _SHARE
