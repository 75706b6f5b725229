"""Which method a block-sparse linear layer uses for a number of tokens: blocks, mma, few, or dense.

Unlike ``predict_bcsr`` and ``predict_dense``, these know that X and Y are row-major (neither is
copied), that F.linear rounds once, and whether there is a bias. What bounds each method:

    few      the kept blocks once; X for each strip of rows; one store per output
    blocks   copies from L2 into shared memory, spread over all SMs; but an SM takes whole items
             (a block row times a slab of tokens), one block after another, at a rate of its own
    mma      copies from L2 too; thread blocks are not persistent, so each item also costs its start
             and its store, and few items leave SMs idle or wait for one block after another
    dense    flops, or the whole weight once and a longer start

Each has a fixed time beside that. The constants, ``RATES``, are fitted to 388 products of four
layers of Qwen2.5-7B on an H200, each method forced (BF16, blocks of 64, 50 to 95 % sparsity, 1 to
65,536 tokens, with and without a bias; replays of a CUDA graph, so that weights under the size of
L2 stay there). Predictions are off by 15 % in the mean. What matters is the choice: it is within
5 % of the fastest in 380 of them, and in all with 20 % or less kept. The others keep half of the
blocks: at worst dense is chosen (38.9 us) although blocks take 31.6 us (18944x3584, 128 tokens). In
microseconds, without a bias, 10 % kept:

    layer        few, N = 1, 16    blocks, N = 128, 1024, 8192    dense, N = 1, 128, 1024, 8192
    18944x3584   6.2  8.7          10.1  36.7  253                36.9  38.3  184  1438
    3584x18944  7.4  9.0          13.8  42.7  285                37.6  44.1  178  1390
    3584x3584   3.0  3.7          5.1  12.5  51.5                9.2  8.5  34.6  268
    512x3584   3.0  3.4          5.1  5.2  11.6                6.8  6.5  8.6  40.9

The constants of ``mma`` were fitted to 36 products of the same layers, 10 % kept, in blocks of 64,
32 and 16, on the H200 too, with the fastest of several tiles; predictions are off by 10 % in the
mean. In microseconds:

    layer        64: N = 1024, 8192    32: 1024, 8192    16: 1024, 8192    dense
    18944x3584   57  428               77  554           199  1513         185  1407
    3584x18944   53  344               75  482           201  1475         179  1387
    3584x3584    16  87                21  109           42   300          35   270
    512x3584     6   20                6.5 27            10   56           9.4  41
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from sparsetile.core.device import Machine
from sparsetile.kernels.bcsr import BLOCK, choose_block_tile
from sparsetile.kernels.linear_blocks import BLOCKS_UNITS, ROW_BYTES, choose_layer_tile
from sparsetile.kernels.linear_few import FEW_TOKENS, choose_few_tile

__all__ = ["RATES", "LayerRates", "LayerSize", "choose_method", "predict_methods"]

# Exponent of the norm that joins the two bounds of a dense product.
_TOGETHER = 4
# Bytes of a row of a block from which copies use all that L2 reads for them.
_SECTORS = 64
_TYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}  # by bytes of an element


@dataclass(frozen=True)
class LayerRates:
    """Constants of the model: seconds, or shares of a GPU's ceilings."""

    few_fixed: float = 2.091e-6  # a launch that waits for memory twice
    few_weight: float = 1.013  # rate of reading blocks, over DRAM's
    few_input: float = 0.943  # rate of reading X, over L2's
    few_output: float = 6.112e-12  # for each element of Y: warps add their sums and round
    few_bias: float = 0.641e-6
    blocks_fixed: float = 2.487e-6  # launch, first copies and last store
    # Rates of all SMs together, over L2's and DRAM's, and over a 32-bit product's flops.
    blocks_l2: float = 0.98
    blocks_dram: float = 0.589
    blocks_tensor: float = 0.8
    # A thread block of 256 or 128 columns, for a block of 16 bits.
    block_wide: float = 0.5385e-6
    block_narrow: float = 0.2347e-6
    # Rates over L2's at which thread blocks of 128 columns copy: if the weight stays in L2, if not.
    narrow_l2: float = 0.6166
    narrow_dram: float = 0.4767
    item_fixed: float = 0.3453e-6  # an item, beside its blocks
    item_bias: float = 0.651e-6  # added to it by a bias
    mma_fixed: float = 2.5e-6
    # Rates over L2's of copies into shared memory, for blocks of 16 (half of a DRAM burst) and
    # others, and over the flops of mma.sync.
    mma_narrow: float = 0.57
    mma_l2: float = 0.92
    mma_tensor: float = 0.75
    mma_output: float = 89e-12  # for each element of an item's part of Y, on its SM
    mma_wait: float = 0.4e-6  # for a stage of the longest item
    mma_tail: float = 0.25  # of the items that an SM has at once, not hidden by others
    # Start of a dense product that is bound by its weight, from DRAM or L2, or else by its flops.
    dense_fixed: float = 7.283e-6
    dense_near: float = 6.2e-6
    dense_start: float = 0.9394e-6
    dense_flops: float = 0.9739  # of 16 bits, over twice the 32-bit rate
    margin: float = 1.03  # how much faster than dense a method must be predicted to be


RATES = LayerRates()


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

    @property
    def block_rows(self) -> int:
        return max(-(-self.rows // self.unit), 1)

    @property
    def share(self) -> float:
        """Share of the blocks that is kept."""
        return self.blocks / max(self.block_rows * -(-self.cols // self.unit), 1)


def _memory_rate(moved: float, ceilings: Machine) -> float:
    """Bytes a second, for operands that were in L2 before if they fit."""
    return ceilings.l2_gather if moved <= ceilings.l2_bytes else ceilings.dram


def _few_seconds(
    size: LayerSize, tokens: int, item: int, bias: bool, ceilings: Machine, rates: LayerRates
) -> float:
    processors = max(ceilings.processors, 1)
    tile = choose_few_tile(tokens, size.rows, size.blocks, size.unit, processors)
    groups = tile.grid(size.rows)[0]
    # Thread blocks of the busiest SM over the mean.
    uneven = -(-groups // processors) / (groups / processors) if groups > processors else 1.0
    weight = item * size.cells * uneven / (rates.few_weight * ceilings.dram)
    strips = size.unit // (16 * tile.strips)
    inputs = float(item * size.blocks * size.unit * strips * tokens)
    inputs /= rates.few_input * ceilings.l2_gather
    fixed = rates.few_fixed + (rates.few_bias if bias else 0.0)
    return fixed + weight + inputs + rates.few_output * size.rows * tokens


def _blocks_seconds(
    size: LayerSize, tokens: int, item: int, bias: bool, ceilings: Machine, rates: LayerRates
) -> float:
    processors = max(ceilings.processors, 1)
    tile = choose_block_tile(tokens, size.block_rows, processors, _TYPES[item])
    slabs = tile.slabs(max(tokens, 1))
    # Thread blocks that run at once, and how many items the busiest of them takes.
    resident = processors * tile.blocks_per_processor
    rounds = -(-size.block_rows * slabs // resident)
    mean = size.blocks / size.block_rows
    longest = mean + 2 * math.sqrt(mean)  # of rows whose blocks lie at random
    wide = tile.columns != choose_block_tile(1, 1, 1, _TYPES[item]).columns
    each = (rates.block_wide if wide else rates.block_narrow) * item / 2
    busiest = max(rounds * (rates.item_fixed + each * mean), rates.item_fixed + each * longest)
    columns = slabs * tile.columns
    copied = item * size.blocks * (size.unit * columns + slabs * size.unit**2)
    tensor = 2.0 * size.cells * columns
    tensor /= rates.blocks_tensor * ceilings.dense_flops * 4 / item
    met = 1.0 - (1.0 - size.share) ** size.block_rows  # columns of X that some block meets
    once = item * (size.cells + tokens * (size.cols * met + size.rows))
    near = item * size.cells <= ceilings.l2_bytes
    rate = rates.blocks_l2 if wide else rates.narrow_l2 if near else rates.narrow_dram
    read = once / (rates.blocks_dram * _memory_rate(once, ceilings))
    seconds = max(busiest, tensor, copied / (rate * ceilings.l2_gather), read)
    return rates.blocks_fixed + seconds + (rates.item_bias * rounds if bias else 0.0)


def _mma_seconds(
    size: LayerSize, tokens: int, item: int, ceilings: Machine, rates: LayerRates
) -> float:
    processors = max(ceilings.processors, 1)
    tile = choose_layer_tile(
        tokens, size.unit, size.block_rows, processors, ceilings.shared_processor
    )
    items = size.block_rows * tile.slabs(max(tokens, 1))
    share = rates.mma_l2 if size.unit * item >= _SECTORS else rates.mma_narrow
    # Of one SM, which has its part of L2's rate and of the flops.
    copied = tile.stage_bytes * processors / (share * ceilings.l2_gather)
    flops = 2.0 * tile.tokens * tile.unit * ROW_BYTES / item * processors
    stage = max(copied, flops / (rates.mma_tensor * ceilings.tensor_flops_16 * 4 / item))
    mean = size.blocks / size.block_rows
    per_block = size.unit * item / ROW_BYTES
    stages = mean * per_block + max(0.5 - per_block / 2, 0.0) * (mean > 0)
    longest = (mean + 2 * math.sqrt(mean)) * per_block
    each = rates.mma_output * tile.tokens * tile.unit + stage * stages
    resident = min(tile.resident, -(-items // processors))
    busy = each * (items / processors + rates.mma_tail * resident)
    return rates.mma_fixed + max(busy, each, rates.mma_wait * longest)


def _dense_seconds(
    size: LayerSize, tokens: int, item: int, ceilings: Machine, rates: LayerRates
) -> float:
    weight = item * size.rows * size.cols
    moved = weight + item * tokens * (size.cols + size.rows)
    flops = 2.0 * size.rows * size.cols * tokens
    flops /= rates.dense_flops * 2 * ceilings.dense_flops * 2 / item
    fixed = rates.dense_near if moved <= ceilings.l2_bytes else rates.dense_fixed
    bounds = (rates.dense_start + flops, fixed + moved / _memory_rate(moved, ceilings))
    # If both take about equally long, neither hides all of the other.
    return sum(seconds**_TOGETHER for seconds in bounds) ** (1 / _TOGETHER)


def predict_methods(
    size: LayerSize, tokens: int, item: int, bias: bool, ceilings: Machine,
    rates: LayerRates = RATES,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of each method, for elements of ``item`` bytes.

    ``blocks``, ``mma`` and ``few`` are infinite if their kernels do not support the blocks or the
    tokens.
    """
    blocks = mma = few = math.inf
    if size.unit in BLOCKS_UNITS and item in (2, 4):
        mma = _mma_seconds(size, tokens, item, ceilings, rates)
    if size.unit == BLOCK:
        blocks = _blocks_seconds(size, tokens, item, bias, ceilings, rates)
    if tokens <= FEW_TOKENS:
        few = _few_seconds(size, tokens, item, bias, ceilings, rates)
    dense = _dense_seconds(size, tokens, item, ceilings, rates)
    return {"blocks": blocks, "mma": mma, "few": few, "dense": dense}


@functools.lru_cache(maxsize=65536)
def choose_method(
    size: LayerSize, tokens: int, item: int, bias: bool, methods: tuple[str, ...],
    ceilings: Machine, rates: LayerRates = RATES,
) -> str:  # fmt: skip
    """Return the fastest of ``methods``; dense unless another is clearly predicted to be faster."""
    seconds = predict_methods(size, tokens, item, bias, ceilings, rates)
    if "few" in methods and seconds["few"] < math.inf:
        # Slower than ``few`` in all of 96 products of few tokens.
        seconds["blocks"] = seconds["mma"] = math.inf
    if "dense" in methods:
        seconds["dense"] /= rates.margin
    return min(methods, key=seconds.__getitem__)
