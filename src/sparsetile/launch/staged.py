"""Launches of a kernel that builds a format in stages, with tensor operations between them.

By tensor operations alone a build is hundreds of small ones, whose launches take the host longer
than the GPU takes for the work. A matrix on the CPU is built by tensor operations, and so is one
that the kernels cannot number. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.params import ParamValue
from sparsetile.kernels import KernelSpec
from sparsetile.kernels.stages import STAGE_THREADS, stage_config, stage_grid

__all__ = ["KERNEL_DEVICES", "StagedKernel", "building_on", "built_by_kernels"]

# Types of devices whose matrices kernels build from.
KERNEL_DEVICES = {"cuda"}


def built_by_kernels(device: torch.device) -> bool:
    """Whether kernels build formats and schedules of matrices on a device."""
    return device.type in KERNEL_DEVICES


class building_on:
    """Make the device current for a block, which gets its number."""

    def __init__(self, device: torch.device) -> None:
        self._index = device_index(device)

    def __enter__(self) -> int:
        ensure_cuda_context(self._index)
        self._current = on_device(self._index)
        self._current.__enter__()
        return self._index

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)


class StagedKernel:
    """One matrix: the parameters that its launches share, and the tensors behind them.

    ``spec`` has parameters ``stage`` and ``work``: elements of a stage, a thread each. ``index`` is
    the device's, as :func:`building_on` yields it. ``numbers`` are parameters; all others are 0, or
    null.
    """

    def __init__(
        self, spec: KernelSpec, device: torch.device, index: int, **numbers: ParamValue
    ) -> None:
        self._device, self._index = device, index
        self._kernel = spec.load(stage_config(), index)
        self._processors = processors(device)
        self.params: dict[str, ParamValue] = {**spec.params.zeros, **numbers}
        # Held while kernels that were given their addresses may run.
        self._held: dict[str, Tensor] = {}

    def give(self, name: str, tensor: Tensor) -> Tensor:
        """Name a tensor to the kernel."""
        self._held[name] = tensor
        self.params[name] = tensor.data_ptr()
        return tensor

    def new(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Name uninitialised memory to the kernel."""
        return self.give(name, torch.empty(shape, dtype=dtype, device=self._device))

    def launch(self, stage: int, work: int) -> None:
        """Run a stage."""
        self.params["stage"], self.params["work"] = stage, work
        grid = stage_grid(work, self._processors)
        stream = current_stream_handle(self._index)
        self._kernel.launch(grid, STAGE_THREADS, stream, self.params)

    def keep_only(self, names: Collection[str]) -> None:
        """Let go of all other tensors: torch gives their memory to later work of the stream."""
        self._held = {name: tensor for name, tensor in self._held.items() if name in names}

    def sums(self, name: str, into: str = "") -> Tensor:
        """Name the running sums of a tensor's numbers to the kernel, in its place if not apart."""
        return self.give(into or name, torch.cumsum(self._held[name], 0, dtype=torch.int32))
