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
from sparsetile.intake.csr import offsets, owners

__all__ = ["UNIT", "BlockPattern", "blocks_of", "dense_of_blocks"]

# Rows and columns of the blocks that kernels multiply; larger ones are split into these.
UNIT = 64


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """The kept blocks of a weight."""

    # row_ptr, col_idx: int32 [block rows + 1], [blocks].
    row_ptr: Tensor
    col_idx: Tensor
    shape: tuple[int, int]  # (rows, columns) of the weight
    unit: int  # rows and columns of a stored block

    @staticmethod
    def unit_of(block: int) -> int:
        """Stored size of blocks that are pruned by ``block``: itself, or 64 if that divides it."""
        return UNIT if block % UNIT == 0 else block

    @classmethod
    def from_mask(cls, keep: Tensor, shape: tuple[int, int], block: int) -> Self:
        """Pattern of the kept blocks, bool [block rows, block columns]; the last may reach past the
        end.
        """
        unit = cls.unit_of(block)
        grid = tuple(-(-side // unit) for side in shape)
        times = block // unit
        if times > 1:
            keep = keep.repeat_interleave(times, 0).repeat_interleave(times, 1)
        keep = keep[: grid[0], : grid[1]]
        row_ptr = offsets(keep.sum(1), torch.int32)
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
            key = owners(steps) * cols + idx
            sound = bool((key[1:] > key[:-1]).all())
        if not sound:
            raise value_error(
                function, "block_row_ptr and block_col_idx",
                f"the kept blocks of a {rows}x{cols} grid, row by row, columns ascending",
                "other lists", "Load the state dict of a layer of the same size and block",
            )  # fmt: skip

    def row_ids(self) -> Tensor:
        """Block row of each block, int64 [blocks]."""
        return owners(self.row_ptr.diff(), self.count)

    def mask(self) -> Tensor:
        """Return which blocks are kept, bool [block rows, block columns]."""
        keep = torch.zeros(self.grid, dtype=torch.bool, device=self.col_idx.device)
        keep[self.row_ids(), self.col_idx.long()] = True
        return keep

    def transposed(self) -> tuple[BlockPattern, Tensor]:
        """Return the pattern of the transpose, and the block of this one behind each of its."""
        rows, cols = self.grid
        order = torch.argsort(self.col_idx.long() * max(rows, 1) + self.row_ids())
        row_ptr = offsets(torch.bincount(self.col_idx, minlength=cols), torch.int32)
        col_idx = self.row_ids()[order].to(torch.int32)
        turned = BlockPattern(row_ptr, col_idx, (self.shape[1], self.shape[0]), self.unit)
        return turned, order


def blocks_of(dense: Tensor, row_ptr: Tensor, col_idx: Tensor, unit: int) -> Tensor:
    """Kept blocks [blocks, unit, unit] of a weight [rows, columns]; differentiable."""
    rows, cols = dense.shape
    high, wide = row_ptr.numel() - 1, -(-cols // unit)
    padded = torch.nn.functional.pad(dense, (0, wide * unit - cols, 0, high * unit - rows))
    cells = padded.reshape(high, unit, wide, unit).transpose(1, 2)
    return cells[owners(row_ptr.diff(), col_idx.numel()), col_idx.long()]


def dense_of_blocks(
    blocks: Tensor, row_ptr: Tensor, col_idx: Tensor, shape: tuple[int, int]
) -> Tensor:
    """The weight [rows, columns] with zeros outside of kept blocks; differentiable."""
    unit = blocks.shape[-1]
    high, wide = row_ptr.numel() - 1, -(-shape[1] // unit)
    cells = blocks.new_zeros((high, wide, unit, unit))
    cells = cells.index_put((owners(row_ptr.diff(), col_idx.numel()), col_idx.long()), blocks)
    dense = cells.transpose(1, 2).reshape(high * unit, wide * unit)
    return dense[: shape[0], : shape[1]]
