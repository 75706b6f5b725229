"""Device memory and launches replaced by host ones, for replays of kernels in NumPy.

``Machine`` stands for the GPU: the host code runs as it is, down to the driver's launch call, and
what the driver would have been given is unpacked by the field names of the device's own struct.
Every access is checked: that it lies inside one tensor, and that it is aligned.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile.jit import LoadedKernel
from sparsetile.jit.source import DEVICE_TREE
from sparsetile.jit.tensor_map import MAP_WORDS
from sparsetile.kernels import KernelSpec
from sparsetile.systems.bcsr import runner as bcsr_runner
from sparsetile.systems.csr import runner as csr_runner
from sparsetile.systems.shared import bound as bound
from sparsetile.systems.shared import tf32_operand as tf32_operand
from sparsetile.systems.shared import tile_runner as tile_runner

ELEMENTS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
_LETTERS = {"i64": "q", "double": "d", "int": "i"}

Replay = Callable[["Machine", Mapping[str, Any], dict[str, Any], tuple[int, int, int]], None]


def struct_fields(text: str, name: str) -> list[tuple[str, str]]:
    """(field, format letter) of a struct of the device code; arrays and structs spelt out."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL).group(1)
    found = []
    for line in re.sub(r"//[^\n]*", "", body).split(";"):
        declared = re.fullmatch(r"\s*(?:const )?([\w:]+)(\*?) (\w+)(?:\[(\d+)\])?\s*", line)
        if declared is None:
            assert not line.strip(), f"{name}: cannot read {line!r}"
            continue
        kind, pointer, field, count = declared.groups()
        if kind == "Sections":
            found += struct_fields((DEVICE_TREE / "segment.cuh").read_text(), kind)
            continue
        if kind == "TensorMap":
            found += [(f"{field}[{i}]", "Q") for i in range(MAP_WORDS)]
            continue
        letter = "P" if pointer else _LETTERS[kind]
        names = [field] if count is None else [f"{field}[{i}]" for i in range(int(count))]
        found += [(each, letter) for each in names]
    return found


def device_fields(spec: KernelSpec) -> list[tuple[str, str]]:
    """Of a kernel's parameters, which its file declares or a header that it includes."""
    text = (DEVICE_TREE / f"{spec.name}.cu").read_text()
    headers = re.findall(r'#include "(\w+\.cuh)"', text)
    texts = [text, *((DEVICE_TREE / header).read_text() for header in headers)]
    (declared,) = [each for each in texts if "struct Params {" in each]
    return struct_fields(declared, "Params")


def host_letters(spec: KernelSpec) -> list[str]:
    """``2P3i`` -> P, P, i, i, i; padding at the end, which has no field, left out."""
    pairs = re.findall(r"(\d*)([a-zA-Z])", spec.params_format.removesuffix("x"))
    return [letter for count, letter in pairs for _ in range(int(count or 1))]


class Array:
    """Device memory from an address on to the end of its tensor, read and written with checks."""

    def __init__(self, address: int, data: np.ndarray) -> None:
        self.address = address
        self.data = data
        self.writes = np.zeros(data.size, dtype=np.int32)

    def _places(self, first: np.ndarray, count: int, access_bytes: int | None) -> np.ndarray:
        size = self.data.itemsize
        if first.size:
            low, high = int(first.min()), int(first.max()) + count
            assert low >= 0 and high <= self.data.size, (
                f"access to elements {low} to {high} of {self.data.size}"
            )
            width = count * size if access_bytes is None else access_bytes
            assert not ((self.address + first.astype(np.int64) * size) % width).any(), "misaligned"
        return first[..., None] + np.arange(count)

    def load(self, first: np.ndarray, count: int = 1) -> np.ndarray:
        """``count`` elements from each place of ``first`` on, by one aligned access each."""
        return self.data[self._places(np.asarray(first), count, None)]

    def store(self, first: np.ndarray, values: np.ndarray, widest: int = 16) -> None:
        """Rows of values to the places of ``first``, by accesses of at most ``widest`` bytes."""
        count = values.shape[-1]
        access = min(widest, count * self.data.itemsize)
        places = self._places(np.asarray(first), count, access)
        self.data[places] = values
        np.add.at(self.writes, places.reshape(-1), 1)


class Machine:
    """A GPU made of host memory: tensors are held, launches are replayed."""

    def __init__(self, replays: Mapping[str, Replay]) -> None:
        self.replays = replays
        self.configs: list[dict[str, Any]] = []
        self.written: dict[int, Array] = {}
        self.arrivals: list[Tensor] = []
        self.shared_bytes = 0  # dynamic shared memory of the latest launch
        self.seed = 11  # of what happens in random order
        self.recomputed = 0  # windows of the latest launch whose sums were not finite
        self.to_join: Any = None  # a launch that left partial sums for the next one
        self._held: list[Tensor] = []

    def hold(self, *tensors: Tensor | None) -> None:
        self._held += [tensor for tensor in tensors if tensor is not None and tensor.numel()]

    def array(self, address: int, dtype: type, parts: int = 1) -> Array | None:
        """The memory at ``address``, as elements of ``dtype`` or as rows of ``parts`` of them."""
        if address == 0:
            return None
        for tensor in self._held:
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin, end = tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
            if begin <= address < end:
                count = (end - address) // np.dtype(dtype).itemsize
                pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_byte))
                raw = np.ctypeslib.as_array(pointer, (count * np.dtype(dtype).itemsize,))
                data = raw.view(dtype)
                return Array(address, data if parts == 1 else data.reshape(-1, parts))
        raise AssertionError(f"address {address} belongs to no tensor")

    def scratch(
        self, device: int, stream: int, size: int, arrivals: int, owner: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Memory full of NaN, and counters at zero."""
        memory = torch.full((size,), 0xFF, dtype=torch.uint8)
        counters = torch.zeros(arrivals, dtype=torch.int32)
        self.hold(memory, counters)
        self.arrivals.append(counters)
        return memory, counters

    def load(
        self, spec: KernelSpec, config: Mapping[str, Any], dynamic_shared: int = 0
    ) -> LoadedKernel:
        """A kernel whose launches arrive here."""
        fields = device_fields(spec)
        kinds = {
            "P": ctypes.c_uint64, "Q": ctypes.c_uint64, "q": ctypes.c_int64,
            "d": ctypes.c_double, "i": ctypes.c_int,
        }  # fmt: skip
        layout = type(
            "Params", (ctypes.Structure,), {"_fields_": [(f, kinds[k]) for f, k in fields]}
        )

        def launch(sizes, handle, pointers, extra):
            assert sizes.blockDimX == config["kThreads"]
            address = ctypes.c_uint64.from_address(pointers).value
            found = layout.from_address(address)
            params = {name: getattr(found, name) for name, _ in fields}
            self.configs.append(dict(config))
            self.shared_bytes = sizes.sharedMemBytes
            grid = (sizes.gridDimX, sizes.gridDimY, sizes.gridDimZ)
            self.replays[spec.name](self, config, params, grid)
            return (0,)

        kernel = LoadedKernel.__new__(LoadedKernel)
        kernel.compiled = SimpleNamespace(source=spec.source(config))
        kernel.dynamic_shared = dynamic_shared
        kernel._handle = 0
        kernel._launch = launch
        kernel._may_overlap = True
        kernel._struct = struct.Struct("@" + spec.params_format + "0P")
        kernel._local = threading.local()
        return kernel

    def install(
        self, monkeypatch: pytest.MonkeyPatch, processors: int = 132, l2: int = 50 * 2**20
    ) -> None:
        """Let the systems' runners work on this machine."""
        properties = SimpleNamespace(multi_processor_count=processors, L2_cache_size=l2)
        new_empty = Tensor.new_empty

        def held(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = new_empty(tensor, *args, **kwargs)
            self.hold(made)
            return made

        monkeypatch.setattr(Tensor, "new_empty", held)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(
            KernelSpec,
            "load",
            lambda spec, config, device, shared=0: self.load(spec, config, shared),
        )
        for name, stand_in in {
            "scratch": self.scratch,
            "enter": lambda device: None,
            "current_device": lambda: None,
            "current_stream_handle": lambda device: 0,
            "on_device": lambda device: contextlib.nullcontext(),
        }.items():
            for module in (csr_runner, tile_runner, bcsr_runner, tf32_operand, bound):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)
