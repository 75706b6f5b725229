"""Which way a linear layer of kept blocks takes for so many tokens: blocks, few tokens, or dense.

Unlike ``predict_bcsr`` and ``predict_dense``, these know that X and Y are row-major (neither is
copied), that F.linear rounds once, and whether there is a bias. Development readings on an H200
(BF16, blocks of 64) that the constants come from:

- one token through gate_proj (18944x3584) at 90 %: 12.8 us, of which reading the blocks is 4; dense
  37.7 us;
- 3584x3584 at 90 %, up to 128 tokens: 0.6 to 0.8 of dense; 512x3584, up to 1024 tokens: the same;
- half of the blocks kept: 0.4 to 0.98 of dense at any width;
- 8192 tokens through gate_proj at 90 %: 239 us without and 667 us with a bias.

The kernel for few tokens has not been measured: its constant is what a launch that waits for memory
twice takes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from sparsetile.core.device import Machine
from sparsetile.kernels.bcsr import WARPGROUP_COLUMNS, WIDE

__all__ = ["LayerSize", "choose_way", "predict_ways"]

# Seconds of a product of blocks beside its bytes: launch, the first copies, the last store.
_BLOCKS_FIXED = 10e-6
_BLOCKS_TENSOR, _L2, _DRAM = 0.6, 0.9, 0.75
# Seconds that a bias adds for each element of Y.
_BIAS = 2.8e-12
_FEW_FIXED, _FEW_DRAM = 4e-6, 0.75
# Of a 16-bit product, over the 32-bit rate: what cuBLAS reaches on large ones.
_DENSE_FLOPS = 2.2
# How much faster than dense a way must be to be taken: predictions are off by that much.
_MARGIN = 1.05


@dataclass(frozen=True)
class LayerSize:
    """A layer's weight: its sizes, kept blocks and their side."""

    rows: int
    cols: int
    blocks: int
    unit: int

    @property
    def cells(self) -> int:
        return self.blocks * self.unit**2


def predict_ways(
    size: LayerSize, tokens: int, item: int, bias: bool, ceilings: Machine
) -> dict[str, float]:
    """Return the seconds of each way: ``blocks``, ``few`` (of few tokens) and ``dense``.

    Parameters
    ----------
    item : int
        Bytes of an element.
    """
    moved = tokens * (size.cols + size.rows)
    columns = -(-tokens // WARPGROUP_COLUMNS) * WARPGROUP_COLUMNS
    tensor = 2.0 * size.cells * columns / (_BLOCKS_TENSOR * ceilings.dense_flops * 4 / item)
    copied = item * (size.blocks * size.unit * columns + size.cells * WIDE.slabs(max(tokens, 1)))
    once = item * (size.cells + moved)
    blocks = _BLOCKS_FIXED + max(
        tensor, copied / (_L2 * ceilings.l2_gather), once / (_DRAM * ceilings.dram)
    )
    if bias:
        blocks += _BIAS * size.rows * tokens
    few = _FEW_FIXED + once / (_FEW_DRAM * ceilings.dram)
    flops = 2.0 * size.rows * size.cols * tokens / (_DENSE_FLOPS * ceilings.dense_flops * 2 / item)
    dense = ceilings.launch + max(flops, item * (size.rows * size.cols + moved) / ceilings.dram)
    return {"blocks": blocks, "few": few, "dense": dense}


@functools.lru_cache(maxsize=65536)
def choose_way(
    size: LayerSize, tokens: int, item: int, bias: bool, ways: tuple[str, ...], ceilings: Machine
) -> str:
    """Return the fastest of ``ways``; dense unless another is clearly predicted to be faster."""
    seconds = predict_ways(size, tokens, item, bias, ceilings)
    return min(ways, key=lambda way: seconds[way] * (1.0 if way == "dense" else _MARGIN))
