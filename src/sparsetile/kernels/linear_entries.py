"""Kernel of linear layers of single weights for few tokens (``linear_entries.cu``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.params import OPERANDS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "ENTRY_PARTS", "ENTRY_ROWS", "ENTRY_STEP", "ENTRY_TOKENS", "ENTRY_TYPES", "LINEAR_ENTRIES",
    "LONGEST_GAP", "EntryTile", "choose_entry_tile", "entries_config", "entry_zeros",
]  # fmt: skip

ENTRY_TYPES = (torch.bfloat16, torch.float16)
# Most tokens of the kernel, and the numbers that it is compiled for.
ENTRY_TOKENS = 8
_TOKENS = (1, 2, 4, 8)
# Rows of a thread block, and the parts of a row: warps of the block.
ENTRY_ROWS = 32
ENTRY_PARTS = (8, 16)
# Entries of a lane in a step, and the most columns from one entry to the next.
ENTRY_STEP, LONGEST_GAP = 8, 16
_COUNTS = 32  # bytes of shared memory before X
_WARPS = 32  # of an SM at once, if registers and shared memory allow
_MORE_WARPS = 40  # if the grid then is one wave; with 48 registers a thread
_MORE_TOKENS = 4  # up to which these registers suffice
# Columns from which four steps are loaded ahead if an SM has one block: X takes longer to copy.
_LONG = 8192
# Steps of a warp from which that pays: with fewer, two blocks start sooner.
_MANY_STEPS = 17
_RESERVED = 1024  # bytes of shared memory that a block takes beside its own


@dataclass(frozen=True)
class EntryTile:
    """``tokens`` that the kernel is compiled for, steps ``ahead``, and blocks of an SM at once.

    ``let_next``: the next kernel's blocks may come beside this one's.
    """

    parts: int
    tokens: int
    ahead: int
    resident: int
    let_next: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.parts

    def shared_bytes(self, cols: int, zeros: int) -> int:
        """Shared memory of counts and X, whose place the parts' sums take afterwards."""
        x = (4 if self.tokens == 1 else 2 * self.tokens) * (cols + zeros)
        return _COUNTS + max(x, 4 * ENTRY_ROWS * self.parts * self.tokens)


def entry_zeros(steps: int) -> int:
    """Columns of zeros after X for warps of at most this many steps."""
    return LONGEST_GAP + ENTRY_STEP * steps


def choose_entry_tile(
    tokens: int, parts: int, blocks: int, cols: int, steps: int, processors: int,
    shared_processor: int,
) -> EntryTile:  # fmt: skip
    """About 40 KB of loads of an SM in flight: 32 warps with two steps, or 16 with four.

    40 warps run if all blocks then run at once: a few blocks of a second wave would take as long as
    the first. The next kernel's blocks come beside this one's if all of them find a place: else
    they fill the SMs that are done first, and have to share them. ``steps`` are the most of a warp.
    """
    compiled = next(each for each in _TOKENS if tokens <= each)
    shared = EntryTile(parts, compiled, 2, 1).shared_bytes(cols, entry_zeros(steps)) + _RESERVED
    fitting = shared_processor // shared
    resident = max(min(_WARPS // parts, fitting), 1)
    more = _MORE_WARPS // parts
    one_wave = resident * processors < blocks <= more * processors
    if one_wave and compiled <= _MORE_TOKENS and fitting >= more:
        resident = more
    alone = resident == 1 or (blocks <= processors and steps >= _MANY_STEPS)
    if parts == ENTRY_PARTS[-1] and alone and cols >= _LONG:
        return EntryTile(parts, compiled, 4, 1)
    return EntryTile(parts, compiled, 2, resident, 2 * blocks <= resident * processors)


def entries_config(dtype: torch.dtype, tile: EntryTile) -> dict[str, ConfigValue]:
    """Constants of ``linear_entries.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype], "kParts": tile.parts, "kTokens": tile.tokens,
        "kAhead": tile.ahead, "kMinBlocks": tile.resident,
    }  # fmt: skip


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, tokens, parts in itertools.product(ENTRY_TYPES, _TOKENS, ENTRY_PARTS):
        most = (_MORE_WARPS if tokens <= _MORE_TOKENS else _WARPS) // parts
        for resident in range(1, most + 1):
            yield entries_config(dtype, EntryTile(parts, tokens, 2, resident))
        if parts == ENTRY_PARTS[-1]:
            yield entries_config(dtype, EntryTile(parts, tokens, 4, 1))


LINEAR_ENTRIES = KernelSpec(
    file="block_sparse/linear_entries.cu",
    params=ParamStruct.of(
        *(OPERANDS[0], pointer("c", "E::Storage*")),
        pointer("stream", "const char*", "steps of 640 bytes: values and gaps of 32 lanes"),
        pointer("offsets", "const int*", "[blocks + 1]: first step of each block"),
        pointer("starts", "const int*", "[blocks][kParts][32]: column before a lane's first entry"),
        pointer("row_ids", "const int*", "[blocks][32]; -1 for none"),
        *ROW_BIAS,
        i64("x_stride", "of rows of X (b), in elements"),
        i64("c_stride", "of rows of Y (c)"),
        i32("cols", "of A"),
        i32("zeros", "columns of zeros after X in shared memory"),
        i32("n", "tokens"),
        i32("paired", "pairs of X's columns are aligned to four bytes"),
        i32("let_next", "whether the next kernel's blocks may come beside this one's"),
    ),
    configs=_configs,
    shared_memory=True,
)
