"""A in square blocks, as the block formats of baselines have it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["BLOCKS", "distinct_blocks", "own_block", "torch_bsr"]

# Block formats take the largest of these whose blocks have no empty cell, else the smallest, which
# is the smallest that Tensor-Core kernels like.
BLOCKS = (64, 32, 16)


def distinct_blocks(csr: CSR, block: int) -> tuple[Tensor, Tensor]:
    """Distinct (block row, block column) keys, sorted, and the place of each entry's own."""
    width = -(-csr.shape[1] // block)
    keys = (csr.row_ids() // block) * width + csr.indices // block
    return torch.unique(keys, return_inverse=True)


def own_block(csr: CSR) -> int:
    """The largest block that A consists of without an empty cell; the smallest where there is none.

    Pruned weights are compared in the blocks in which they were pruned, not in sixteenths of them.
    """
    for block in BLOCKS[:-1]:
        divides = csr.shape[0] % block == csr.shape[1] % block == 0
        full = divides and csr.nnz % block**2 == 0  # worth counting blocks
        if full and distinct_blocks(csr, block)[0].numel() * block**2 == csr.nnz:
            return block
    return BLOCKS[-1]


def torch_bsr(csr: CSR, values: Tensor, block: int) -> Tensor:
    """Return A as a torch BSR tensor; its shape must be divisible by ``block``."""
    keys, place = distinct_blocks(csr, block)
    width = csr.shape[1] // block
    blocks = torch.zeros((keys.numel(), block, block), dtype=values.dtype, device=values.device)
    blocks[place, csr.row_ids() % block, csr.indices.long() % block] = values
    crow = torch.zeros(csr.shape[0] // block + 1, dtype=torch.int32, device=values.device)
    counts = torch.bincount(keys // width, minlength=csr.shape[0] // block)
    crow[1:] = torch.cumsum(counts, 0)
    columns = (keys % width).to(torch.int32)
    return torch.sparse_bsr_tensor(crow, columns, blocks, csr.shape, check_invariants=False)
