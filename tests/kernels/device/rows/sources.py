"""Kernels around the headers of ``rows/``: sources, and the cases that are tested."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

from sparsetile.jit import KernelSource
from sparsetile.jit.params import pointer
from sparsetile.kernels.params import TREE
from tests.kernels.device.primitives import primitive

_primitive = partial(primitive, Path(__file__).parent)


def tree(lanes: int, words: int) -> KernelSource:
    return _primitive(
        "tree",
        {"kLanes": lanes, "kWords": words},
        pointer("leaves", "const u32*", "[layers, pieces, kLanes, kWords]"),
        pointer("out", "u32*", "[layers, kLanes, kWords]"),
        *TREE,
    )


TREES = tuple(itertools.product((8, 32), (1, 2, 4, 12, 20)))

SOURCES = (*(tree(*case) for case in TREES),)
