"""The predicted time of a product of ``dense``.

On a GPU: a few launches, then the larger of flops and bytes, then passes over C (the repair reads
it; with 16-bit operands it is made in float32 and rounded). Fitted to 142 products of 98 matrices
on an H200 in TF32 and float16, with rows of A and B that are multiples of 16 bytes: on average 13 %
off the measured time, at worst 36 % below. If A's are not, a second product has its last columns.
If rows of B are not aligned, cuBLAS uses slower kernels: about 95 TFLOP/s in both types.
"""

from __future__ import annotations

import torch

from sparsetile.engines.request import Request
from sparsetile.launch.geometry import ACCESS_BYTES

__all__ = ["predict_dense"]

# Launches of a product, in multiples of one launch's time, by bytes of an element: in TF32 the
# shortest product of cuBLAS takes 6.4 us, in 16 bits 3.5 (H200, 2048 x 512).
_LAUNCHES = {4: 2.3, 2: 1.6}
# Share of both ceilings that cuBLAS reaches.
_FLOPS_SHARE, _BYTES_SHARE = 1.05, 0.85
# The same if rows of B are not aligned.
_UNALIGNED_SHARE = 0.24
# A thread block computes a tile of C with this many rows and columns. Few tiles leave SMs idle,
# less so because cuBLAS then splits sums.
_TILE = 128
_FEWEST = 0.7
# Bytes stay below their ceiling if tiles are very few (36 x 87482 times 128 columns: one).
_FEWEST_BYTES, _TILES_FOR_BYTES = 0.7, 16
# Bytes per element that passes over C move.
_PASS_BYTES = 12
# The same for a sum that is written and read once more.
_PART_BYTES = 8
# Plain FP32 and FP64 units reach about 50 TFLOP/s, TF32 390.
_PLAIN_UNITS = 0.13
# Share of both ceilings on a CPU.
_CPU_SHARE = 0.55


def predict_dense(request: Request) -> float:
    """Return the seconds of one product."""
    rows, cols = request.csr.shape
    item, n, ceilings = request.dtype.itemsize, request.n, request.machine
    flops = 2.0 * rows * cols * n / (ceilings.dense_flops * 4 / item)
    moved = item * (rows * cols + n * (cols + rows)) / ceilings.dram
    if request.device.type != "cuda":
        return (ceilings.launch + max(flops, moved)) / _CPU_SHARE
    if request.dtype is torch.float64 or (
        request.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    ):
        flops *= 4 / item / _PLAIN_UNITS
    elif n * item % ACCESS_BYTES:
        flops *= _FLOPS_SHARE * 4 / item / _UNALIGNED_SHARE
        moved *= _BYTES_SHARE / _UNALIGNED_SHARE
    tiles = -(-rows // _TILE) * -(-n // _TILE)
    flops /= _FLOPS_SHARE * min(max(tiles / ceilings.processors, _FEWEST), 1.0)
    moved /= _BYTES_SHARE * min(_FEWEST_BYTES + tiles / _TILES_FOR_BYTES, 1.0)
    passes = _PASS_BYTES * rows * n / ceilings.dram
    if cols * item % ACCESS_BYTES:
        passes += ceilings.launch + _PART_BYTES * rows * n / ceilings.dram
    launches = _LAUNCHES[4 if item >= 4 else 2]
    return launches * ceilings.launch + max(flops, moved) + passes
