"""Where a CPU multiplies the dense weight of a pruned layer faster than its kept part.

From development readings on two cores: weights of 512² to 4096², 50 to 99 % sparsity, 1 to 128
tokens, float32 and bfloat16. The crossing depends on the CPU; the rules below are on the side of
the dense product, which is never much slower.

    blocks, float32   512² and 1024²: dense is up to 13 times faster, at any sparsity. 2048²: dense
                      at 50 % (1 to 2 times faster), blocks from 80 % (1 to 4)
    blocks, 16 bits   blocks from 4 tokens (1 to 10 times faster); one token is faster dense
    single weights    4M weights, 1/8 kept: a plan is 1 to 3 times faster in float32, and from 4
                      tokens in 16 bits; in 1M weights dense is faster at any sparsity
"""

from __future__ import annotations

__all__ = ["blocks_on_host", "plan_on_host"]

_BLOCK_CELLS, _BLOCK_SHARE = 2**21, 1 / 4
_PLAN_CELLS, _PLAN_SHARE = 2**22, 1 / 8
_WIDE = 4  # bytes of float32


def blocks_on_host(cells: int, kept: int, tokens: int, item: int) -> bool:
    """Whether to multiply the kept blocks, of ``cells`` weights in all."""
    if item < _WIDE:
        return tokens > 1
    return cells >= _BLOCK_CELLS and kept <= _BLOCK_SHARE * cells


def plan_on_host(cells: int, kept: int, tokens: int, item: int) -> bool:
    """Whether to multiply single kept weights by a plan."""
    return (
        cells >= _PLAN_CELLS and kept <= _PLAN_SHARE * cells and not (item < _WIDE and tokens == 1)
    )
