"""Source + architecture -> cubin, through NVRTC and cuda.core's program cache.

The cache is cuda.core's ``FileStreamProgramCache`` (atomic writes, least-recently-read eviction,
safe between processes). Beside each cubin it keeps a small report: the cubin's digest and ptxas's
figures. A cubin whose digest does not match its report is compiled again, so a damaged cache only
costs a compilation. Compiling needs neither a GPU nor nvcc.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sparsetile.core import settings
from sparsetile.core.errors import CompileError, value_error
from sparsetile.jit.source import DEVICE_TREE, KernelSource, device_tree_digest

if TYPE_CHECKING:
    from cuda.core.utils import FileStreamProgramCache

__all__ = [
    "ARCHITECTURES", "Compiled", "NotCompiled", "Resources", "compile_source", "compiler_available",
    "nvrtc_version", "without_compiling",
]  # fmt: skip

log = logging.getLogger("sparsetile")
# cuda.core fills its namespace while it is imported: two threads must not import it at once.
_IMPORT_LOCK = threading.Lock()

_may_compile = contextvars.ContextVar("_may_compile", default=True)


class NotCompiled(RuntimeError):
    """A kernel is not in the cache, and compiling is not allowed here."""


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """Raise ``NotCompiled`` if a kernel would have to be compiled."""
    token = _may_compile.set(False)
    try:
        yield
    finally:
        _may_compile.reset(token)


# Architectures that the tests compile every kernel for. The "a" targets add the
# instructions of one chip (wgmma and setmaxnreg on sm_90a).
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")


@dataclass(frozen=True)
class Resources:
    """ptxas's report of one kernel."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class Compiled:
    """A cubin with its resource report; ``seconds`` is 0.0 if it came from the cache.

    For a virtual architecture, such as ``compute_80``, the report is empty, and ``cubin`` is PTX if
    it was not assembled for a real one.
    """

    source: KernelSource
    arch: str
    cubin: bytes
    resources: Resources
    seconds: float
    from_cache: bool

    @property
    def virtual(self) -> bool:
        return self.arch.startswith("compute_")

    @property
    def is_ptx(self) -> bool:
        return not self.cubin.startswith(b"\x7fELF")


def compiler_available() -> str | None:
    """Return None if NVRTC and cuda.core work here, else the reason why they do not."""
    try:
        nvrtc_version()
    except Exception as error:  # whatever the loader raises is the reason
        return f"{type(error).__name__}: {error}"
    return None


@functools.lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC that compiles here."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion answered {status}")
    return int(major), int(minor)


def open_cache() -> FileStreamProgramCache:
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(settings.cache_dir(), max_size_bytes=settings.cache_limit_bytes())


def _cache_if_usable() -> FileStreamProgramCache | None:
    try:
        return open_cache()
    except OSError as error:  # without a writable folder there is no cache
        log.info("kernel cache %s not used: %s", settings.cache_dir(), error)
        return None


def _parse_resources(text: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    def total(pattern: str) -> int:
        """Sum over the kernel and every function that it calls."""
        return sum(map(int, re.findall(pattern, text)))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_store_bytes=total(r"(\d+) bytes spill stores"),
        spill_load_bytes=total(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
    )


def _report(cubin: bytes, resources: Resources) -> bytes:
    body = {"sha256": hashlib.sha256(cubin).hexdigest(), "resources": asdict(resources)}
    return json.dumps(body).encode()


def _read_cached(
    cache: FileStreamProgramCache, key: bytes, report_key: bytes
) -> tuple[bytes, Resources] | None:
    """Return the cached cubin, or None if it is missing or damaged."""
    try:
        cubin, report = cache.get(key), cache.get(report_key)
        if cubin is None or report is None:
            return None
        body = json.loads(bytes(report))
        if hashlib.sha256(bytes(cubin)).hexdigest() != body["sha256"]:
            return None
        return bytes(cubin), Resources(**body["resources"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _assembled(ptx: bytes, entry: str, arch: str) -> bytes:
    """Return the cubin of PTX, or the PTX if this linker is older than the NVRTC that made it."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(name=entry, arch=arch)
    try:
        program = Program(ptx.decode().rstrip("\0"), "ptx", options=options)
        return bytes(program.compile("cubin").code)
    except Exception as error:  # the driver assembles it then, in each process
        log.info("PTX of %s not assembled for %s: %s", entry, arch, error)
        return ptx


def compile_source(
    source: KernelSource, arch: str, *, use_cache: bool = True, assemble_for: str = ""
) -> Compiled:
    """Compile one kernel to a cubin for ``arch`` (for example ``sm_90a``), or to PTX for a virtual
    one (``compute_80``).

    With ``assemble_for`` (``sm_90``) the PTX of a virtual one is assembled to a cubin, which is
    cached. The driver takes PTX too, but assembles it again in every process that loads it, which
    takes about as long as NVRTC.

    CompileError carries NVRTC's log and the source's path. Inside ``without_compiling``,
    NotCompiled says that it is not in the cache.
    """
    try:
        with _IMPORT_LOCK:
            from cuda.core import Program, ProgramOptions
            from cuda.core.utils import make_program_cache_key
    except ImportError as error:
        raise CompileError(
            f"compile: cuda-core must be installed to run kernels, got {error}. Install cuda-core "
            "and nvidia-cuda-nvrtc (on Windows in WSL 2), or use the CPU.",
            source_path=str(source.path),
        ) from error

    if not re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", arch):
        raise value_error(
            "compile", "arch", "a name such as sm_80 or sm_90a", repr(arch), "Give one of those"
        )
    virtual = arch.startswith("compute_")
    target = "ptx" if virtual else "cubin"
    options = ProgramOptions(
        name=source.entry,
        arch=arch,
        std="c++17",
        include_path=str(DEVICE_TREE),
        ptxas_options=None if virtual else ["-v"],
        ftz=False,
    )
    text = source.text()
    key = make_program_cache_key(
        code=text,
        code_type="c++",
        options=options,
        target_type=target,
        extra_digest=bytes.fromhex(device_tree_digest()),
    )
    if assemble_for:  # this key also has the linker's version
        key = make_program_cache_key(
            code=key.hex(),
            code_type="ptx",
            options=ProgramOptions(name=source.entry, arch=assemble_for),
            target_type="cubin",
        )
    report_key = hashlib.sha256(key + b"report").digest()
    cache = _cache_if_usable() if use_cache else None
    try:
        if cache is not None:
            found = _read_cached(cache, key, report_key)
            if found is not None:
                return Compiled(source, arch, found[0], found[1], 0.0, True)
        if not _may_compile.get():
            raise NotCompiled(f"compile: {source.label} is not compiled for {arch} yet.")
        log.info("compiling %s for %s", source.label, arch)
        started = time.perf_counter()
        ptxas_log = io.StringIO()
        try:
            program = Program(text, "c++", options=options)
            cubin = bytes(program.compile(target, logs=ptxas_log).code)
        except Exception as error:
            compiler_log = f"{error}\n{ptxas_log.getvalue()}".strip()
            raise CompileError(
                f"compile: {source.label} must compile for {arch}, got an NVRTC error. "
                f"Source {source.path}; the compiler said:\n{compiler_log}",
                log=compiler_log,
                source_path=str(source.path),
            ) from error
        if assemble_for:
            cubin = _assembled(cubin, source.entry, assemble_for)
        resources = _parse_resources(ptxas_log.getvalue())
        if cache is not None:
            try:
                cache[key] = cubin
                cache[report_key] = _report(cubin, resources)
            except OSError as error:  # a full or read-only disk costs the cache, not the run
                log.info("kernel cache %s not written: %s", settings.cache_dir(), error)
        return Compiled(source, arch, cubin, resources, time.perf_counter() - started, False)
    finally:
        if cache is not None:
            cache.close()
