"""A's tiles in the register layout of an MMA, zeros included, as ``spmm_rstile`` reads them.

A step is sixteen rows of a window by sixteen columns (16-bit types) or by eight (float32): two
tiles of BitTCF with two bitmaps each, or one. It takes 512 bytes, 16 for each lane 4g + t, in the
order of the operand registers of m16n8k16 or m16n8k8:

    16 bit    word i of the lane: rows g + 8 (i % 2), columns 2t and 2t + 1 of tile i / 2
    float32   word i of the lane: row g + 8 (i % 2), column t + 4 (i / 2)

Bitmaps (formats/bittcf.py) mark the cells that are entries of A. Cells are numbered bitmap by
bitmap, 64 each, for every type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.formats.bittcf import BitTCF

__all__ = ["STEP_BYTES", "entry_cells", "fragment_elements", "fragment_places", "step_tiles"]

STEP_BYTES = 512
_CELLS = 64  # of a bitmap


def step_tiles(itemsize: int) -> int:
    """Tiles of eight columns that one step takes."""
    return 2 if itemsize == 2 else 1


def entry_cells(tiles: BitTCF) -> Tensor:
    """Return the cell of each packed value of stacked tiles, int32, or int64 if there are many.

    Values are in bit order, so these are the numbers of the set bits.
    """
    octets = tiles.tc_local_bit.view(torch.uint8).unsqueeze(1)
    bit = torch.arange(8, dtype=torch.uint8, device=octets.device)
    found = torch.nonzero((octets >> bit & 1).reshape(-1)).squeeze(1)
    fits = tiles.tc_local_bit.numel() * _CELLS < 2**31
    return found.to(torch.int32) if fits else found


def fragment_elements(tiles: int, itemsize: int) -> int:
    """Elements of the fragments of ``tiles`` stacked tiles, an even number."""
    return tiles // step_tiles(itemsize) * (STEP_BYTES // itemsize)


def fragment_places(cells: Tensor, itemsize: int) -> Tensor:
    """Return the place of each cell among the fragments' elements, int64."""
    cells = cells.to(torch.int64)
    part, row, column = cells >> 6, (cells >> 3) & 7, cells & 7
    tile, half = part >> 1, part & 1
    if itemsize == 2:
        word = half + 2 * (tile & 1)
        return (tile >> 1) * 256 + (4 * row + (column >> 1)) * 8 + word * 2 + (column & 1)
    word = half + 2 * (column >> 2)
    return tile * 128 + (4 * row + (column & 3)) * 4 + word
