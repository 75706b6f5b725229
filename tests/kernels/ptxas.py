"""What the assembler says of a kernel: registers, spills, waits that it added."""

from __future__ import annotations

import io

from cuda.core import Program, ProgramOptions

from sparsetile.jit import KernelSource
from sparsetile.jit.source import DEVICE_TREE


def said_by_ptxas(source: KernelSource) -> str:
    """Compile for sm_90a, past the cache, and return the assembler's words."""
    options = ProgramOptions(
        name=source.entry, arch="sm_90a", std="c++17", include_path=str(DEVICE_TREE),
        ptxas_options=["-v"],
    )  # fmt: skip
    said = io.StringIO()
    Program(source.text(), "c++", options=options).compile("cubin", logs=said)
    return said.getvalue()
