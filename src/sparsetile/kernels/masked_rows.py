"""Kernels that read kept weights with the bits of their places, a warp for each row.

``pack_entries.cu`` packs them for ``linear_entries.cu``, ``spread_masked.cu`` writes the dense
weight, ``linear_masked.cu`` multiplies with a token or a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.linear_entries import ENTRY_TYPES, LONGEST_GAP
from sparsetile.kernels.params import OPERANDS, ROW_BIAS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "LINEAR_MASKED", "MASKED_TOKENS", "MASKED_WARPS", "PACK_ENTRIES", "SPREAD_MASKED",
    "SPREAD_WARPS", "masked_config", "masked_shared", "pack_capacity", "pack_config",
    "pack_shared_bytes", "spread_config",
]  # fmt: skip

SPREAD_WARPS = MASKED_WARPS = 8
# Most tokens of ``linear_masked.cu``, and the numbers that it is compiled for.
MASKED_TOKENS = 4
_TOKENS = (1, 2, 4)
_COLUMNS = 1024  # of a row at once
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


def masked_config(dtype: torch.dtype, tokens: int) -> dict[str, ConfigValue]:
    """Constants of ``linear_masked.cu`` for this many tokens."""
    compiled = next(each for each in _TOKENS if tokens <= each)
    return {"ELEMENT": ELEMENTS[dtype], "kTokens": compiled, "kWarps": MASKED_WARPS}


def masked_shared(tokens: int, cols: int) -> tuple[int, int]:
    """Columns of X in shared memory, and its bytes."""
    compiled = next(each for each in _TOKENS if tokens <= each)
    padded = -(-cols // _COLUMNS) * _COLUMNS
    return padded, 2 * compiled * padded


def _masked_configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, tokens in itertools.product(ENTRY_TYPES, _TOKENS):
        yield masked_config(dtype, tokens)


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

LINEAR_MASKED = KernelSpec(
    file="block_sparse/linear_masked.cu",
    params=ParamStruct.of(
        *(OPERANDS[0], pointer("c", "E::Storage*")),
        *_BITS,
        *ROW_BIAS,
        i64("x_stride", "of rows of X (b), in elements"),
        i64("c_stride", "of rows of Y (c)"),
        i32("rows"),
        i32("cols"),
        i32("row_bytes"),
        i32("padded", "columns of X in shared memory"),
        i32("n", "tokens"),
    ),
    configs=_masked_configs,
    shared_memory=True,
)
