"""Launches of kernels that sum columns (``column_sums.cuh``), and the gradient of an epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.jit.loader import current_device, current_stream_handle, ensure_cuda_context
from sparsetile.jit.source import ConfigValue
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.columns import (
    COLUMN_DTYPES,
    COLUMN_THREADS,
    EPILOGUE_GRADIENT,
    ColumnGrid,
    column_grid,
    epilogue_gradient_config,
)
from sparsetile.kernels.csr import vector_width
from sparsetile.kernels.spec import KernelSpec
from sparsetile.launch.geometry import ACCESS_BYTES, MAX_SLABS
from sparsetile.launch.kept import KeptLaunches

__all__ = ["ColumnLaunch", "epilogue_gradient", "prepare_changing", "takes_epilogue_gradient"]


def prepare_changing(
    spec: KernelSpec, config: dict[str, ConfigValue], device: int, grid: tuple[int, int, int],
    threads: int, constants: dict[str, Any],
) -> Callable[..., None]:  # fmt: skip
    """Return a launch that takes the stream, then every address and the slope as fields come."""
    changing = [field.name for field in spec.params.fields if field.letter in "Qd"]
    params = {**dict.fromkeys(changing, 0), **constants}
    return spec.load(config, device).prepare(grid, threads, params, changing).launch


class ColumnLaunch:
    """A kernel whose last two addresses are the scratch memory in which its blocks' sums meet."""

    def __init__(
        self, spec: KernelSpec, config: dict[str, ConfigValue], device: int, grid: ColumnGrid,
        needed: tuple[int, int], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        blocks = (grid.chunks, grid.slabs, 1)
        self._launch = prepare_changing(spec, config, device, blocks, COLUMN_THREADS, constants)
        self._device, self._needed = device, needed

    def __call__(self, stream: int, *values: int) -> None:
        partials = arrivals = 0
        if self._needed[1]:
            memory, counters = scratch(self._device, stream, *self._needed)
            partials, arrivals = memory.data_ptr(), counters.data_ptr()
        self._launch(stream, *values, partials, arrivals)


def takes_epilogue_gradient(grad: Tensor, C: Tensor | None) -> bool:
    """Whether :func:`epilogue_gradient` takes these: matrices of a GPU, rows one element wide."""
    return (
        grad.is_cuda
        and grad.dtype in COLUMN_DTYPES
        and grad.dim() == 2
        and (grad.stride(1) == 1 or grad.shape[1] == 1)
        and grad.numel() > 0
        and grad.shape[1] <= MAX_SLABS  # a slab has a column at least
        and (C is None or (C.shape == grad.shape and C.dtype is grad.dtype and C.stride(1) == 1))
    )


_launches = KeptLaunches[tuple[Any, ...], ColumnLaunch]()


def _launch_of(key: tuple[Any, ...]) -> ColumnLaunch:
    """The launch for (device, type, shape, strides of both, common alignment, with ReLU)."""
    device, dtype, (rows, n), grad_stride, c_stride, low, relu = key
    vector = vector_width(dtype, n, grad_stride, c_stride, low // dtype.itemsize)
    grid = column_grid(rows, n, vector)
    made = ColumnLaunch(
        EPILOGUE_GRADIENT, epilogue_gradient_config(dtype, vector, grid.lanes, relu), device, grid,
        grid.scratch(vector, 1),
        {"rows": rows, "grad_stride": grad_stride, "c_stride": c_stride, "n": n},
    )  # fmt: skip
    return _launches.keep(key, made)


def epilogue_gradient(grad: Tensor, C: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient before ReLU, and the float32 sums of its columns: the bias's gradient.

    ``C`` is the product after ReLU; None if there was none: ``grad`` itself is returned then.
    """
    device = grad.device.index
    if current_device() != device:
        with torch.cuda.device(device):
            return epilogue_gradient(grad, C)
    ensure_cuda_context(device)
    n, at = grad.shape[1], grad.data_ptr()
    sums = grad.new_empty(n, dtype=torch.float32)
    masked, c, c_stride = grad, 0, 0
    if C is not None:
        masked = grad.new_empty(grad.shape)
        c, c_stride = C.data_ptr(), C.stride(0)
    key = (
        device, grad.dtype, grad.shape, grad.stride(0), c_stride, (at | c) % ACCESS_BYTES,
        C is not None,
    )  # fmt: skip
    launch = _launches.get(key) or _launch_of(key)
    to = 0 if C is None else masked.data_ptr()
    launch(current_stream_handle(device), at, c, to, sums.data_ptr())
    return masked, sums
