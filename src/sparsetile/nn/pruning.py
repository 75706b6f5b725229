"""Which blocks of a weight are kept: the largest, random ones, or those of a mask.

Also drops blocks of a weight in training: the Parameter stays the same object, and optimisers keep
the state of the other blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.block_pattern import UNIT

__all__ = [
    "METHODS", "block_scores", "block_size", "check_optimizer", "drop_blocks_", "kept_blocks",
    "kept_count", "largest_blocks", "shrink_state", "sparsity_share",
]  # fmt: skip

METHODS = ("magnitude", "wanda", "random", "mask")
# No kernel profits from smaller blocks.
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


def block_scores(scores: Tensor, block: int) -> Tensor:
    """Return what each block is worth: the sum of the squares of its weights' scores."""
    return _block_sums(scores.square(), block)


def kept_count(blocks: int, sparsity: float) -> int:
    """Number of kept blocks: at least one if there are any."""
    return max(min(1, blocks), round(blocks * (1.0 - sparsity)))


@torch.no_grad()
def kept_blocks(
    function: str, weight: Tensor, block: int, *, sparsity: float | None = None,
    method: str = "magnitude", mask: Tensor | None = None, mask_name: str = "mask",
    generator: torch.Generator | None = None, scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return which blocks of ``weight`` [rows, columns] are kept, bool [block rows, block columns].

    Those of the largest norm (in float32; of equal ones the first; of ``scores``, if given, in
    place of the weights), random ones, or those of ``mask``, which has a value per weight or per
    block. ``method="mask"`` without a mask keeps the nonzero blocks. Errors call the mask
    ``mask_name``.
    """
    one_of(function, "method", method, [name for name in METHODS if name != "wanda"])
    rows, cols = int(weight.shape[0]), int(weight.shape[1])
    grid = _grid((rows, cols), block)
    if method == "mask":
        if mask is None:
            return _block_sums((weight != 0).to(torch.float32), block) > 0
        return _kept_by_mask(function, mask_name, mask, (rows, cols), block).to(weight.device)
    total = grid[0] * grid[1]
    count = kept_count(total, sparsity_share(function, sparsity))
    if method == "magnitude":
        norms = block_scores(weight.float() if scores is None else scores, block).flatten()
        order = torch.argsort(norms, descending=True, stable=True)
    else:
        place = "cpu" if generator is None else generator.device
        order = torch.randperm(total, generator=generator, device=place).to(weight.device)
    keep = torch.zeros(total, dtype=torch.bool, device=weight.device)
    keep[order[:count]] = True
    return keep.reshape(grid)


def _kept_by_mask(
    function: str, name: str, mask: Any, shape: tuple[int, int], block: int
) -> Tensor:
    grid = _grid(shape, block)
    if not isinstance(mask, Tensor):
        raise type_error(
            function, name, "a tensor", type(mask).__name__, "Pass a tensor of True and False"
        )
    if mask.shape == grid:
        return mask.bool()
    if mask.shape != shape:
        raise value_error(
            function, name, f"of shape {shape} (weights) or {grid} (blocks of {block})",
            tuple(mask.shape), "Give one value per weight, or one per block",
        )  # fmt: skip
    cells = mask.bool().to(torch.float32)
    kept = _block_sums(cells, block)
    partial = int(((kept > 0) & (kept < _block_sums(torch.ones_like(cells), block))).sum())
    share = 100 * partial / max(kept.numel(), 1)
    if partial:
        # Every cell of a kept block is a weight: training would fill the others again.
        raise value_error(
            function, name, f"made of whole blocks of {block}x{block}",
            f"{partial} of {kept.numel()} blocks ({share:.0f} %) partly kept",
            "Keep or drop whole blocks, for example with sparsity=0.9; for other masks, use "
            'SparseConfig(pattern="unstructured") or MaskedLinear.from_linear(layer, mask=mask)',
        )  # fmt: skip
    return kept > 0


def largest_blocks(blocks: Tensor, count: int) -> Tensor:
    """Return the numbers of the ``count`` blocks [blocks, unit, unit] of largest norm, in order."""
    norms = blocks.float().square().sum((1, 2))
    return torch.argsort(norms, descending=True, stable=True)[:count].sort().values


def check_optimizer(
    function: str, weight: nn.Parameter, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raise if an optimiser that a caller passed does not train this weight."""
    if optimizer is None or not weight.requires_grad:
        return
    groups = optimizer.param_groups
    if not any(part is weight for group in groups for part in group["params"]):
        raise value_error(
            function, "optimizer", "one that has the layer's weight",
            "an optimiser of other parameters", "Make it after sparsify_, or omit it",
        )  # fmt: skip


# Pruned weight -> the number of blocks before each pruning, and which of them were kept.
_histories: Any = WeakIdKeyDictionary()


def drop_blocks_(weight: nn.Parameter, kept: Tensor) -> None:
    """Keep some blocks of a weight. It stays the same object, so that optimisers still have it."""
    _watch_steps()
    _histories.setdefault(weight, []).append((len(weight), kept))
    values = weight.detach()[kept].contiguous()
    weight.grad = None
    # AccumulateGrad keeps the old shape while a graph is alive. torch makes a new one after a
    # change of the type, but not of the shape.
    other = torch.float32 if values.dtype is torch.float64 else torch.float64
    weight.data = values.new_empty(0, dtype=other)
    weight.data = values
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)  # graphs of the old blocks are invalid


def shrink_state(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """Drop the state of blocks that a weight no longer has."""
    state = optimizer.state.get(weight, {})
    for name, part in state.items():
        if isinstance(part, Tensor) and part.dim() == weight.dim():
            for blocks, kept in _histories.get(weight, ()):
                if len(part) == blocks:
                    part = part[kept.to(part.device)].contiguous()
            state[name] = part


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for weight in [*_histories]:
        shrink_state(optimizer, weight)
