"""Kernels that read kept weights with the bits of their places, a warp for each row.

``pack_entries.cu`` packs them for ``linear_entries.cu``, ``spread_masked.cu`` writes the dense
weight.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparsetile.jit.params import ParamStruct, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.linear_entries import LONGEST_GAP
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "PACK_ENTRIES", "SPREAD_MASKED", "SPREAD_WARPS", "pack_capacity", "pack_config",
    "pack_shared_bytes", "spread_config",
]  # fmt: skip

SPREAD_WARPS = 8
_BITS = (
    pointer("bits", "const unsigned char*", "[rows][row_bytes]: column 8 b + i is bit i of byte b"),
    pointer("weight", "const u16*", "kept weights, row by row"),
    pointer("kept_begin", "const i64*", "[rows + 1]: kept weights before each row"),
)


def pack_capacity(cols: int) -> int:
    """Most entries of a row, those between far ones and a last step included; whole 16."""
    return -(-(cols + cols // LONGEST_GAP + 16) // 16) * 16


def pack_shared_bytes(cols: int) -> int:
    """Shared memory of a packing warp: values of 16 bits and gaps of 8."""
    return 3 * pack_capacity(cols)


def pack_config(count: bool) -> dict[str, ConfigValue]:
    """Constants of ``pack_entries.cu``; ``count``: only the lengths."""
    return {"kCount": count}


def spread_config() -> dict[str, ConfigValue]:
    """Constants of ``spread_masked.cu``."""
    return {"kWarps": SPREAD_WARPS}


def _pack_configs() -> Iterator[dict[str, ConfigValue]]:
    for count in (True, False):
        yield pack_config(count)


def _spread_configs() -> Iterator[dict[str, ConfigValue]]:
    yield spread_config()


PACK_ENTRIES = KernelSpec(
    file="block_sparse/pack_entries.cu",
    params=ParamStruct.of(
        *_BITS,
        pointer("row_ids", "const int*", "[strips][32]; -1 for none; unused if only counting"),
        pointer("offsets", "const int*", "[strips + 1]: first step of each strip"),
        pointer("lengths", "int*", "[rows]: entries; written if only counting"),
        pointer("kept_counts", "int*", "[rows]: kept weights; written if only counting"),
        pointer("stream", "char*"),
        pointer("starts", "int*", "[strips][parts][32]"),
        i32("cols"),
        i32("row_bytes"),
        i32("parts"),
        i32("capacity", "entries in shared memory"),
    ),
    configs=_pack_configs,
    shared_memory=True,
)

SPREAD_MASKED = KernelSpec(
    file="block_sparse/spread_masked.cu",
    params=ParamStruct.of(
        *_BITS,
        pointer("dense", "u16*", "[rows][cols]"),
        i32("rows"),
        i32("cols"),
        i32("row_bytes"),
    ),
    configs=_spread_configs,
)
