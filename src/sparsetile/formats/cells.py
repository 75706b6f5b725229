"""Cells of packed tiles: writes values into them, and one bit for each cell with an entry.

Shared by BCSR and WCSR. Both store tiles one after the other, row-major inside, so an entry's
*place* is one number: the cells before it. Bit ``place % 64`` of word ``place // 64`` is set if the
cell has an entry; tiles are whole words. Tensor operations on any device: no loop over tiles, no
atomics, the same bits in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import offsets

__all__ = [
    "WORD_BITS", "checked_values", "pack_bits", "scatter_cells", "set_places",
]  # fmt: skip

WORD_BITS = 64


def checked_values(
    values: Tensor | None, count: int, dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    """Return ``values`` [count] as ``dtype`` (None: their own); ones for a pattern."""
    if values is None:
        return torch.ones(count, dtype=dtype or torch.float32, device=device)
    if values.shape != (count,):
        raise value_error(
            "pack_values", "values", f"a tensor of {count} values", f"shape {tuple(values.shape)}",
            "Give one value for each stored entry, in canonical order",
        )  # fmt: skip
    return values if dtype is None else values.to(dtype)


def scatter_cells(values: Tensor, places: Tensor, cells: int) -> Tensor:
    """Values [n] to their places among ``cells`` cells; zeros elsewhere. Differentiable."""
    packed = torch.zeros(cells, dtype=values.dtype, device=values.device)
    if values.dtype.itemsize == 1:  # as bytes: not every device can index float8
        packed.view(torch.uint8)[places] = values.view(torch.uint8)
    else:
        packed[places] = values
    return packed


def pack_bits(places: Tensor, cells: int) -> Tensor:
    """Ascending, distinct places -> int64 [cells / 64], their bits set.

    Bits of a word occur once, so OR is a sum, and a sum is a difference of running sums. Halves of
    a word are summed separately: fewer than 2^31 terms below 2^32 do not overflow.
    """
    words = torch.zeros(cells // WORD_BITS, dtype=torch.int64, device=places.device)
    word, count = torch.unique_consecutive(places // WORD_BITS, return_counts=True)
    end = torch.cumsum(count, 0)
    halves = []
    for half in range(2):
        inside = places // 32 % 2 == half
        terms = torch.where(inside, torch.ones_like(places) << (places % 32), 0)
        running = offsets(terms)
        halves.append(running[end] - running[end - count])
    words[word] = halves[0] | (halves[1] << 32)
    return words


def set_places(words: Tensor) -> Tensor:
    """Words of any shape -> places of the set bits, ascending: the inverse of ``pack_bits``."""
    words = words.reshape(-1)
    used = torch.nonzero(words).squeeze(1)
    # Byte k of a word has bits 8k to 8k + 7 on every machine that torch supports.
    octets = words[used].view(torch.uint8).unsqueeze(1)
    present = (octets >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1
    octet, bit = torch.nonzero(present, as_tuple=True)
    return used[octet // 8] * WORD_BITS + octet % 8 * 8 + bit
