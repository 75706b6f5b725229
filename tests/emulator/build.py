"""Compile a kernel for the host and launch it like a loaded one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsetile.jit.source import DEVICE_TREE, ConfigValue, device_tree_digest
from sparsetile.kernels import KernelSpec

__all__ = ["HostKernel", "HostLaunch", "cache_key", "host_compiler", "runs_on_host"]

HERE = Path(__file__).parent
_ENTRY = """
extern "C" void run_on_host(const void* params, unsigned x, unsigned y, unsigned z, unsigned t) {
  static Params p;
  std::memcpy(&p, params, sizeof(p));
  run_grid({x, y, z}, t, [] { KERNEL(p); });
}
"""
# A function of mma.cuh, and an instruction in another one.
_FUNCTION = r"(?:template <bool kBrain>\n)?__device__ __forceinline__ \w+ {name}\(.*?\n}}\n"
_ASSEMBLY = re.compile(r"asm\(.*?\);", re.DOTALL)
# Files of the device tree whose instructions are emulated.
_MMA, _PTX = "mma/mma.cuh", "ptx/ptx.cuh"
# What stands for ptx.cuh has these loads, too.
_MATRICES = "ptx/matrices.cuh"
_ELEMENT = "ptx/element.cuh"
# Shared memory of the size that a launch gives: here of the most that a GPU has.
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?char (\w+)\[\];")
# -O1 would take longer to compile than it saves in the short runs of tests.
_OPTIMISED = "-Og"
_INCLUDE = re.compile(r'#include "([\w/]+\.cuh)"')


def host_compiler() -> str | None:
    """Return a C++ compiler of this machine."""
    return shutil.which("g++")


def runs_on_host(spec: KernelSpec) -> bool:
    """Whether all instructions of a kernel are emulated: its files have no other assembly."""
    files, found = {spec.file}, set[str]()
    while files:
        name = files.pop()
        found.add(name)
        text = (DEVICE_TREE / name).read_text()
        if name not in (_MMA, _PTX, _MATRICES) and re.search(r"\basm\b", text):
            return False
        files |= set(_INCLUDE.findall(text)) - found
    return True


def _emulated_instructions(text: str) -> str:
    """mma.cuh with its functions emulated; other instructions end the program."""
    for name in ("round_tf32", "mma_tf32", "mma_16_bit", "multiply_16"):
        text, count = re.subn(_FUNCTION.format(name=name), "", text, flags=re.DOTALL)
        if count != 1:
            raise RuntimeError(
                f"emulator: mma.cuh must define {name} once, got {count}. See build.py."
            )
    text = _ASSEMBLY.sub("std::abort();", text)
    first = '#include "ptx/element.cuh"\n'
    return text.replace(first, first + (HERE / "instructions.cuh").read_text(), 1)


def _with_no_word(text: str) -> str:
    """element.cuh with a word of no bytes: g++ reads the types of templates that nobody uses."""
    declared = "struct WordOf;\n"
    if text.count(declared) != 1:
        raise RuntimeError("emulator: element.cuh must declare WordOf once. See build.py.")
    return text.replace(
        declared, f"{declared}template <>\nstruct WordOf<0> {{ using Type = u32; }};\n"
    )


def cache_key() -> str:
    """Return a digest of all that a library depends on beside its own text."""
    found = hashlib.sha256(device_tree_digest().encode())
    for path in sorted([Path(__file__), *HERE.glob("*.h"), *HERE.glob("*.cuh")]):
        found.update(path.read_bytes())
    asked = [str(host_compiler()), "--version"]
    found.update(subprocess.run(asked, capture_output=True, check=True, timeout=60).stdout)
    return found.hexdigest()[:16]


def _compile(language: str, source: Path, made: Path, *options: str) -> None:
    """Compile a file; another process may make the same one, so that it appears whole."""
    partial = made.with_name(f"{made.name}.{os.getpid()}")
    # Each library has its own shared memory, also where a variable's name is the same.
    command = [str(host_compiler()), "-std=c++20", "-w", "-fpermissive", "-pthread"]
    command += ["-fno-gnu-unique", "-fPIC", *options, "-o", str(partial), "-x", language]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    partial.replace(made)


def _device_tree(folder: Path) -> Path:
    """Copy the device code, with the emulator's files in place of assembly.

    The header of CUDA's words and the scheduler are compiled here once: each takes longer than
    most kernels.
    """
    tree = folder / "device"
    if not tree.exists():
        work = Path(tempfile.mkdtemp(dir=folder))
        partial = work / "device"
        shutil.copytree(DEVICE_TREE, partial)
        shutil.copy(HERE / "ptx.cuh", partial / _PTX)
        (partial / _MATRICES).write_text('#pragma once\n#include "ptx/ptx.cuh"\n')
        element = partial / _ELEMENT
        element.write_text(_with_no_word(element.read_text()))
        mma = partial / _MMA
        mma.write_text(_emulated_instructions(mma.read_text()))
        for name in ("host_cuda.h", "host_threads.h", "host_steps.h"):
            shutil.copy(HERE / name, partial / name)
        words, threads, steps = "host_cuda.h.gch", "host_threads.so", "host_steps.o"
        _compile("c++-header", partial / "host_cuda.h", partial / words, _OPTIMISED)
        _compile("c++", partial / "host_threads.h", partial / threads, "-O2", "-shared")
        _compile("c++", partial / "host_steps.h", partial / steps, _OPTIMISED, "-c")
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(tree)
        shutil.rmtree(work)
    return tree


@functools.cache
def _scheduler(tree: Path) -> ctypes.CDLL:
    """Load what kernels find their threads in, and the C++ library that it is linked to."""
    return ctypes.CDLL(str(tree / "host_threads.so"), mode=ctypes.RTLD_GLOBAL)


class HostKernel:
    """One configuration of a kernel, compiled for the host in ``folder``.

    With ``counted``, :attr:`steps` says how many basic blocks of the code each thread has run: a
    measure of a kernel's work that is the same in every run.
    """

    def __init__(
        self,
        spec: KernelSpec,
        config: Mapping[str, ConfigValue],
        folder: Path,
        counted: bool = False,
    ) -> None:
        text = '#include "host_cuda.h"\n' + spec.source(config).text()
        text += _ENTRY.replace("KERNEL", spec.name)
        text = _DYNAMIC.sub(r"alignas(1024) static char \1[228 * 1024];", text)
        options = ["-fsanitize-coverage=trace-pc"] if counted else []
        name = hashlib.sha256("".join([text, *options]).encode()).hexdigest()[:16]
        library, tree = folder / f"{name}.so", _device_tree(folder)
        if not library.exists():
            source = folder / f"{name}.{os.getpid()}.cpp"
            source.write_text(text)
            options += [str(tree / "host_steps.o")] if counted else []
            options += [_OPTIMISED, "-shared", "-nostdlib", "-Wl,-Bsymbolic", "-I", str(tree)]
            _compile("c++", source, library, *options)
            source.unlink()
        _scheduler(tree)
        self.library = ctypes.CDLL(str(library))
        self.name, self.params = spec.name, spec.params
        self._counts: Sequence[int] = []
        self._before: Sequence[int] = []
        if counted:
            self._counts = (ctypes.c_ulonglong * 1024).in_dll(self.library, "counted_steps")
            self._before = list(self._counts)  # a library is loaded once

    @property
    def steps(self) -> list[int]:
        """Basic blocks run by each thread of a block, in all launches since this was made."""
        return [now - before for now, before in zip(self._counts, self._before, strict=True)]

    def launch(
        self, grid: tuple[int, int, int], threads: int, stream: int, params: Any, **_: Any
    ) -> None:
        """Run the grid; ends when it has ended."""
        packed = ctypes.create_string_buffer(self.params.size)
        self.params.pack_into(packed, params)
        self.library.run_on_host(packed, *grid, threads)

    def prepare(
        self,
        grid: tuple[int, int, int],
        threads: int,
        params: Mapping[str, Any],
        patch: Sequence[str],
        rare: Sequence[str] = (),
        **_: Any,
    ) -> HostLaunch:
        """Return a launch of which the fields named in ``patch`` and ``rare`` change a call."""
        return HostLaunch(self, grid, threads, dict(params), patch, rare)


class HostLaunch:
    """A launch that lacks the fields of ``patch``."""

    def __init__(
        self,
        kernel: HostKernel,
        grid: tuple[int, int, int],
        threads: int,
        params: dict[str, Any],
        patch: Sequence[str],
        rare: Sequence[str],
    ) -> None:
        self._kernel, self._sizes = kernel, (*grid, threads)
        self._rare = kernel.params.patch(*rare) if rare else None
        self._patch = kernel.params.patch(*patch)
        self._buffer = ctypes.create_string_buffer(kernel.params.size)
        kernel.params.pack_into(self._buffer, params)

    def launch_sized(self, stream: int, blocks: int, rare: tuple[int, ...], *values: Any) -> None:
        """The same with another first dimension of the grid, and other ``rare`` values."""
        self._sizes = (blocks, *self._sizes[1:])
        if self._rare is not None:
            self._rare.bind(self._buffer)(*rare)
        self.launch(stream, *values)

    def launch_with(self, stream: int, rare: tuple[int, ...], *values: Any) -> None:
        """The same with other ``rare`` values."""
        self.launch_sized(stream, self._sizes[0], rare, *values)

    def launch(self, stream: int, *values: Any) -> None:
        """Run the grid with these values; ends when it has ended."""
        self._patch.bind(self._buffer)(*values)
        self._kernel.library.run_on_host(self._buffer, *self._sizes)
