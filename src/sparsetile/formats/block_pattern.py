"""The kept blocks of a layer's weight: BCSR's lists without entries, and conversions.

A pruned layer keeps whole blocks. So its pattern has a few numbers per block instead of per entry,
and the blocks themselves are its weight:

    row_ptr[i]     first block of block row i                            [block rows + 1]
    col_idx[k]     block column of block k, ascending in a block row     [blocks]

These are ``block_row_ptr`` and ``block_col_idx`` of ``formats/bcsr.py``. Every cell of a kept block
counts, zeros too, so non-finite inputs need no repair. If the block size does not divide the
weight, its last blocks reach past the end. Such cells hold zeros and are never read as inputs nor
stored as results.

Blocks of 128 and more are kept as blocks of 64, which the kernels multiply: ``unit`` is the stored
size, ``block`` the pruned size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error

__all__ = ["UNIT", "BlockPattern", "blocks_of", "dense_of_blocks"]

# Rows and columns of the blocks that kernels multiply; larger ones are split into these.
UNIT = 64


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """The kept blocks of a weight.

    Attributes
    ----------
    row_ptr, col_idx : Tensor of int32 [block rows + 1], [blocks]
    shape : tuple of int
        (rows, columns) of the weight.
    unit : int
        Rows and columns of a stored block.
    """

    row_ptr: Tensor
    col_idx: Tensor
    shape: tuple[int, int]
    unit: int

    @staticmethod
    def unit_of(block: int) -> int:
        """Stored size of blocks that are pruned by ``block``: itself, or 64 if that divides it."""
        return UNIT if block % UNIT == 0 else block

    @classmethod
    def from_mask(cls, keep: Tensor, shape: tuple[int, int], block: int) -> Self:
        """Pattern of the kept blocks.

        Parameters
        ----------
        keep : Tensor of bool [block rows, block columns]
            In blocks of ``block``; the last ones may reach past the end of the weight.
        """
        unit = cls.unit_of(block)
        grid = tuple(-(-side // unit) for side in shape)
        times = block // unit
        if times > 1:
            keep = keep.repeat_interleave(times, 0).repeat_interleave(times, 1)
        keep = keep[: grid[0], : grid[1]]
        row_ptr = torch.zeros(grid[0] + 1, dtype=torch.int32, device=keep.device)
        torch.cumsum(keep.sum(1), 0, out=row_ptr[1:])
        col_idx = torch.nonzero(keep)[:, 1].to(torch.int32)
        return cls(row_ptr, col_idx, shape, unit)

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return -(-self.shape[0] // self.unit), -(-self.shape[1] // self.unit)

    @property
    def count(self) -> int:
        """Kept blocks."""
        return self.col_idx.numel()

    def check(self, function: str) -> None:
        """Raise unless the lists describe blocks of this weight. Waits for the device."""
        rows, cols = self.grid
        ptr, idx = self.row_ptr.to("cpu", torch.int64), self.col_idx.to("cpu", torch.int64)
        steps = ptr[1:] - ptr[:-1]
        sound = (
            ptr.shape == (rows + 1,)
            and int(ptr[0]) == 0
            and int(ptr[-1]) == idx.numel()
            and bool((steps >= 0).all())
            and (not idx.numel() or (int(idx.min()) >= 0 and int(idx.max()) < cols))
        )
        if sound:
            key = torch.repeat_interleave(torch.arange(rows), steps) * cols + idx
            sound = bool((key[1:] > key[:-1]).all())
        if not sound:
            raise value_error(
                function, "block_row_ptr and block_col_idx",
                f"the kept blocks of a {rows}x{cols} grid, row by row, columns ascending",
                "other lists", "Load the state dict of a layer of the same size and block",
            )  # fmt: skip

    def row_ids(self) -> Tensor:
        """Block row of each block, int64 [blocks]."""
        steps = self.row_ptr[1:] - self.row_ptr[:-1]
        rows = torch.arange(steps.numel(), device=steps.device)
        return torch.repeat_interleave(rows, steps, output_size=self.count)

    def mask(self) -> Tensor:
        """Return which blocks are kept, bool [block rows, block columns]."""
        keep = torch.zeros(self.grid, dtype=torch.bool, device=self.col_idx.device)
        keep[self.row_ids(), self.col_idx.long()] = True
        return keep

    def transposed(self) -> tuple[BlockPattern, Tensor]:
        """Return the pattern of the transpose, and the block of this one behind each of its."""
        rows, cols = self.grid
        order = torch.argsort(self.col_idx.long() * max(rows, 1) + self.row_ids())
        row_ptr = torch.zeros(cols + 1, dtype=torch.int32, device=self.row_ptr.device)
        torch.cumsum(torch.bincount(self.col_idx, minlength=cols), 0, out=row_ptr[1:])
        col_idx = self.row_ids()[order].to(torch.int32)
        turned = BlockPattern(row_ptr, col_idx, (self.shape[1], self.shape[0]), self.unit)
        return turned, order


def _row_ids(row_ptr: Tensor, count: int) -> Tensor:
    rows = torch.arange(row_ptr.numel() - 1, device=row_ptr.device)
    return torch.repeat_interleave(rows, row_ptr[1:] - row_ptr[:-1], output_size=count)


def blocks_of(dense: Tensor, row_ptr: Tensor, col_idx: Tensor, unit: int) -> Tensor:
    """Kept blocks [blocks, unit, unit] of a weight [rows, columns]; differentiable."""
    rows, cols = dense.shape
    high, wide = row_ptr.numel() - 1, -(-cols // unit)
    padded = torch.nn.functional.pad(dense, (0, wide * unit - cols, 0, high * unit - rows))
    cells = padded.reshape(high, unit, wide, unit).transpose(1, 2)
    return cells[_row_ids(row_ptr, col_idx.numel()), col_idx.long()]


def dense_of_blocks(
    blocks: Tensor, row_ptr: Tensor, col_idx: Tensor, shape: tuple[int, int]
) -> Tensor:
    """The weight [rows, columns] with zeros outside of kept blocks; differentiable."""
    unit = blocks.shape[-1]
    high, wide = row_ptr.numel() - 1, -(-shape[1] // unit)
    cells = blocks.new_zeros((high, wide, unit, unit))
    cells = cells.index_put((_row_ids(row_ptr, col_idx.numel()), col_idx.long()), blocks)
    dense = cells.transpose(1, 2).reshape(high * unit, wide * unit)
    return dense[: shape[0], : shape[1]]
