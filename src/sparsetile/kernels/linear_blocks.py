"""Host side of ``linear_blocks.cu``: configurations, grid, the tile that fits a GPU's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.params import EPILOGUE, OPERANDS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BLOCKS_ACCESS", "BLOCKS_TYPES", "BLOCKS_UNITS", "LINEAR_BLOCKS", "ROW_BYTES", "BlocksTile",
    "blocks_config", "choose_layer_tile",
]  # fmt: skip

BLOCKS_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Sides of the blocks.
BLOCKS_UNITS = (16, 32, 64)
# Bytes of one copy: rows of A and of X are multiples of it.
BLOCKS_ACCESS = 16
# Bytes of k of a stage.
ROW_BYTES = 128
_STAGES = (4, 3, 2)
# What the driver takes of an SM's shared memory for each thread block.
_BESIDE = 1024


@dataclass(frozen=True)
class BlocksTile:
    """The work of a thread block: the ``unit`` rows of a block row for ``tokens`` tokens."""

    unit: int
    tokens: int
    stages: int
    paired: bool = False  # gate and up of a SwiGLU

    warps = 4

    @property
    def across(self) -> int:
        """Warps side by side along the rows of A: a warp has up to 32 rows."""
        return max(self.unit // 32, 1)

    @property
    def resident(self) -> int:
        """Thread blocks per SM that registers suffice for.

        A thread keeps its sums, and up to 80 registers beside them (results/compile).
        """
        sums = self.unit * self.tokens * (2 if self.paired else 1) // self.threads
        return 2 if sums > 64 else 3 if sums > 32 else 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        return (self.unit + self.tokens) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, and a bias for each row."""
        return self.stages * self.stage_bytes + 4 * self.unit * (2 if self.paired else 1)

    def slabs(self, tokens: int) -> int:
        return -(-tokens // self.tokens)

    def fitting(self, shared_processor: int) -> BlocksTile:
        """Return the same with as many stages as an SM has memory for.

        More thread blocks come first, then stages: a stage in flight in another thread block hides
        latency as well as one more in this, and the blocks also hide each other's epilogues.
        """
        for blocks, stages in itertools.product(range(self.resident, 0, -1), reversed(_STAGES)):
            made = replace(self, stages=stages)
            if blocks * (made.shared_bytes + _BESIDE) <= shared_processor:
                more = [s for s in _STAGES if s >= stages]
                fits = (replace(self, stages=s) for s in more)
                return next(
                    f for f in fits if blocks * (f.shared_bytes + _BESIDE) <= shared_processor
                )
        return replace(self, stages=_STAGES[-1])


def choose_layer_tile(
    tokens: int, unit: int, block_rows: int, processors: int, shared_processor: int,
    paired: bool = False,
) -> BlocksTile:  # fmt: skip
    """Return the widest tile that tokens fill and that gives every SM a thread block."""
    wide = BlocksTile(unit, 128, _STAGES[0], paired)
    if tokens <= 64 or block_rows * wide.slabs(tokens) < processors:
        wide = replace(wide, tokens=64)
    return wide.fitting(shared_processor)


def blocks_config(dtype: torch.dtype, tile: BlocksTile) -> dict[str, ConfigValue]:
    """Constants of ``linear_blocks.cu``."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": ELEMENTS[dtype],
        "kUnit": tile.unit,
        "kTokens": tile.tokens,
        "kWarps": tile.warps,
        "kAcross": tile.across,
        "kStages": tile.stages,
        "kResident": tile.resident,
        "kPaired": tile.paired,
    }


# Bytes of shared memory of an SM that tiles are made for: sm_80, sm_89 and sm_90.
_MEMORIES = tuple(kilobytes * 1024 for kilobytes in (164, 100, 228))


def _configs() -> Iterator[dict[str, ConfigValue]]:
    seen = set()
    for dtype, unit, tokens, memory in itertools.product(
        BLOCKS_TYPES, BLOCKS_UNITS, (64, 128), _MEMORIES
    ):
        for paired in (False, True) if dtype.itemsize == 2 else (False,):
            tile = BlocksTile(unit, tokens, _STAGES[0], paired).fitting(memory)
            if (dtype, tile) not in seen:
                seen.add((dtype, tile))
                yield blocks_config(dtype, tile)


LINEAR_BLOCKS = KernelSpec(
    file="block_sparse/linear_blocks.cu",
    params=ParamStruct.of(
        *OPERANDS,
        pointer("blocks", "const E::Storage*", "[blocks, kUnit, kUnit]"),
        pointer("work", "const int4*", "longest first: block row, its first block, how many; 0"),
        pointer("block_col_idx", "const int*", "of each block"),
        *ROW_BIAS,
        i64("x_stride", "of rows of X (b), in elements"),
        i64("c_stride", "of rows of Y (c)"),
        *EPILOGUE,
        i32("silu", "after the bias"),
        i32("rows", "of Y, in a row"),
        i32("n", "tokens"),
        i32("cols", "of A"),
    ),
    configs=_configs,
    shared_memory=True,
)
