"""Host side of ``group_entries.cu``: sizes of its tiles and lists, and configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "BLOCKS_PER_SM", "GROUP_ENTRIES", "GROUP_THREADS", "MEAN", "MOST_GROUPED", "SYMMETRIC",
    "VALUE_TYPES", "Lists", "Tiles", "group_config",
]  # fmt: skip

# Rules of values, in the order of the kernel's list.
SYMMETRIC, MEAN = range(2)
# All blocks run at once: shared memory of 100 KiB an SM holds three.
GROUP_THREADS, BLOCKS_PER_SM = 256, 3
_DIGIT_BITS = 10
# Types of values, by the number that stands for each.
VALUE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Entries of a tile: a warp of the least has four steps; its counters have 16 bits.
_LEAST_TILE, _MOST_TILE = 1024, 2**15
# Most entries; of more no graph was measured.
MOST_GROUPED = 2**24
# Entries of a piece of a row: at least SEGMENT, and so many that there are at most about PIECES.
_SEGMENT, _PIECES = 64, 8192


def group_config(values: bool) -> dict[str, ConfigValue]:
    """Constants of ``group_entries.cu``: it makes values, or groups entries."""
    return {
        "kValues": values,
        "kThreads": GROUP_THREADS,
        "kMinBlocks": BLOCKS_PER_SM,
        "kDigitBits": _DIGIT_BITS,
    }


class Tiles(NamedTuple):
    """Entries of a tile, how many tiles there are, and numbers of their counts."""

    tile: int
    tiles: int
    room: int

    @classmethod
    def of(cls, entries: int, keys: int, processors: int) -> Tiles:
        """Return those of so many entries, with up to so many keys."""
        blocks = processors * BLOCKS_PER_SM
        tile = min(max(-(-entries // blocks), _LEAST_TILE), _MOST_TILE)
        count = max(-(-entries // tile), 1)
        # A key behind the last one stands for entries that are left out.
        digits = 1 << min(max(keys.bit_length(), 1), _DIGIT_BITS)
        return cls(tile, count, digits * (count + 1))


class Lists(NamedTuple):
    """Sizes of a schedule that is made on the GPU: all that may be needed.

    Attributes
    ----------
    segment : int
        Longer rows are cut, into pieces of at most so many entries.
    wide, rows : int
        Items of pieces, and of rows; slots and nodes of trees are as many as pieces, twice and
        once.
    """

    segment: int
    wide: int
    rows: int

    @classmethod
    def of(cls, entries: int, rows: int) -> Lists:
        """Return those of a matrix; sizes are rounded up, so that like matrices have the same."""
        segment = _SEGMENT
        while segment * _PIECES < entries:
            segment *= 2
        return cls(segment, _rounded(2 * entries // segment + 1), _rounded(max(rows, 1)))


def _rounded(number: int) -> int:
    """Return a number that is not less, with at most four significant bits."""
    step = 1 << max(number.bit_length() - 4, 0)
    return -(-number // step) * step


def _configs() -> Iterator[dict[str, ConfigValue]]:
    yield group_config(False)
    yield group_config(True)


# Where rows of one direction go; those of the other have names with t_.
_RESULTS = (
    ("sorted", "int*", "[entries]"),
    ("columns", "int*", "[entries]"),
    ("order", "i64*", "[entries]; null: not wanted"),
    ("indptr", "i64*", "[keys + 1]"),
    ("items", "int4*", "[wide_items + row_items]; null: not wanted"),
    ("parent_of_slot", "int*", "[2 * wide_items]"),
    ("nodes", "int4*", "[wide_items]"),
    ("values", "void*", "[entries]; null: not wanted"),
)
GROUP_ENTRIES = KernelSpec(
    file="pack/group_entries.cu",
    params=ParamStruct.of(
        pointer("keys", "const void*", "of the given entries"),
        pointer("others", "const void*"),
        pointer("pointers", "const void*", "row pointers in place of others; null: not given"),
        pointer(
            "faults", "unsigned long long*", "where the host reads what is wrong; null: nowhere"
        ),
        pointer("arrivals", "int*", "of the grid's barrier"),
        pointer("counts", "int*", "[digits][tiles], then [digits]"),
        pointer("between", "int*", "[2][3][entries], between two passes"),
        *(pointer(*each) for each in _RESULTS),
        *(pointer(f"t_{name}", *more) for name, *more in _RESULTS),
        i32("edges", "given entries"),
        i32("entries", "with added self-loops"),
        i32("key_count"),
        i32("other_count"),
        i32("tile"),
        i32("tiles"),
        i32("segment"),
        i32("wide_items"),
        i32("row_items"),
        i32("t_row_items"),
        i32("sorts", "whether to group what is given"),
        i32("transposes", "whether to group the entries of A"),
        i32("wide", "given numbers have 64 bits, not 32"),
        i32("wide_pointers"),
        i32("rule"),
        i32("value_type", "0: float32, 1: float16, 2: bfloat16"),
    ),
    configs=_configs,
    shared_memory=True,
)
