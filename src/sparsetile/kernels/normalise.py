"""Host side of ``normalise.cu``: parameters and configurations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from sparsetile.jit.params import ParamStruct, f64, i32, pointer
from sparsetile.jit.source import ConfigValue
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.kernels.spec import KernelSpec

__all__ = [
    "GRADIENT", "NORMALISE", "NORMALISE_THREADS", "PULLS", "SCALES", "VALUES", "normalise_config",
]  # fmt: skip

# Stages, in the order of the kernel's list.
SCALES, VALUES, PULLS, GRADIENT = range(4)
NORMALISE_THREADS = 256
# Lanes of a row, and the most entries that they process alone.
_LANES, _ALONE = 8, 256


def normalise_config(dtype: torch.dtype, stage: int) -> dict[str, ConfigValue]:
    """Constants of ``normalise.cu`` for weights of a type."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "kStage": stage,
        "kThreads": NORMALISE_THREADS,
        "kLanes": _LANES,
        "kAlone": _ALONE,
    }


def _configs() -> Iterator[dict[str, ConfigValue]]:
    for dtype, stage in itertools.product(ELEMENTS, (SCALES, VALUES, PULLS, GRADIENT)):
        yield normalise_config(dtype, stage)


NORMALISE = KernelSpec(
    file="pack/normalise.cu",
    params=ParamStruct.of(
        pointer("indptr", "const i64*", "[rows + 1]"),
        pointer("columns", "const int*", "[entries]"),
        pointer("sources", "const int*", "[entries], which weight each has; null: its own number"),
        pointer("column_ptr", "const i64*", "[rows + 1], of the list by column"),
        pointer("order", "const int*", "[entries] by column"),
        pointer("weights", "const E::Storage*"),
        pointer("scales", "Acc*", "[rows]"),
        pointer("values", "Acc*", "[entries]"),
        pointer("grad", "const Acc*", "[entries], of the values"),
        pointer("pulls", "Acc*", "[rows], gradient of the rows' sums"),
        pointer("grad_weights", "E::Storage*"),
        f64("fill"),
        i32("rows"),
    ),
    configs=_configs,
    shared_memory=True,
)
