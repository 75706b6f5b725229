"""Kernels around the headers of ``windows/``: sources, and the cases that are tested."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch

from sparsetile.jit import KernelSource
from sparsetile.jit.params import i32, i64, pointer
from tests.kernels.device.primitives import MMA_TYPES, NAMES, primitive

_primitive = partial(primitive, Path(__file__).parent)


def exact(dtype: torch.dtype, chains: int, pieces: int = 1, batch: int = 2) -> KernelSource:
    return _primitive(
        "exact",
        {"ELEMENT": NAMES[dtype], "kChains": chains, "kPieces": pieces, "kBatch": batch},
        pointer("cells", "const int*", "[tiles, 16, 8], not 0: an entry"),
        pointer("raw", "const u32*", "its bits"),
        pointer("columns", "const int*"),
        pointer("b", "const E::Storage*"),
        pointer("out", "float*", "[16, n]"),
        pointer("failed", "int*", "of each thread"),
        i64("b_row_bytes"),
        i32("tiles"),
        i32("n"),
    )


def windows() -> KernelSource:
    return _primitive(
        "windows",
        {},
        pointer("items", "const int4*"),
        pointer("offsets", "const int*"),
        pointer("stored", "int*"),
        pointer("redone", "int*"),
        i64("bad"),
    )


EXACTS = tuple(itertools.product(MMA_TYPES, (1, 4)))

SOURCES = (
    *(exact(*case) for case in EXACTS),
    windows(),
)
