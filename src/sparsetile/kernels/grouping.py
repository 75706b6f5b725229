"""Host side of ``group_entries.cu``: sizes of its tiles, digits and lists, and configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "COUNT", "GROUP_ENTRIES", "GROUP_THREADS", "MEAN", "MOST_GROUPED", "ROWS", "ROWS_OF_BLOCK",
    "SCATTER", "SYMMETRIC", "VALUES", "VALUE_TYPES", "Digits", "Lists", "group_config",
]  # fmt: skip

# Stages, in the order of the kernel's list, and rules of values.
COUNT, SCATTER, ROWS, VALUES = range(4)
SYMMETRIC, MEAN = range(2)
GROUP_THREADS = 256
_DIGIT_BITS = 10
# Rows of a thread block in the stage of rows: the last lane of a warp only ends the row before.
ROWS_OF_BLOCK = GROUP_THREADS // 32 * 31
# Types of values, by the number that stands for each.
VALUE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Entries of a tile: at least LEAST, so that tiles are not too many to be summed by each; at most
# MOST, because a warp's counters have 16 bits.
_LEAST_TILE, _MOST_TILE = 2048, 2**15
# Entries up to which the tiles' counts, which every tile sums, are a small part of the work.
MOST_GROUPED = 2**24
# Entries of a piece of a row: at least SEGMENT, and so many that there are at most about PIECES.
_SEGMENT, _PIECES = 64, 8192


def group_config(stage: int) -> dict[str, ConfigValue]:
    """Constants of ``group_entries.cu``."""
    return {"kStage": stage, "kThreads": GROUP_THREADS, "kDigitBits": _DIGIT_BITS}


class Digits(NamedTuple):
    """How keys are sorted: tiles of entries, and bits of each pass's digit.

    Attributes
    ----------
    tile, tiles : int
        Entries of a thread block, and how many blocks there are.
    widths : tuple of int
        Bits of each digit, the lowest first.
    """

    tile: int
    tiles: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, entries: int, keys: int, processors: int) -> Digits:
        """Return those of so many entries; there is a key behind the last, of dropped ones."""
        tile = min(max(-(-entries // processors), _LEAST_TILE), _MOST_TILE)
        bits = max(keys.bit_length(), 1)
        passes = -(-bits // _DIGIT_BITS)
        widths = [bits // passes + (place < bits % passes) for place in range(passes)]
        return cls(tile, max(-(-entries // tile), 1), tuple(widths))


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
    for stage in (COUNT, SCATTER, ROWS, VALUES):
        yield group_config(stage)


GROUP_ENTRIES = KernelSpec(
    file="pack/group_entries.cu",
    params=ParamStruct.of(
        pointer("keys", "const void*", "of the given entries"),
        pointer("others", "const void*"),
        pointer(
            "faults", "unsigned long long*", "where the host reads what is wrong; null: nowhere"
        ),
        pointer("counts", "int*", "[tiles][digits]"),
        pointer("keys_before", "const int*", "of the pass before, as the next two"),
        pointer("others_before", "const int*"),
        pointer("numbers_before", "const int*"),
        pointer("keys_after", "int*"),
        pointer("others_after", "int*"),
        pointer("numbers_after", "int*"),
        pointer("sorted", "int*", "[entries]"),
        pointer("columns", "int*", "[entries]"),
        pointer("order", "i64*", "[entries]; null: not wanted"),
        pointer("indptr", "i64*", "[keys + 1]"),
        pointer("items", "int4*", "[wide_items + row_items]"),
        pointer("parent_of_slot", "int*", "[2 * wide_items]"),
        pointer("nodes", "int4*", "[wide_items]"),
        pointer("values", "void*", "[entries]"),
        pointer("lengths", "const i64*", "row pointers whose rows' entries are counted"),
        i32("edges", "given entries"),
        i32("entries", "with added self-loops"),
        i32("key_count"),
        i32("other_count"),
        i32("tile"),
        i32("tiles"),
        i32("shift"),
        i32("width", "bits of the digit"),
        i32("first", "whether this pass reads what was given"),
        i32("last"),
        i32("segment"),
        i32("wide_items"),
        i32("row_items"),
        i32("wide", "given numbers have 64 bits, not 32"),
        i32("rule"),
        i32("value_type", "0: float32, 1: float16, 2: bfloat16"),
    ),
    configs=_configs,
    shared_memory=True,
)
