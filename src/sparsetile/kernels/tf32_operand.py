"""Host side of ``tf32_operand.cu``: configurations and grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sparsetile.jit.params import ParamStruct, i32, i64, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.spec import KernelSpec

__all__ = ["OPERAND_THREADS", "TF32_OPERAND", "operand_config", "operand_grid"]

OPERAND_THREADS = 256
# Elements of an access if B is aligned.
VECTOR = 4
_TILE = 64


def operand_config(k_major: bool, vector: int) -> dict[str, ConfigValue]:
    """Constants of the kernel; ``k_major``: B is K-major already and is only rounded."""
    return {"kKMajor": k_major, "kVector": vector, "kThreads": OPERAND_THREADS}


def operand_grid(k: int, n: int) -> tuple[int, int, int]:
    """Tiles of 64 x 64 elements."""
    return (-(-k // _TILE) * -(-n // _TILE), 1, 1)


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for k_major, vector in itertools.product((False, True), (VECTOR, 1)):
        yield operand_config(k_major, vector)


TF32_OPERAND = KernelSpec(
    file="pack/tf32_operand.cu",
    params=ParamStruct.of(
        pointer("b", "const float*"),
        pointer("to", "float*"),
        i64("k_stride", "of b, in elements"),
        i64("n_stride", "of b"),
        i64("to_stride", "of a row of `to`"),
        i32("k"),
        i32("n"),
    ),
    configs=_configs,
    architectures=("sm_90a",),
    shared_memory=True,
)
