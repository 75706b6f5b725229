"""Host side of ``spmm_bittcf.cu``: configurations, limits, choice of the slab's width."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import MANY_RELOADS, element_types, out_dtypes
from sparsetile.kernels.csr import MMA_ELEMENTS as ELEMENTS
from sparsetile.kernels.params import EPILOGUE, OPERANDS, POSITIONS, STRIDES, TREE
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "DEFAULT", "ELEMENTS", "SPMM_BITTCF", "STACKS", "THREADS", "Policy", "Slab", "bittcf_config",
    "choose_slab", "slabs",
]  # fmt: skip

THREADS = 64
# 16-byte accesses are the widest; at least 128 bytes of a row of B should be read at once.
ACCESS_BYTES = 16
SLAB_BYTES = 128
# Lanes of a warp side by side along a row of B.
GROUPS = 8
# Pieces that a warp may hold side by side, as registers allow: by bytes of an element and stacked
# tiles. Narrow accesses are only for odd widths and strides.
PIECES = {(4, 1): (1, 2, 4), (4, 2): (1, 2, 4), (2, 1): (1, 2, 4), (2, 2): (1, 2)}
NARROW_PIECES = {1: (1, 2), 2: (1,)}
# Tiles that may be stacked. Plans are stacked only in float32, for which it pays
# (docs/explanation/notes/acc.md); under autocast they also serve operands of 16 bits.
STACKS = (1, 2)
# Tiles of B in a warp's ring, including the current one. More would hide more of the memory's
# latency, and take L1 from the warps that share rows of B (docs/explanation/notes/acc.md).
STAGES = 2
# Cost of a slab beside its columns (column ids, bitmap, weights), in columns of a lane.
SLAB_COST = 6
# Fewest warps that an SM should have; narrower slabs make more of them.
BUSY_WARPS = 16


@dataclass(frozen=True)
class Slab:
    """The columns of a warp: ``pieces`` times eight lanes of ``span`` columns of B, for ``stack``
    times eight rows."""

    span: int
    pieces: int
    stack: int = 1

    @property
    def columns(self) -> int:
        return GROUPS * self.span * self.pieces

    @property
    def sums(self) -> int:
        """Sums of a lane: its columns for two of each eight rows of the window."""
        return 2 * self.span * self.pieces * self.stack

    def count(self, n: int) -> int:
        """Slabs that cover ``n`` columns."""
        return -(-n // self.columns)

    def cost(self, n: int) -> int:
        """Work of a tile over all slabs of ``n`` columns, in columns."""
        return self.count(n) * (self.columns + SLAB_COST * self.span)


@dataclass(frozen=True)
class Policy:
    """The parts that an ablation disables."""

    pipelined: bool = True  # copy the next tile's rows of B while this tile is multiplied
    # Keep B in L1 and evict C early; otherwise B comes only from L2, and stores are plain.
    cached: bool = True
    # Without ``pipelined``: copy the next tile of A, not its rows of B (DTC-SpMM's pipeline).
    ahead: bool = False


DEFAULT = Policy()
# The steps of the paper's ablation that the kernel implements.
ABLATED = (
    Policy(pipelined=False, cached=False),
    Policy(pipelined=False),
    Policy(pipelined=False, ahead=True),
)


def slabs(dtype: torch.dtype, vector: int, stack: int = 1) -> list[Slab]:
    """Return the slabs for accesses of ``vector`` elements, narrowest first."""
    span = ACCESS_BYTES // dtype.itemsize
    pieces = PIECES[dtype.itemsize, stack] if vector == span else NARROW_PIECES[stack]
    found = [Slab(span, count, stack) for count in pieces]
    return found if dtype.itemsize == 4 else [Slab(span // 2, 1, stack), *found]


def choose_slab(
    dtype: torch.dtype,
    n: int,
    vector: int,
    *,
    items: int,
    processors: int,
    cols: int = 0,
    l2: int = 0,
    reloads: float = 0.0,
    stack: int = 1,
) -> Slab:
    """Return the slab with the least work for ``n`` columns that still fills the GPU.

    Slabs under 128 bytes a row are only for products that narrow. If rows of B (``cols`` of them)
    come in no local order (``reloads``), the slab is the widest whose part of B fits the L2 cache
    of ``l2`` bytes, if any does: gathers from L2 run at twice DRAM's speed.
    """
    allowed = [
        slab
        for slab in slabs(dtype, vector, stack)
        if slab.columns >= n or slab.columns * dtype.itemsize >= SLAB_BYTES
    ]
    if reloads >= MANY_RELOADS:
        fits = [s for s in allowed if cols * s.columns * dtype.itemsize <= 0.85 * l2]
        allowed = fits or allowed
    filling = [s for s in allowed if items * s.count(n) >= processors * BUSY_WARPS]
    return min(reversed(filling or allowed[:1]), key=lambda s: s.cost(n))


# By bytes of an element and sums of a lane: blocks an SM should hold, which limits the registers
# without spills in the loop over tiles. The recomputation of non-finite sums would take more of
# them, and every warp gets as many as the most demanding function of a kernel.
_MIN_BLOCKS = {4: {8: 14, 16: 10, 32: 8, 64: 6}, 2: {8: 16, 16: 12, 32: 9, 64: 6}}
# The same if rows of B go straight to registers.
_MIN_BLOCKS_ODD = {4: {8: 16, 16: 14}, 2: {8: 16, 16: 14, 32: 10}}


def _min_blocks(dtype: torch.dtype, slab: Slab, aligned: bool) -> int:
    return (_MIN_BLOCKS if aligned else _MIN_BLOCKS_ODD)[dtype.itemsize][slab.sums]


def bittcf_config(
    dtype: torch.dtype,
    slab: Slab,
    vector: int,
    weighted: bool,
    *,
    out_dtype: torch.dtype | None = None,
    policy: Policy = DEFAULT,
) -> dict[str, ConfigValue]:
    """Constants of ``spmm_bittcf.cu``.

    Ablations are measured on aligned products of their own type, float32 or float16; others take
    the default policy.
    """
    aligned = vector * dtype.itemsize == ACCESS_BYTES
    own_type = out_dtype is None or out_dtype is dtype
    if not aligned or not own_type or dtype is torch.bfloat16:
        policy = DEFAULT
    return {
        **element_types(dtype, out_dtype),
        "kSpan": slab.span,
        "kPieces": slab.pieces,
        "kVec": min(vector, slab.span),
        "kStack": slab.stack,
        "kThreads": THREADS,
        "kMinBlocks": _min_blocks(dtype, slab, aligned),
        "kStages": 0 if not aligned else STAGES if policy.pipelined else 1,
        "kAheadA": policy.ahead and not policy.pipelined,
        "kWeighted": weighted,
        "kCacheB": policy.cached,
        "kStreamC": policy.cached,
    }


def _vectors(dtype: torch.dtype) -> tuple[int, ...]:
    full = ACCESS_BYTES // dtype.itemsize
    return full, full // 2, 1


def _configs() -> Iterator[dict[str, ConfigValue]]:
    seen: list[dict[str, ConfigValue]] = []
    for dtype, weighted in itertools.product(ELEMENTS, (True, False)):
        for stack, vector in itertools.product(STACKS, _vectors(dtype)):
            for slab, out in itertools.product(slabs(dtype, vector, stack), out_dtypes(dtype)):
                seen.append(bittcf_config(dtype, slab, vector, weighted, out_dtype=out))
        full = _vectors(dtype)[0]
        for slab, policy in itertools.product(slabs(dtype, full), ABLATED):
            seen.append(bittcf_config(dtype, slab, full, weighted, policy=policy))
    yield from {tuple(config.items()): config for config in seen}.values()


SPMM_BITTCF = KernelSpec(
    file="windows/spmm_bittcf.cu",
    params=ParamStruct.of(
        pointer("items", "const int4*", "first window, first tile, end, slot or -windows"),
        *OPERANDS,
        pointer("row_window_offset", "const int*"),
        pointer("tc_offset", "const int*"),
        pointer("sparse_a_to_b", "const int*"),
        pointer("tc_local_bit", "const u64*"),
        pointer("values", "const E::Storage*", "packed; null for a pattern"),
        *STRIDES,
        *TREE,
        *POSITIONS,
        *EPILOGUE,
        i32("item_count"),
        i32("n"),
    ),
    configs=_configs,
    shared_memory=True,
    # In the recomputation of non-finite sums, mostly of odd widths.
    allowed_spills=60,
)
