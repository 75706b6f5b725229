"""What the assembler says of a kernel: registers, spills, waits that it added."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import cuda.core
from cuda.core import Program, ProgramOptions
from tools.compile_all import FIELDS, FOLDER

from sparsetile.jit import KernelSource, nvrtc_version
from sparsetile.jit.source import DEVICE_TREE, device_tree_digest

Anything = TypeVar("Anything")
# Where words are kept between runs; None where pytest has no cache.
kept: Path | None = None


def drawn(everything: Sequence[Anything], count: int) -> list[Anything]:
    """Return some at random, each sooner or later: compiling all would take minutes.

    results/compile has the registers and spills of every configuration, checked against the code.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of what was drawn: {seed}")  # pytest shows it where the test fails
    return random.Random(seed).sample(list(everything), min(count, len(everything)))


@functools.cache
def _records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def recorded(source: KernelSource, arch: str = "sm_90a") -> list[dict[str, int]]:
    """Return the registers, spills and shared memory of a configuration, from each record of
    results/compile: tests/tools/test_compile_record.py checks that they are of today's code."""
    records = _records()
    assert records
    numbers = [each["configurations"][source.label][arch] for each in records]
    return [dict(zip(FIELDS, each, strict=True)) for each in numbers]


def said_by_ptxas(source: KernelSource) -> str:
    """Compile for sm_90a, past the kernels' cache, and return the assembler's words.

    They are the same whenever text, device tree and compiler are: those name the file that they
    are kept in.
    """
    asked = {"arch": "sm_90a", "std": "c++17", "ptxas_options": ["-v"]}
    parts = (source.text(), source.entry, device_tree_digest(), asked)
    compiler = (nvrtc_version(), cuda.core.__version__)
    name = hashlib.sha256(repr((parts, compiler)).encode()).hexdigest()[:32]
    path = None if kept is None else kept / name
    if path is not None and path.is_file():
        return path.read_text()
    options = ProgramOptions(name=source.entry, include_path=str(DEVICE_TREE), **asked)
    said = io.StringIO()
    Program(source.text(), "c++", options=options).compile("cubin", logs=said)
    if path is not None:
        partial = path.with_name(f"{name}.{os.getpid()}")
        partial.write_text(said.getvalue())
        partial.replace(path)  # whole, whoever else writes it
    return said.getvalue()
