"""Host side of ``gather_rows.cu``: configurations and grid."""

from __future__ import annotations

from collections.abc import Iterator

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = ["GATHER_ROWS", "GATHER_THREADS", "WORD", "gather_config", "gather_grid"]

GATHER_THREADS = 128
# Bytes of an access.
WORD = 16
_LANES = (4, 8, 16, 32)
_IN_FLIGHT = 8


def gather_config(words: int) -> dict[str, ConfigValue]:
    """Constants of the kernel for rows of this many words of 16 bytes."""
    lanes = next((count for count in _LANES if count >= words), _LANES[-1])
    unroll = min(_IN_FLIGHT, lanes)  # a warp has 32 rows, 32 / lanes of them at a time
    return {"kLanes": lanes, "kUnroll": unroll, "kThreads": GATHER_THREADS}


def gather_grid(count: int) -> tuple[int, int, int]:
    """One thread per row."""
    return (-(-count // GATHER_THREADS), 1, 1)


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for lanes in _LANES:
        yield gather_config(lanes)


GATHER_ROWS = KernelSpec(
    file="pack/gather_rows.cu",
    params=ParamStruct.of(
        pointer("b", "const char*"),
        pointer("to", "char*"),
        pointer("rows", "const int*"),
        i64("b_row_bytes"),
        i64("to_row_bytes"),
        i64("count", "rows of the result"),
        i32("words", "of 16 bytes in a row"),
    ),
    configs=_configs,
)
