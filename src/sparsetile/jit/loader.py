"""Loaded kernels and their launch: cubin -> CUkernel -> cuLaunchKernelEx on torch's stream.

cuda.core loads the module; the launch itself calls the driver through cuda.bindings with one
packed parameter struct (``params.py``), because cuda.core's ``launch`` converts each argument again
on every call.

Launches may be programmatic if the GPU supports that (sm_90 and newer): the kernel then starts
while the previous one on the stream is ending, and waits for it itself (``ptx::wait_previous``).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from sparsetile.core import settings
from sparsetile.core.device import capability, shared_bytes
from sparsetile.core.errors import value_error
from sparsetile.jit.compiler import Compiled, Resources, compile_source
from sparsetile.jit.params import ParamStruct, ParamValue
from sparsetile.jit.source import KernelSource

__all__ = [
    "LoadedKernel", "PreparedLaunch", "current_device", "current_stream_handle", "device_arch",
    "device_index", "ensure_cuda_context", "load", "on_device",
]  # fmt: skip

# Shared memory that a block may use without an opt-in.
_DEFAULT_SHARED_BYTES = 48 * 1024
# Chips on which a kernel may start before its predecessor on the stream has ended.
_PROGRAMMATIC_FROM = (9, 0)
# Chips whose own instructions need the "a" target.
_ARCH_SPECIFIC = {(9, 0), (10, 0), (10, 3)}


def device_arch(device: torch.device | int) -> str:
    """Return the compile target of a CUDA device, such as ``sm_90a``.

    With ``SPARSETILE_CAPABILITY`` it is a virtual one, such as ``compute_80``, whose PTX is
    assembled for the GPU at hand.
    """
    major, minor = capability(device)
    suffix = "a" if (major, minor) in _ARCH_SPECIFIC else ""
    kind = "sm" if settings.chosen_gpu() is None else "compute"
    return f"{kind}_{major}{minor}{suffix}"


def _real_arch(device: int, virtual: str) -> str:
    """Return the target that PTX of a virtual architecture is assembled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if virtual.endswith('a') else ''}"


def _launch_config(programmatic: bool, cooperative: bool = False) -> Any:
    """Return a CUlaunchConfig of one-dimensional blocks whose sizes are not set yet."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.blockDimY = config.blockDimZ = 1
    config.numAttrs = 0
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    elif programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _resize(config: Any, grid: tuple[int, int, int], threads: int, shared: int) -> Any:
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX = threads
    config.sharedMemBytes = shared
    return config


def _too_much_shared(got: str) -> ValueError:
    return value_error(
        "launch", "shared memory", "within the device's limit", got,
        "Use a configuration with smaller tiles or fewer stages",
    )  # fmt: skip


class LoadedKernel:
    """A kernel ready to launch on one device."""

    def __init__(
        self, compiled: Compiled, params: ParamStruct, dynamic_shared: int, device: int
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.compiled = compiled
        self.resources: Resources = compiled.resources
        self.dynamic_shared = dynamic_shared
        self.device = device
        make = ObjectCode.from_ptx if compiled.is_ptx else ObjectCode.from_cubin
        self._module = make(compiled.cubin, name=compiled.source.entry)
        self._kernel = self._module.get_kernel(compiled.source.entry)
        # Passed as a CUfunction: cuda.bindings would convert a CUkernel at each launch, which takes
        # longer than the rest of its work.
        self._handle: Any = driver.CUfunction(int(self._kernel.handle))
        self._launch = driver.cuLaunchKernelEx
        self._may_overlap = capability(device) >= _PROGRAMMATIC_FROM
        self.params = params
        self._local = threading.local()
        attribute = driver.CUfunction_attribute
        if compiled.virtual:  # the driver only knows the limit of the real GPU
            _, static = driver.cuKernelGetAttribute(
                attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                driver.CUkernel(int(self._kernel.handle)),
                driver.CUdevice(device),
            )
            most = shared_bytes(capability(device)) - 1024
            if static + dynamic_shared > most:
                raise _too_much_shared(f"{static + dynamic_shared} bytes of {most}")
        if dynamic_shared > _DEFAULT_SHARED_BYTES:
            (status,) = driver.cuKernelSetAttribute(
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic_shared,
                driver.CUkernel(int(self._kernel.handle)),
                driver.CUdevice(device),
            )
            if int(status) != 0:
                raise _too_much_shared(f"{dynamic_shared} bytes ({status})")

    def prepare(
        self,
        grid: tuple[int, int, int],
        threads: int,
        params: Mapping[str, ParamValue],
        patch: Sequence[str],
        rare: Sequence[str] = (),
        *,
        overlap: bool = False,
        cooperative: bool = False,
    ) -> PreparedLaunch:
        """Return a launch packed once; the fields named in ``patch`` change with each call.

        Fields named in ``rare`` may change, too, but seldom do (``launch_with``). All thread blocks
        of a ``cooperative`` one run at once.
        """
        return PreparedLaunch(self, grid, threads, params, patch, rare, overlap, cooperative)

    def _config(self, overlap: bool, cooperative: bool = False) -> Any:
        return _launch_config(overlap and self._may_overlap, cooperative)

    def _parameters(self) -> tuple[Any, int, tuple[Any, Any]]:
        # One buffer per thread: the driver copies it before the launch returns, but releases the
        # interpreter lock meanwhile.
        buffer = ctypes.create_string_buffer(self.params.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._local.keep = pointers
        configs = (self._config(False), self._config(True))
        self._local.parameters = (buffer, ctypes.addressof(pointers), configs)
        return self._local.parameters

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        stream: int,
        params: Mapping[str, ParamValue],
        *,
        overlap: bool = False,
    ) -> None:
        """Launch with every field of the struct by name. Never synchronises, never allocates.

        With ``overlap`` the kernel may start before its predecessor has ended.
        """
        try:
            buffer, address, configs = self._local.parameters
        except AttributeError:
            buffer, address, configs = self._parameters()
        self.params.pack_into(buffer, params)
        config = configs[overlap]
        _resize(config, grid, threads, self.dynamic_shared).hStream = stream
        (status,) = self._launch(config, self._handle, address, 0)
        if status:
            raise RuntimeError(
                f"launch: {self.compiled.source.label} must start, got {status!r} for grid "
                f"{grid}, {threads} threads. Run `sparsetile doctor`; if the GPU is healthy, "
                "report this as a bug."
            )


class PreparedLaunch:
    """A launch repeated with few changes: the struct is packed once, then patched.

    Each thread has its own copy of the struct, for the same reason as in ``LoadedKernel``.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        threads: int,
        params: Mapping[str, ParamValue],
        patch: Sequence[str],
        rare: Sequence[str] = (),
        overlap: bool = False,
        cooperative: bool = False,
    ) -> None:
        self._patch = kernel.params.patch(*patch)
        self._rare = kernel.params.patch(*rare) if rare else None
        self._params = dict(params)
        self._call = kernel._launch
        self._kernel = kernel
        self._handle = kernel._handle
        self._grid = grid
        self._threads = threads
        self._overlap, self._cooperative = overlap, cooperative
        # Per thread: the writer of the patch, the struct's address, the launch's sizes, its stream;
        # the writer of the rare fields, and their values; the blocks of the grid's first dimension.
        self._buffers: dict[int, list[Any]] = {}
        self._keep: list[Any] = []
        self._label = kernel.compiled.source.label

    def _buffer(self, thread: int) -> list[Any]:
        buffer = ctypes.create_string_buffer(self._kernel.params.size)
        self._kernel.params.pack_into(buffer, self._params)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._keep.append(pointers)
        config = self._kernel._config(self._overlap, self._cooperative)
        _resize(config, self._grid, self._threads, self._kernel.dynamic_shared)
        rare = None if self._rare is None else self._rare.bind(buffer)
        self._buffers[thread] = [
            self._patch.bind(buffer), ctypes.addressof(pointers), config, None, rare, None,
            self._grid[0],
        ]  # fmt: skip
        return self._buffers[thread]

    def launch(self, stream: int, *values: int | float | bytes) -> None:
        """Write the patched fields, in the order of ``patch``, and launch.

        A tensor map, like other fields of several numbers, is given as its bytes.
        """
        thread = threading.get_ident()
        self._launch(self._buffers.get(thread) or self._buffer(thread), stream, values)

    def _launch(
        self, mine: list[Any], stream: int, values: tuple[int | float | bytes, ...]
    ) -> None:
        mine[0](*values)
        config = mine[2]
        if stream != mine[3]:
            config.hStream = mine[3] = stream
        (status,) = self._call(config, self._handle, mine[1], 0)
        if status:
            raise RuntimeError(
                f"launch: {self._label} must start, got {status!r}. Run `sparsetile doctor`; if "
                "the GPU is healthy, report this as a bug."
            )

    def launch_with(self, stream: int, rare: tuple[int, ...], *values: int | float | bytes) -> None:
        """As :meth:`launch`; ``rare`` are written only if they differ from the last ones."""
        thread = threading.get_ident()
        mine = self._buffers.get(thread) or self._buffer(thread)
        if rare != mine[5]:
            mine[4](*rare)
            mine[5] = rare
        self._launch(mine, stream, values)

    def launch_sized(
        self, stream: int, blocks: int, rare: tuple[int, ...], *values: int | float | bytes
    ) -> None:
        """As :meth:`launch_with`, with another number of blocks in the grid's first dimension."""
        thread = threading.get_ident()
        mine = self._buffers.get(thread) or self._buffer(thread)
        if rare != mine[5]:
            mine[4](*rare)
            mine[5] = rare
        if blocks != mine[6]:
            mine[2].gridDimX = mine[6] = blocks
        self._launch(mine, stream, values)


_Asked: TypeAlias = tuple[KernelSource, int, int]
# Never unloaded: unloading a kernel that is queued or running corrupts memory.
_loaded: dict[_Asked, LoadedKernel] = {}
_loading: dict[_Asked, threading.Lock] = {}


def load(source: KernelSource, dynamic_shared: int, device: int) -> LoadedKernel:
    """Compile (or find in the cache) and load a kernel on CUDA device number ``device``.

    Loads once for all threads: two that ask at the same time get the same kernel, and others do
    not wait.
    """
    asked = (source, dynamic_shared, device)
    found = _loaded.get(asked)
    if found is None:
        with _loading.setdefault(asked, threading.Lock()):
            found = _loaded.get(asked)
            if found is None:
                found = _loaded[asked] = _load(source, dynamic_shared, device)
    return found


def _load(source: KernelSource, dynamic_shared: int, device: int) -> LoadedKernel:
    if source.params is None:
        raise value_error(
            "load", "source", "one with parameters", source.label, "Declare its ParamStruct"
        )
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's primary context current
        arch = device_arch(device)
        if arch.startswith("compute_"):
            compiled = compile_source(source, arch, assemble_for=_real_arch(device, arch))
        else:
            compiled = compile_source(source, arch)
        return LoadedKernel(compiled, source.params, dynamic_shared, device)


# torch's own functions build objects or check for initialisation around these calls, which takes
# ten times as long; CUDA is initialised whenever a kernel is loaded.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_device = getattr(torch._C, "_cuda_getDevice", None)


def _slow_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# current_stream_handle(device): torch's current CUDA stream there, as an integer handle.
current_stream_handle: Callable[[int], int] = _raw_stream or _slow_stream
# current_device(): number of the current CUDA device.
current_device: Callable[[], int] = _raw_device or torch.cuda.current_device


class _Entered(threading.local):
    devices: frozenset[int] = frozenset()


_entered = _Entered()


def ensure_cuda_context(device: int) -> None:
    """Make sure that this thread has the context of CUDA device ``device``; free after the first
    call of a thread.

    A launch goes straight to the driver, which wants the device's context current in the calling
    thread. A thread that has run no CUDA work yet, such as autograd's at its first backward, has
    none: the runtime makes it current with the first kernel that it launches there.
    """
    if device not in _entered.devices:
        torch.zeros(1, device=f"cuda:{device}")
        _entered.devices |= {device}


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; that of the current one if it has none."""
    return torch.cuda.current_device() if device.index is None else int(device.index)


_ALREADY_THERE = contextlib.nullcontext()


def on_device(device: int) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` current for a block; free when it already is."""
    if current_device() == device:
        return _ALREADY_THERE
    return torch.cuda.device(device)
