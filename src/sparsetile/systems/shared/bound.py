"""B -> C of one plan with little host time: parameters packed once for each kind of B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sparsetile.jit.loader import current_device, current_stream_handle, on_device
from sparsetile.systems.base import PLAIN, Epilogue, Tensors
from sparsetile.systems.shared.cuda_context import ensure_cuda_context
from sparsetile.systems.shared.geometry import reachable, within_reach

__all__ = ["Bindable", "BoundProduct", "Prepared"]


class Prepared(Protocol):
    """A launch that lacks the addresses of B and C: ``jit``'s, or a runner's own around it."""

    def launch(self, stream: int, *values: int) -> None:
        """Multiply B, at the first address, into C, at the second."""


class Bindable(Protocol):
    """A runner whose plain product is a sequence of launches that B's width and alignment fix."""

    rows: int

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor
    ) -> Sequence[Prepared] | None:
        """Return the launches for matrices like B, patched by (B, C); None where they need
        scratch memory or copies."""

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        """Multiply the general way."""


class BoundProduct:
    """A product bound to a plan's tensors.

    Products that need scratch for cut work go the general way; their kernels are long enough.
    """

    def __init__(
        self,
        runner: Bindable,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
    ) -> None:
        self._runner = runner
        self._rows = runner.rows
        self._tensors = tensors
        self._values = values
        self._packed = packed
        self._device = next(iter(tensors.values())).device.index
        self._prepared: dict[tuple[int, int, int], Sequence[Prepared] | None] = {}

    def __call__(self, B: Tensor) -> Tensor:
        n, stride, pointer = B.shape[1], B.stride(0), B.data_ptr()
        out = B.new_empty((self._rows, n))
        if n == 0:
            return out
        key = (n, stride, pointer & 15)
        try:
            prepared = self._prepared[key]
        except KeyError:
            prepared = self._prepare(B)
            self._prepared[key] = prepared
        if prepared is None:
            self._runner.spmm(self._tensors, self._values, self._packed, reachable(B), out)
            return out
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            stream = current_stream_handle(device)
            for each in prepared:
                each.launch(stream, pointer, out.data_ptr())
        else:
            with torch.cuda.device(device):
                stream = current_stream_handle(device)
                for each in prepared:
                    each.launch(stream, pointer, out.data_ptr())
        return out

    def _prepare(self, B: Tensor) -> Sequence[Prepared] | None:
        """Ask the runner for the launches, in a thread that may have done no CUDA work yet."""
        if not within_reach(B):
            return None
        with on_device(self._device):
            ensure_cuda_context(self._device)
            return self._runner.prepare_launches(self._tensors, self._values, self._packed, B)
