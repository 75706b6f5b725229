"""What a product of ``bcsr`` is predicted to take: the largest of three rates.

It reaches 0.6 of the dense product's flops, 0.9 of gathers from L2 and 0.75 of DRAM in development
readings on an H200 (docs/explanation/notes/asyncsparse.md).
"""

from __future__ import annotations

import torch

from sparsetile.formats.bcsr import count_blocks
from sparsetile.kernels.bcsr import BLOCK, WARPGROUP_COLUMNS, WIDE
from sparsetile.systems.base import Request

__all__ = ["predict_bcsr"]

_FLOPS, _L2, _DRAM = 0.6, 0.9, 0.75


def predict_bcsr(request: Request) -> float:
    """Return the seconds of one product: Tensor Cores, L2 into shared memory, or DRAM."""
    csr, item, n, ceilings = request.csr, request.dtype.itemsize, request.n, request.machine
    rows, cols = csr.shape
    blocks = count_blocks(csr, BLOCK, request.permutation.perm)
    cells = blocks * BLOCK**2
    columns = -(-n // WARPGROUP_COLUMNS) * WARPGROUP_COLUMNS  # multiplied, whatever B has
    tensor = 2.0 * cells * columns / (_FLOPS * ceilings.dense_flops * 4 / item)
    copied = item * (blocks * BLOCK * n + cells * WIDE.slabs(n))
    once = item * (cells + n * (min(cols, blocks * BLOCK) + rows))
    seconds = max(tensor, copied / (_L2 * ceilings.l2_gather), once / (_DRAM * ceilings.dram))
    if request.dtype is torch.float32:  # B is rounded and transposed first
        seconds += ceilings.launch + 2 * item * cols * n / ceilings.dram
    if csr.nnz < cells:  # a second kernel asks whether C needs repair
        seconds += ceilings.launch
    return ceilings.launch + seconds
