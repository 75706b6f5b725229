"""When entry by entry is faster than the dense product, for a linear layer of single weights.

What bounds the kernel: reading values and gaps once, or the loads of X from shared memory, for
which some lanes wait for the same bank. Before that each block copies X. The dense product reads
its weight from DRAM: layers of a model take turns, so that none is in L2.

The constants were fitted to 36 products on an H200 (BF16, 14336x4096, 4096x14336, 4096x4096 and
3584x18944, 50, 70 and 90 % dropped at random, 1 to 8 tokens, weights that rotate through more than
200 MB; development readings).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from sparsetile.core.device import Machine
from sparsetile.formats.entry_streams import choose_parts
from sparsetile.kernels.linear_entries import (
    ENTRY_ROWS,
    ENTRY_STEP,
    ENTRY_TOKENS,
    LONGEST_GAP,
    choose_entry_tile,
    entry_zeros,
)

__all__ = ["ENTRY_RATES", "EntryRates", "entries_pay", "predict_entries"]

_BYTES = 2.5  # of an entry


@dataclass(frozen=True)
class EntryRates:
    """Constants of the model: seconds, or shares of a GPU's ceilings."""

    fixed: float = 2.3e-6  # launch and the first entries
    input: float = 2.5e-11  # for a byte of X that a block of an SM keeps
    weight: float = 0.97  # rate of reading entries, over DRAM's
    # Of an SM for an entry of each of 32 rows, by tokens that the kernel is compiled for.
    entry: tuple[float, ...] = (2.3e-9, 2.5e-9, 3.7e-9, 6.5e-9)
    dense_fixed: float = 6e-6
    dense_weight: float = 1.07  # rate of reading the weight, over DRAM's
    margin: float = 1.2  # how much faster than dense it must be predicted to be


ENTRY_RATES = EntryRates()


def _row_entries(rows: int, cols: int, kept: int) -> float:
    """Entries of a row whose weights are kept at random, with those between far ones."""
    share = kept / max(rows * cols, 1)
    far = (1.0 - share) ** LONGEST_GAP
    return cols * share / max(1.0 - far, 1e-9)


def predict_entries(
    rows: int, cols: int, kept: int, tokens: int, ceilings: Machine,
    rates: EntryRates = ENTRY_RATES,
) -> float:  # fmt: skip
    """Return the seconds of the kernel; infinite if X does not fit into shared memory."""
    processors = max(ceilings.processors, 1)
    parts = choose_parts(rows, processors)
    # Parts are filled up to whole steps.
    filled = _row_entries(rows, cols, kept) + parts * ENTRY_STEP / 2
    steps = math.ceil(filled / (parts * ENTRY_STEP))
    blocks = -(-rows // ENTRY_ROWS)
    tile = choose_entry_tile(
        tokens, parts, blocks, cols, steps, processors, ceilings.shared_processor
    )
    shared = tile.shared_bytes(cols, entry_zeros(steps))
    if shared > ceilings.shared_block:
        return math.inf
    read = _BYTES * rows * filled / (rates.weight * ceilings.dram)
    each = rates.entry[tile.tokens.bit_length() - 1]
    busiest = -(-blocks // processors) if blocks <= processors else blocks / processors
    return rates.fixed + rates.input * shared * busiest + max(read, each * busiest * filled)


@functools.lru_cache(maxsize=65536)
def entries_pay(
    rows: int, cols: int, kept: int, tokens: int, ceilings: Machine,
    rates: EntryRates = ENTRY_RATES,
) -> bool:  # fmt: skip
    """Whether the kernel is predicted to be clearly faster than the dense product."""
    if not 0 < tokens <= ENTRY_TOKENS or not rows or not cols:
        return False
    dense = rates.dense_fixed + 2 * rows * cols / (rates.dense_weight * ceilings.dram)
    return predict_entries(rows, cols, kept, tokens, ceilings, rates) * rates.margin < dense
