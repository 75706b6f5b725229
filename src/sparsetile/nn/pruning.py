"""Which blocks of a weight are kept: the largest, random ones, or those of a mask.

And what becomes of an optimiser's state when blocks are dropped later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.block_pattern import UNIT

__all__ = [
    "METHODS",
    "block_size",
    "hand_over",
    "kept_blocks",
    "kept_count",
    "largest_blocks",
    "sparsity_share",
]

METHODS = ("magnitude", "random", "mask")
# Smaller blocks than this have no kernel that would gain anything.
_SMALLEST = 16


def block_size(function: str, block: Any) -> int:
    """Return the side of a block: 16, 32, or a multiple of 64."""
    if isinstance(block, bool) or not isinstance(block, int):
        raise type_error(function, "block", "a whole number", repr(block), "Pass block=64")
    if block not in (_SMALLEST, 2 * _SMALLEST) and (block < UNIT or block % UNIT):
        raise value_error(
            function, "block", "16, 32 or a multiple of 64", block,
            "Pass block=64, which is fastest",
        )  # fmt: skip
    return block


def sparsity_share(function: str, sparsity: Any) -> float:
    """Return the share of blocks that is dropped, from 0 up to but not including 1."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)):
        raise type_error(function, "sparsity", "a number", repr(sparsity), "Pass sparsity=0.9")
    if not 0.0 <= sparsity < 1.0:
        raise value_error(
            function, "sparsity", "at least 0 and below 1", sparsity,
            "Pass a share such as 0.9, not a percentage",
        )  # fmt: skip
    return float(sparsity)


def _grid(shape: tuple[int, int], block: int) -> tuple[int, int]:
    return -(-shape[0] // block), -(-shape[1] // block)


def _block_sums(cells: Tensor, block: int) -> Tensor:
    """Sum of the cells of each block; those past the end count as zeros."""
    rows, cols = cells.shape
    high, wide = _grid((rows, cols), block)
    padded = torch.nn.functional.pad(cells, (0, wide * block - cols, 0, high * block - rows))
    return padded.reshape(high, block, wide, block).sum((1, 3))


def kept_count(blocks: int, sparsity: float) -> int:
    """Blocks that are kept: at least one where there are any."""
    return max(min(1, blocks), round(blocks * (1.0 - sparsity)))


@torch.no_grad()
def kept_blocks(
    function: str,
    weight: Tensor,
    block: int,
    *,
    sparsity: float | None = None,
    method: str = "magnitude",
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return which blocks of ``weight`` [rows, columns] are kept, bool [block rows, block columns].

    Parameters
    ----------
    sparsity : float, optional
        Share of the blocks that is dropped. None with ``method="mask"``.
    method : {"magnitude", "random", "mask"}
        Blocks of the largest norm (in float32; of equal ones the first), random ones, or those
        that ``mask`` has anything in. Without a mask those that ``weight`` has anything in.
    mask : Tensor of bool [rows, columns] or [block rows, block columns]
    """
    one_of(function, "method", method, METHODS)
    rows, cols = int(weight.shape[0]), int(weight.shape[1])
    grid = _grid((rows, cols), block)
    if method == "mask":
        if mask is None:
            return _block_sums((weight != 0).to(torch.float32), block) > 0
        return _kept_by_mask(function, mask, (rows, cols), grid, block).to(weight.device)
    total = grid[0] * grid[1]
    count = kept_count(total, sparsity_share(function, sparsity))
    if method == "magnitude":
        norms = _block_sums(weight.float().square(), block).flatten()
        order = torch.argsort(norms, descending=True, stable=True)
    else:
        place = "cpu" if generator is None else generator.device
        order = torch.randperm(total, generator=generator, device=place).to(weight.device)
    keep = torch.zeros(total, dtype=torch.bool, device=weight.device)
    keep[order[:count]] = True
    return keep.reshape(grid)


def _kept_by_mask(
    function: str, mask: Any, shape: tuple[int, int], grid: tuple[int, int], block: int
) -> Tensor:
    if not isinstance(mask, Tensor):
        raise type_error(
            function, "mask", "a tensor", type(mask).__name__, "Pass a tensor of True and False"
        )
    if mask.shape == grid:
        return mask.bool()
    if mask.shape == shape:
        return _block_sums(mask.bool().to(torch.float32), block) > 0
    raise value_error(
        function, "mask", f"of shape {shape} (weights) or {grid} (blocks of {block})",
        tuple(mask.shape), "Give one value per weight, or one per block",
    )  # fmt: skip


def largest_blocks(blocks: Tensor, count: int) -> Tensor:
    """Return the numbers of the ``count`` blocks [blocks, unit, unit] of largest norm, in order."""
    norms = blocks.float().square().sum((1, 2))
    return torch.argsort(norms, descending=True, stable=True)[:count].sort().values


def hand_over(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, kept: Tensor
) -> None:
    """Put a weight of fewer blocks in the place of another, with the state of those blocks."""
    for group in optimizer.param_groups:
        group["params"] = [new if given is old else given for given in group["params"]]
    state = optimizer.state.pop(old, None)
    if state is not None:
        optimizer.state[new] = {
            name: part[kept].contiguous()
            if isinstance(part, Tensor) and part.shape == old.shape
            else part
            for name, part in state.items()
        }
