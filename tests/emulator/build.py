"""Compile a kernel for the host and launch it like a loaded one."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsetile.jit.source import DEVICE_TREE, ConfigValue
from sparsetile.kernels import KernelSpec

__all__ = ["HostKernel", "host_compiler"]

HERE = Path(__file__).parent
_ENTRY = """
extern "C" void run_on_host(const void* params, unsigned x, unsigned y, unsigned z, unsigned t) {
  Params p;
  std::memcpy(&p, params, sizeof(p));
  run_grid({x, y, z}, t, [&] { KERNEL(p); });
}
"""
# A function of mma.cuh, and an instruction in another one.
_FUNCTION = r"(?:template <bool kBrain>\n)?__device__ __forceinline__ \w+ {name}\(.*?\n}}\n"
_ASSEMBLY = re.compile(r"asm\(.*?\);", re.DOTALL)


def host_compiler() -> str | None:
    """Return a C++ compiler of this machine."""
    return shutil.which("g++")


def _emulated_instructions(text: str) -> str:
    """mma.cuh with its functions emulated; other instructions end the program."""
    for name in ("round_tf32", "mma_tf32", "mma_16_bit", "multiply_16"):
        text, count = re.subn(_FUNCTION.format(name=name), "", text, flags=re.DOTALL)
        if count != 1:
            raise RuntimeError(
                f"emulator: mma.cuh must define {name} once, got {count}. See build.py."
            )
    text = _ASSEMBLY.sub("std::abort();", text)
    first = '#include "element.cuh"\n'
    return text.replace(first, first + (HERE / "instructions.cuh").read_text(), 1)


def _device_tree(folder: Path) -> Path:
    """Copy the device code, with the emulator's files in place of assembly."""
    tree = folder / "device"
    if not tree.exists():
        partial = folder / "partial"
        shutil.copytree(DEVICE_TREE, partial)
        shutil.copy(HERE / "ptx.cuh", partial / "ptx.cuh")
        mma = partial / "mma.cuh"
        mma.write_text(_emulated_instructions(mma.read_text()))
        partial.rename(tree)
    return tree


class HostKernel:
    """One configuration of a kernel, compiled for the host in ``folder``."""

    def __init__(self, spec: KernelSpec, config: Mapping[str, ConfigValue], folder: Path) -> None:
        text = f'#include "{HERE / "host_cuda.h"}"\n' + spec.source(config).text()
        text += _ENTRY.replace("KERNEL", spec.name)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        library = folder / f"{name}.so"
        if not library.exists():
            source = folder / f"{name}.cpp"
            source.write_text(text)
            # Each library has its own shared memory, also where a variable's name is the same.
            command = [str(host_compiler()), "-std=c++20", "-O1", "-w", "-fpermissive", "-pthread"]
            command += ["-fno-gnu-unique", "-Wl,-Bsymbolic", "-shared", "-fPIC"]
            command += ["-I", str(_device_tree(folder)), "-o", str(library), str(source)]
            subprocess.run(command, check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))
        self._params = spec.params

    def launch(
        self, grid: tuple[int, int, int], threads: int, stream: int, params: Any, **_: Any
    ) -> None:
        """Run the grid; ends when it has ended."""
        packed = ctypes.create_string_buffer(self._params.size)
        self._params.pack_into(packed, params)
        self._library.run_on_host(packed, *grid, threads)
