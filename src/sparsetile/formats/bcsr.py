"""BCSR: the square blocks of A that contain an entry, dense, in block rows.

AsyncSparse, section II-C, for structured sparsity (pruned weights, FEM). Rows (in the plan's order)
and columns are cut every ``block``; empty blocks are omitted. Names are the paper's:

    block_row_ptr[i]    first block of block row i                            [block rows + 1]
    block_col_idx[k]    block column of block k, ascending in a block row     [blocks]
    blocks[k, r, c]     value of row r, column c of block k                   [blocks, b, b]

Blocks are row-major. A row's columns, the K dimension of the product, are contiguous (K-major):
every type of WGMMA takes this layout for either operand, and one swizzled TMA box loads it.
Values are scattered into the blocks by ``places``, so that new ones cost one scatter.

Cells without an entry are zeros, and zero times Inf is NaN. ``bitmaps`` marks the cells with
entries, for the exact recomputation of such rows; it is None if every cell inside A of every block
has an entry. Rows and columns past the end of A need no bits then: those rows are not stored, and
loads give zeros for rows of B past its end.

Built with tensor operations on A's device. Canonical entries are sorted, so the entries of one row
in one block form a run, and only these runs are sorted by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.base import Format
from sparsetile.formats.cells import WORD_BITS, pack_bits
from sparsetile.formats.row_parts import counted_in_parts, row_parts
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR
from sparsetile.reorder.permutation import positions

__all__ = ["BCSR", "BLOCK_SIZES", "count_blocks", "count_row_blocks"]

BLOCK_SIZES = (32, 64, 128)


@dataclass(frozen=True, eq=False)
class BCSR(Format):
    """See the module's docstring for the arrays."""

    index_arrays = ("block_row_ptr", "block_col_idx", "bitmaps")

    # block_row_ptr, block_col_idx: int32: offsets are in blocks.
    block_row_ptr: Tensor
    block_col_idx: Tensor
    places: Tensor  # int64 [nnz]: place of each canonical entry in the flattened blocks
    # int64 [blocks, b * b / 64]: bits of uint64, cell by cell, row-major; None if all cells inside
    # A have entries.
    bitmaps: Tensor | None
    # int32 [M]: row of A at each position; block row i has the positions from i * b on. None: the
    # given order.
    order: Tensor | None
    shape: tuple[int, int]  # (M, K) of A
    block: int  # rows and columns of a block, b

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *, block: int = 64) -> Self:
        """CSR of fewer than 2^31 entries -> BCSR; ``block`` is 32, 64 or 128."""
        if block not in BLOCK_SIZES:
            raise value_error(
                "BCSR.pack", "block", f"one of {BLOCK_SIZES}", block, "Choose a size from that list"
            )
        device, (rows, cols) = csr.device, csr.shape
        block_rows, block_cols = -(-rows // block), -(-cols // block)
        runs = _block_runs(csr, block, order)
        keys, key_of_run = torch.unique(runs.key, return_inverse=True)
        bounds = torch.arange(block_rows + 1, device=device) * block_cols
        ptr = torch.searchsorted(keys, bounds)
        idx = keys % max(block_cols, 1)
        # First cell of each run's row in its block.
        first_cell = (key_of_run * block + runs.position % block) * block
        places = first_cell[runs.of_entry] + csr.indices.to(torch.int64) % block
        bitmaps = None
        if csr.nnz != _inside(ptr, idx, csr.shape, block):
            bits = pack_bits(torch.sort(places).values, keys.numel() * block**2)
            bitmaps = bits.reshape(keys.numel(), block**2 // WORD_BITS)
        return cls(
            ptr.to(torch.int32), idx.to(torch.int32), places, bitmaps,
            None if order is None else order.to(torch.int32), csr.shape, block,
        )  # fmt: skip

    @property
    def block_row_count(self) -> int:
        return self.block_row_ptr.numel() - 1

    @property
    def block_count(self) -> int:
        return self.block_col_idx.numel()

    @property
    def cell_count(self) -> int:
        return self.block_count * self.block**2

    @property
    def fill(self) -> float:
        """Entries per stored cell: the paper's fill ratio."""
        return self.places.numel() / max(self.cell_count, 1)

    def value_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the dense blocks."""
        return self.cell_count * dtype.itemsize

    def units(self) -> Units:
        """Block rows; a unit's list is its blocks."""
        return Units.from_offsets(self.block_row_ptr)


def _inside(ptr: Tensor, idx: Tensor, shape: tuple[int, int], size: int) -> int:
    """Cells of the stored blocks inside A."""
    starts = torch.arange(ptr.numel() - 1, device=ptr.device) * size
    heights = torch.clamp(shape[0] - starts, max=size)
    widths = torch.clamp(shape[1] - idx * size, max=size)
    return int((torch.repeat_interleave(heights, ptr[1:] - ptr[:-1]) * widths).sum())


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of the entries of one row in one block, so that only runs are sorted.

    ``position`` and ``key`` (block row * block columns + block column) of each, and the run
    ``of_entry``.
    """

    position: Tensor
    key: Tensor
    of_entry: Tensor


def _block_runs(csr: CSR, block: int, order: Tensor | None) -> _Runs:
    block_cols = max(-(-csr.shape[1] // block), 1)
    piece = csr.row_ids() * block_cols + csr.indices.to(torch.int64) // block
    pieces, of_entry = torch.unique_consecutive(piece, return_inverse=True)
    position = pieces // block_cols
    if order is not None:
        position = positions(order.to(torch.int64))[position]
    return _Runs(position, position // block * block_cols + pieces % block_cols, of_entry)


def count_blocks(csr: CSR, block: int = 64, order: Tensor | None = None) -> int:
    """Blocks that :meth:`BCSR.pack` would store, without storing them."""
    return count_row_blocks(csr, block, order)[0]


def count_row_blocks(csr: CSR, block: int = 64, order: Tensor | None = None) -> tuple[int, int]:
    """Blocks that :meth:`BCSR.pack` would store: in all, and in the longest row of blocks."""
    if not counted_in_parts(csr, block):
        return _count_blocks(csr, block, order)
    found = [_count_blocks(part, block, None) for _, part in row_parts(csr, order, block)]
    return sum(count for count, _ in found), max(longest for _, longest in found)


def _count_blocks(csr: CSR, block: int, order: Tensor | None) -> tuple[int, int]:
    keys = torch.unique(_block_runs(csr, block, order).key)
    if not keys.numel():
        return 0, 0
    across = -(-csr.shape[1] // block)
    return keys.numel(), int(torch.bincount(keys // across).max())
