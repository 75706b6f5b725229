"""The CPU kernels' machine code: taken from the disk, else compiled by numba and kept there.

Code on disk is loaded with LLVM alone. numba takes ten times as long to import as llvmlite, and a
process whose kernels are all there never imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from sparsetile.core import settings
from sparsetile.core.files import PARTIAL, replacing

__all__ = ["Kernel", "load_kernel"]

log = logging.getLogger("sparsetile")

# Takes the numbers that `entries` lists, packed.
Kernel = Callable[[bytes], None]

_SOURCES = ("entries.py", "loops.py", "vector.py")
# Kernels on disk: a machine uses at most 32 of one version.
_MOST_FILES = 128
_DIGEST_BYTES = hashlib.sha256().digest_size

_loaded: dict[tuple[str, ...], Kernel] = {}
_engines: list[Any] = []  # an engine's code is freed with it
_lock = threading.Lock()
# What a kernel may write a result and an exception to; it has neither.
_RESULT, _EXCEPTION = ctypes.c_void_p(), ctypes.c_void_p()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is gone in the child may own the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def load_kernel(kernel: str, offset: str, index: str, element: str) -> Kernel:
    """Return a kernel of :mod:`loops` for types of row pointers, of columns, and of B."""
    key = (kernel, offset, index, element)
    with _lock:  # of two threads one compiles
        if key not in _loaded:
            _loaded[key] = _bind(*_find(key))
        return _loaded[key]


def _find(key: tuple[str, ...]) -> tuple[str, bytes]:
    """Return the symbol and the object file of a kernel."""
    path = settings.cpu_code_dir() / f"{'-'.join(key)}-{_fingerprint()}.o"
    with contextlib.suppress(OSError, ValueError):
        return _read(path)
    from sparsetile.kernels.cpu.entries import compile_entry  # imports numba

    log.info("compiling %s for this CPU: %s", key[0], ", ".join(key[1:]))
    symbol, code = compile_entry(*key)
    with contextlib.suppress(OSError):  # without a writable folder each process compiles
        _write(path, symbol, code)
    return symbol, code


@functools.cache
def _fingerprint() -> str:
    """Digest of all that machine code depends on: sources, compiler, processor."""
    folder = Path(__file__).parent
    parts = [
        *((folder / name).read_bytes() for name in _SOURCES),
        *(_version(package).encode() for package in ("numba", "llvmlite")),
        llvm.get_default_triple().encode(),
        llvm.get_host_cpu_name().encode(),
        llvm.get_host_cpu_features().flatten().encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # frozen applications may lack metadata
        return ""


def _read(path: Path) -> tuple[str, bytes]:
    content = path.read_bytes()
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:  # it would run, and give other results
        raise ValueError(f"{path} is damaged")
    symbol, _, code = body.partition(b"\n")
    return symbol.decode(), code


def _write(path: Path, symbol: str, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = symbol.encode() + b"\n" + code
    with replacing(path) as partial:
        partial.write_bytes(hashlib.sha256(body).digest() + body)
    files = [each for each in path.parent.iterdir() if each.suffix != PARTIAL]
    for old in sorted(files, key=lambda each: each.stat().st_mtime)[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


@functools.cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def _bind(symbol: str, code: bytes) -> Kernel:
    """Load an object file and return its function."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine().create_target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    # ctypes releases the interpreter lock during the call.
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    function = prototype(engine.get_function_address(symbol))
    return functools.partial(function, ctypes.addressof(_RESULT), ctypes.addressof(_EXCEPTION))
