"""Run-time compiler: source tree + configuration -> loaded kernel. The only importer of cuda.*.

Nothing here imports cuda.core until a kernel is compiled, so ``import sparsetile`` stays free of
CUDA on machines without it.
"""

from __future__ import annotations

from sparsetile.jit.compiler import (
    ARCHITECTURES,
    Compiled,
    NotCompiled,
    Resources,
    compile_source,
    compiler_available,
    nvrtc_version,
    without_compiling,
)
from sparsetile.jit.loader import LoadedKernel, device_arch, load
from sparsetile.jit.params import ParamStruct
from sparsetile.jit.source import KernelSource, config_header, device_tree_digest
from sparsetile.jit.tensor_map import encode_matrix

__all__ = [
    "ARCHITECTURES", "Compiled", "KernelSource", "LoadedKernel", "NotCompiled", "ParamStruct",
    "Resources", "compile_source", "compiler_available", "config_header", "device_arch",
    "device_tree_digest", "encode_matrix", "load", "nvrtc_version", "without_compiling",
]  # fmt: skip
