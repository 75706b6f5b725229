"""Masks of single weights: which are kept, how a mask is stored, which pattern a weight has.

A mask is stored as bits, eight columns a byte, the first in the lowest bit, each row from a byte of
its own: [rows, ceil(columns / 8)]. That is 1/16 of the dense bytes of 16-bit weights, and the order
of compressed-tensors and of ``numpy.packbits(bitorder="little")``. Kept weights are stored in
row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetile.core.errors import type_error, value_error
from sparsetile.layers.masked_rows import spread_masked, takes_rows
from sparsetile.plan.modes import plain_call, transforming

__all__ = [
    "GROUP", "PATTERNS", "Found", "check_groups", "is_two_of_four", "kept_cells", "largest",
    "pack_bits", "pattern_of", "spread", "unpack_bits",
]  # fmt: skip

PATTERNS = ("block", "unstructured", "2:4")
GROUP = (4, 2)  # 2:4 keeps at most two of four weights that follow each other in a row
_BYTE = 8
# Blocks that are looked for in a dense weight, largest first.
_BLOCKS = (64, 32, 16)


def pack_bits(mask: Tensor) -> Tensor:
    """Return the bits of a mask [rows, columns], uint8 [rows, ceil(columns / 8)]."""
    rows, cols = mask.shape
    wide = -(-cols // _BYTE)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, wide * _BYTE - cols))
    weights = 2 ** torch.arange(_BYTE, dtype=torch.uint8, device=mask.device)
    return (padded.reshape(rows, wide, _BYTE) * weights).sum(2, dtype=torch.uint8)


def _on_host(bits: Tensor) -> bool:
    """Whether NumPy may read the bits: not while they are traced or wrapped."""
    return (
        type(bits) is Tensor
        and bits.device.type == "cpu"
        and bits.numel() > 0
        and not torch.jit.is_tracing()
        and plain_call()
    )


def unpack_bits(bits: Tensor, cols: int) -> Tensor:
    """Return the mask [rows, columns] of its bits."""
    if _on_host(bits):  # 40 times faster than torch's operations
        unpacked = np.unpackbits(bits.numpy(), axis=-1, count=cols, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    shifts = torch.arange(_BYTE, dtype=torch.uint8, device=bits.device)
    each = (bits[:, :, None] >> shifts) & 1
    return each.flatten(1)[:, :cols].to(torch.bool)


def places_of(bits: Tensor, cols: int, count: int) -> Tensor:
    """Return the row-major places of the ``count`` kept weights. The host does not wait."""
    mask = unpack_bits(bits, cols).flatten()
    if _on_host(bits):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero_static(mask, size=count).flatten()


def _spread(weight: Tensor, bits: Tensor, cols: int) -> Tensor:
    dense = weight.new_zeros(bits.shape[0] * cols)
    return dense.scatter(0, places_of(bits, cols, weight.shape[0]), weight).view(-1, cols)


class _Spread(torch.autograd.Function):
    """Kept weights -> the dense weight. It saves only the bits; torch's scatter saves 8 bytes for
    each kept weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: Tensor, cols: int) -> Tensor:  # type: ignore[override]
        ctx.count, ctx.cols = weight.shape[0], cols
        ctx.save_for_backward(bits)
        if type(bits) is Tensor and plain_call() and takes_rows(weight, bits):
            return spread_masked(weight, bits, cols)
        dense = weight.new_zeros(bits.shape[0] * cols)
        return dense.scatter_(0, places_of(bits, cols, ctx.count), weight).view(-1, cols)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _Gather.apply(grad, ctx.saved_tensors[0], ctx.count), None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """The gradient of the dense weight -> that of the kept weights."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, bits: Tensor, count: int) -> Tensor:  # type: ignore[override]
        ctx.cols = dense.shape[1]
        ctx.save_for_backward(bits)
        return dense.flatten()[places_of(bits, dense.shape[1], count)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return spread(grad, ctx.saved_tensors[0], ctx.cols), None, None


def spread(weight: Tensor, bits: Tensor, cols: int) -> Tensor:
    """Return the dense weight [rows, columns] of kept weights. Differentiable."""
    if torch.compiler.is_compiling() or transforming() or forward_ad._current_level >= 0:
        return _spread(weight, bits, cols)
    return _Spread.apply(weight, bits, cols)  # type: ignore[no-untyped-call, no-any-return]


# -- choosing ----------------------------------------------------------------------------------


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest of each row; of equal ones the first."""
    size = scores.shape[1]
    if count >= size:
        return torch.ones_like(scores, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = scores.nan_to_num(nan=torch.inf)
    threshold = scores.kthvalue(size - count + 1, dim=1, keepdim=True).values
    above, ties = scores > threshold, scores == threshold
    missing = count - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1) <= missing))


def chosen_cells(scores: Tensor, pattern: str, sparsity: float, by_row: bool) -> Tensor:
    """Return the mask of the weights with the largest scores [rows, columns].

    ``2:4`` keeps two of each four of a row. ``unstructured`` compares the weights of a row
    (``by_row``) or all of them.
    """
    rows, cols = scores.shape
    if pattern == "2:4":
        size, kept = GROUP
        return largest(scores.reshape(-1, size), kept).reshape(rows, cols)
    if by_row:
        return largest(scores, _kept(cols, sparsity))
    return largest(scores.reshape(1, -1), _kept(rows * cols, sparsity)).reshape(rows, cols)


def _kept(cells: int, sparsity: float) -> int:
    return max(min(1, cells), round(cells * (1.0 - sparsity)))


def check_groups(function: str, cols: int) -> None:
    """Raise if rows of this length are not made of groups of four."""
    if cols % GROUP[0]:
        raise value_error(
            function, "in_features", 'a multiple of 4 with pattern="2:4"', cols,
            'Pass pattern="unstructured"',
        )  # fmt: skip


def mask_given(function: str, name: str, mask: Any, shape: tuple[int, int]) -> Tensor:
    """Return a mask of single weights that a caller passed, or raise."""
    if not isinstance(mask, Tensor):
        raise type_error(
            function, name, "a tensor", type(mask).__name__, "Pass a tensor of True and False"
        )
    if mask.shape != shape:
        raise value_error(
            function, name, f"of shape {shape}, one value per weight", tuple(mask.shape),
            'Pass layer.weight != 0, or pattern="block" for a mask of blocks',
        )  # fmt: skip
    return mask.bool()


def kept_cells(
    function: str, weight: Tensor, pattern: str, *, sparsity: float | None = None,
    scores: Tensor | None = None, by_row: bool = False, mask: Tensor | None = None,
    mask_name: str = "mask",
) -> Tensor:  # fmt: skip
    """Return which weights are kept: of the largest scores, of a mask, or else the nonzero ones."""
    rows, cols = int(weight.shape[0]), int(weight.shape[1])
    if pattern == "2:4":
        check_groups(function, cols)
    if scores is not None:
        assert sparsity is not None
        return chosen_cells(scores, pattern, sparsity, by_row)
    if mask is None:
        kept = weight.detach() != 0
        mask_name = "weight"
    else:
        kept = mask_given(function, mask_name, mask, (rows, cols)).to(weight.device)
    if pattern == "2:4" and not is_two_of_four(kept):
        raise value_error(
            function, mask_name, "2:4: at most two of each four weights of a row kept",
            f"{share_of_groups(kept):.0%} of the groups of four with more",
            'Pass pattern="unstructured", or a sparsity to choose two of each four',
        )  # fmt: skip
    return kept


def share_of_groups(mask: Tensor) -> float:
    """Return the share of groups of four that keep more than two weights."""
    size, kept = GROUP
    return float((mask.reshape(-1, size).sum(1) > kept).float().mean())


def is_two_of_four(mask: Tensor) -> bool:
    """Whether at most two of each four weights of a row are kept."""
    size, kept = GROUP
    return mask.shape[1] % size == 0 and not bool((mask.reshape(-1, size).sum(1) > kept).any())


# -- recognising -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The pattern of a weight's zeros: dense, block, 2:4 or unstructured."""

    pattern: str
    sparsity: float  # share of zeros; of dropped blocks if the pattern is blocks
    block: int = 0

    def __str__(self) -> str:
        if self.pattern == "dense":
            return f"dense ({self.sparsity:.0%} zeros)"
        named = f"blocks of {self.block}" if self.pattern == "block" else self.pattern
        return f"{named}, {self.sparsity:.0%} zeros"


@torch.no_grad()
def pattern_of(weight: Tensor, least: float = 0.3) -> Found:
    """Return the pattern of a dense weight's zeros: dense, block, 2:4 or unstructured.

    A weight counts as dense if less than ``least`` of it is zero: below, neither bits nor blocks
    pay. It is block-sparse if nearly all of its zeros (19 of 20) are in whole blocks that are zero:
    a few kept weights may be zero by chance.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import pattern_of
    >>> str(pattern_of(torch.tensor([[1.0, 0.0, 2.0, 0.0]])))
    '2:4, 50% zeros'
    """
    mask = weight.detach() != 0
    zeros = 1.0 - float(mask.float().mean()) if mask.numel() else 0.0
    if zeros < least:
        return Found("dense", zeros)
    for block in _BLOCKS:
        if any(side % block for side in mask.shape):
            continue
        high, wide = (side // block for side in mask.shape)
        kept = mask.reshape(high, block, wide, block).any(3).any(1)
        dropped = 1.0 - float(kept.float().mean())
        if dropped >= 0.95 * zeros:
            return Found("block", dropped, block)
    if is_two_of_four(mask):
        return Found("2:4", zeros)
    return Found("unstructured", zeros)
