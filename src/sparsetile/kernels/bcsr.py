"""Host side of ``spmm_bcsr.cu``: configurations, limits, choice of the tile's width, grid."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsetile.intake.csr import FP8, FP8_RESULTS
from sparsetile.jit.params import ParamStruct, i32, i64, pointer, tensor_map
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS as CSR_ELEMENTS
from sparsetile.kernels.csr import out_dtypes
from sparsetile.kernels.params import EPILOGUE, POSITIONS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BLOCK", "BOX", "COLUMNS", "ELEMENTS", "ENGINE", "FP8", "FP8_TILES", "LADDER", "PRODUCT",
    "SLABS_TOGETHER", "SPMM_BCSR", "STORE_BOX", "STORE_COLUMNS", "TF32_TILES", "TILES",
    "TRANSPOSED_BOX", "BlockTile", "Store", "bcsr_config", "choose_block_tile", "out_types",
]  # fmt: skip

# torch dtype -> trait of element.cuh. B of 16 bits is read in place, along either side, FP8 along
# k; float32 is copied and rounded to TF32.
ELEMENTS = {
    **{d: CSR_ELEMENTS[d] for d in (torch.float32, torch.float16, torch.bfloat16)},
    FP8: "E4M3",
}
# Rows and columns of a block of A.
BLOCK = 64
# Rows and columns of a copy of a row-major B: 128 bytes a row, the width of a swizzle.
BOX = (64, 64)
ROW_BYTES = 128
# Rows and columns of C, and of its transpose, that TMA stores at once, and columns that a lane
# stores.
STORE_BOX, TRANSPOSED_BOX = (16, 64), (128, 64)
STORE_COLUMNS = 8
# The paper's ladder: the last enabled step, each with all before it. TMA copies from ENGINE on, a
# warpgroup is reserved for copies from SPECIALISED on, products use PRODUCT; with MULTICAST two
# thread blocks also share blocks of A. Barriers are always mbarriers, so opt4 is opt3.
LADDER = {"opt0": 0, "opt1": 1, "opt2": 2, "opt3": 3, "opt5": 5, "opt6": 6, "opt7": 7}
ENGINE, SPECIALISED, PRODUCT, MULTICAST = 2, 3, 6, 7
# The product with its tile's columns fixed, for sweeps over them.
COLUMNS = {"columns128": 128, "columns256": 256}
# Columns of C that one warpgroup multiplies, and threads of a warpgroup.
WARPGROUP_COLUMNS, WARPGROUP = 128, 128
# Two barriers per stage and per item index in flight; an index has four bytes.
BARRIER_BYTES = 16
TAKEN, TAKEN_BYTES = 4, 16 + 4
# Slabs of columns whose items alternate: one keeps the fewest bytes of B in use at a time; several
# read A's blocks from DRAM less often if L2 does not hold them.
SLABS_TOGETHER = 1


# Drift of thread blocks, in multiples of L2, from which the queue pays. H200, layers of Qwen2.5-7B
# at 90 %, microseconds in turn and from the queue:
#
#   3584 x 18944   8,192 tokens (drift 10) 252, 257; 16,384 (19) 513, 500; 65,536 (76) 3312, 1953
#   3584 x 3584    16,384 tokens (4) 102, 107; 65,536 (15) 458, 395
#   18944 x 3584   16,384 tokens (11) 493, 507; 65,536 (42) 2034, 2004
#
# Below, the queue's own cost shows: about 3 us a launch and 0.1 us an item.
MANY_DRIFTS = 12


class Store(enum.IntEnum):
    """Who stores C. TMA supports 16 bits in the given row order."""

    BY_THREADS = 0
    BY_ENGINE = 1
    TRANSPOSED = 2  # by TMA, columns of C as rows
    TRANSPOSED_BY_THREADS = 3  # float32


@dataclass(frozen=True)
class BlockTile:
    """The work of a thread block: ``columns`` columns of a block row, ``stages`` in its ring.

    ``step`` is that of the ladder.
    """

    columns: int
    stages: int
    step: int = PRODUCT
    item: int = 2  # bytes of an element
    paired: bool = False  # an item is a block row of a SwiGLU's gate and one of its up

    def at_step(self, step: int) -> BlockTile:
        """Return the same columns at a step of the ladder."""
        return BlockTile(self.columns, self.stages if step >= SPECIALISED else 1, step, self.item)

    @property
    def threads(self) -> int:
        """One warpgroup for each 128 columns, and one that copies."""
        return WARPGROUP * (self.columns // WARPGROUP_COLUMNS + (self.step >= SPECIALISED))

    @property
    def depth(self) -> int:
        """Columns of A, rows of B, in a stage."""
        return min(BLOCK, ROW_BYTES // self.item)

    @property
    def stage_bytes(self) -> int:
        """A block of A and its rows of B; half of both in float32."""
        return self.item * self.depth * (BLOCK + self.columns)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, C before its store, the barriers.

        C of a float32 product is float32 and is stored directly.
        """
        stored = 0 if self.item == 4 else 2 * BLOCK * self.columns
        taken = TAKEN * TAKEN_BYTES if self.step == PRODUCT else 0
        return self.stages * (self.stage_bytes + BARRIER_BYTES) + stored + taken

    @property
    def cluster(self) -> int:
        """Thread blocks that share blocks of A, each with its own slab."""
        return 2 if self.step == MULTICAST else 1

    @property
    def blocks_per_processor(self) -> int:
        """Thread blocks per SM."""
        return 2 if self.columns == WARPGROUP_COLUMNS else 1

    @property
    def block_box(self) -> tuple[int, int]:
        """Rows and columns of a copy of A."""
        return (BLOCK // self.cluster, self.depth)

    def box(self, k_major: bool) -> tuple[int, int]:
        """Rows and columns of a copy of B; of its transpose if ``k_major``: all columns at once."""
        return (self.columns, self.depth) if k_major else BOX

    def slabs(self, n: int) -> int:
        """Slabs of columns, those of a cluster counted as one."""
        return -(-n // (self.columns * self.cluster))

    def grid(self, n: int, block_rows: int, processors: int) -> tuple[int, int, int]:
        """As many thread blocks as the GPU holds, or as there are items."""
        items = block_rows * self.slabs(n)
        if self.step < PRODUCT:
            return (items, 1, 1)
        resident = max(processors * self.blocks_per_processor // self.cluster, 1)
        return (self.cluster * min(items, resident), 1, 1)

    def queues(self, n: int, block_rows: int, cols: int, processors: int, l2: int) -> bool:
        """Whether thread blocks should take items from a queue instead of in turn.

        In turn they drift apart, slab by slab; that costs time if several slabs of B's ``cols``
        rows do not fit L2 together.
        """
        (blocks, _, _), slab = self.grid(n, block_rows, processors), self.columns * self.item * cols
        turns = block_rows * self.slabs(n) / max(blocks, 1)
        at_once = 2 + blocks / max(block_rows, 1)
        return self.step == PRODUCT and turns * slab * at_once >= MANY_DRIFTS * l2


# 256 columns read the fewest bytes of A; one such block fills an SM. Two of 128 columns share it.
WIDE, NARROW = BlockTile(256, 4), BlockTile(128, 4)
TILES = (WIDE, NARROW)
FP8_TILES = (BlockTile(256, 9, item=1), BlockTile(128, 8, item=1))
TF32_TILES = (BlockTile(256, 5, item=4), BlockTile(128, 4, item=4))
_TILES_OF = {1: FP8_TILES, 2: TILES, 4: TF32_TILES}  # by bytes of an element


def out_types(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types that C of a product in ``dtype`` may have, the usual one first."""
    return FP8_RESULTS if dtype is FP8 else out_dtypes(dtype)


def choose_block_tile(
    n: int,
    block_rows: int,
    processors: int,
    dtype: torch.dtype = torch.bfloat16,
    columns: int | None = None,
) -> BlockTile:
    """Return the wide tile if ``n`` columns fill it and there is one for every SM.

    With ``columns``, the tile of that width.
    """
    wide, narrow = _TILES_OF[dtype.itemsize]
    if columns is not None:
        return wide if columns == wide.columns else narrow
    if n <= narrow.columns or block_rows * wide.slabs(n) < processors:
        return narrow
    return wide


def bcsr_config(
    dtype: torch.dtype,
    tile: BlockTile,
    *,
    out_dtype: torch.dtype | None = None,
    k_major: bool = False,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_bcsr.cu``; ``k_major``: B is the transpose of a row-major matrix."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUTPUT": CSR_ELEMENTS[out_types(dtype)[0] if out_dtype is None else out_dtype],
        "kKMajor": k_major,
        "kCols": tile.columns,
        "kStages": tile.stages,
        "kThreads": tile.threads,
        "kStep": tile.step,
        "kPaired": tile.paired,
        **({"CLUSTERED": "1"} if tile.cluster > 1 else {}),
    }


_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, tile, k_major in itertools.product(_SIXTEEN_BITS, TILES, (False, True)):
        for out in out_types(dtype):
            yield bcsr_config(dtype, tile, out_dtype=out, k_major=k_major)
    for dtype, tile in itertools.product(_SIXTEEN_BITS, TILES):
        yield bcsr_config(dtype, replace(tile, paired=True), k_major=True)
    for dtype, tile, step in itertools.product(_SIXTEEN_BITS, TILES, LADDER.values()):
        for out in out_types(dtype) if step != PRODUCT else ():
            yield bcsr_config(dtype, tile.at_step(step), out_dtype=out)
    for tile, out in itertools.product(FP8_TILES, out_types(FP8)):
        yield bcsr_config(FP8, tile, out_dtype=out, k_major=True)
    for tile in TF32_TILES:
        yield bcsr_config(torch.float32, tile, k_major=True)


SPMM_BCSR = KernelSpec(
    file="block_sparse/spmm_bcsr.cu",
    params=ParamStruct.of(
        tensor_map("a", "[64 blocks, 64], boxes of 64 / kCluster x kDepth"),
        tensor_map("b", "[k, n], boxes of 64 x 64; K-major [n, k], boxes of kCols x kDepth"),
        tensor_map("stored", "C [rows, n], boxes of 16 x 64; transposed [n, rows], 128 x 64"),
        pointer("c", "Out::Storage*"),
        pointer("work", "const int4*", "longest first: block row, its first block, how many; 0"),
        pointer("block_col_idx", "const int*", "of each block"),
        *ROW_BIAS,
        pointer("spoilt", "i64*", "set to 1 if a sum is not finite; null: not wanted"),
        pointer("queue", "int*", "[2], zeros: items are taken from it; null: in turn"),
        i64("c_stride", "of rows of C; transposed of columns"),
        *POSITIONS,
        *EPILOGUE,
        i32("n"),
        i32("block_rows", "of C"),
        i32("slabs", "of kCluster * kCols columns"),
        i32("together", "slabs whose items alternate"),
        i32("silu", "after the bias"),
        i32("store", "by TMA only if C has 16 bits and no order"),
    ),
    configs=_configs,
    architectures=("sm_90a",),
    shared_memory=True,
)
