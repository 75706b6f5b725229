"""The predicted time of a product of ``bcsr``: the largest of three rates and one chain.

It reaches 0.6 of the dense product's flops, 0.9 of gathers from L2 and 0.75 of DRAM in development
readings on an H200 (docs/explanation/notes/asyncsparse.md). One thread block processes a row of
blocks, block after block: if one row has all of them, that chain is the product (nw04, whose 36
rows are one row of 1,367 blocks, takes 358 us in float16 at N = 128). Blocks that are not full are
slower than those rates: the repair reads C again, and few blocks per row do not fill the pipeline
(1.2 to 2.1 times on twelve matrices at N = 512).
"""

from __future__ import annotations

import torch

from sparsetile.engines.request import Request
from sparsetile.formats.bcsr import count_row_blocks
from sparsetile.kernels.bcsr import BLOCK, WARPGROUP_COLUMNS, WIDE

__all__ = ["predict_bcsr"]

_FLOPS, _L2, _DRAM = 0.6, 0.9, 0.75
# Seconds of a block in the chain of its row, by bytes of an element (8 bits: as 16).
_CHAIN = {4: 7e-7, 2: 2.7e-7}
_SPARSE_BLOCKS = 1.5


def predict_bcsr(request: Request) -> float:
    """Return the seconds of one product: Tensor Cores, L2, DRAM, or the longest row of blocks."""
    csr, item, n, ceilings = request.csr, request.dtype.itemsize, request.n, request.machine
    rows, cols = csr.shape
    blocks, longest = count_row_blocks(csr, BLOCK, request.permutation.perm)
    cells = blocks * BLOCK**2
    columns = -(-n // WARPGROUP_COLUMNS) * WARPGROUP_COLUMNS  # the tile's width, whatever B's
    tensor = 2.0 * cells * columns / (_FLOPS * ceilings.dense_flops * 4 / item)
    copied = item * (blocks * BLOCK * n + cells * WIDE.slabs(n))
    once = item * (cells + n * (min(cols, blocks * BLOCK) + rows))
    seconds = max(tensor, copied / (_L2 * ceilings.l2_gather), once / (_DRAM * ceilings.dram))
    if csr.nnz < cells:
        seconds *= _SPARSE_BLOCKS
    seconds = max(seconds, longest * _CHAIN[4 if item >= 4 else 2])
    if request.dtype is torch.float32:  # B is rounded and transposed first
        seconds += ceilings.launch + 2 * item * cols * n / ceilings.dram
    if csr.nnz < cells:  # a second kernel checks whether C needs repair
        seconds += ceilings.launch
    return ceilings.launch + seconds
