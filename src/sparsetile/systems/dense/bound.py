"""B -> C of one plan by cuBLAS with little host time.

Parts of A and the repair launch are made once for each kind of B. Made for every product they took
142 us of host time for 4267 x 4267 times 256 columns, whose kernels take 46.

Only torch's variants with ``out=`` are called: autocast does not change those, and disabling it
around a product costs tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.streams import record_stream
from sparsetile.engines.library import adds_in_float16
from sparsetile.engines.request import part
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.jit.loader import (
    current_device,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.launch.geometry import reachable, within_reach
from sparsetile.launch.interface import Epilogue, Tensors
from sparsetile.launch.kept import KeptLaunches, Kind, kind_of

__all__ = ["BoundDense"]


@dataclass(frozen=True)
class _Kind:
    """Shared by products with one kind of B."""

    # Launches that repair C; they take a stream and the addresses of B and C.
    repairs: Sequence[Callable[..., None]]
    sums: torch.dtype  # type of C before it is rounded
    out_dtype: dict[str, Any]  # the same as an argument of torch's products, if not B's type


class BoundDense:
    """A product bound to a plan's tensors. Unsupported operands go through the runner's ``spmm``.

    Columns of A from ``whole`` on are multiplied first, unless it is 0.
    """

    def __init__(
        self, runner: Runner, exact: ExactRunner, tensors: Tensors, values: Tensor | None,
        packed: Tensors, whole: int,
    ) -> None:  # fmt: skip
        self._runner, self._exact = runner, exact
        self._tensors, self._values, self._packed = tensors, values, packed
        self._exact_tensors = part("exact", tensors)
        self._rows = runner.rows
        self._whole = whole
        self._A = A = packed["A"]
        self._first, self._last = A[:, :whole], A[:, whole:]
        self._device = A.device.index
        self._kinds = KeptLaunches[Kind, _Kind | None]()
        self._streams: set[int] = set()  # streams of earlier launches

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        kind = self._kind(B)
        if kind is None:
            return self._general(B, Epilogue(), out)
        if out is not None and kind.sums is not B.dtype:
            return out.copy_(self._product(B, kind))
        C = self._product(B, kind, out)
        return C if C.dtype is B.dtype else C.to(B.dtype)

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        kind = None if mean else self._kind(B)
        if bias is not None:
            bias = bias.to(torch.float64 if B.dtype is torch.float64 else torch.float32)
        if kind is None:
            return self._general(B, Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu))
        C = self._product(B, kind)
        if alpha != 1.0:
            C.mul_(alpha)
        if bias is not None:
            C.add_(bias)
        if relu:
            C.relu_()
        return C if C.dtype is B.dtype else C.to(B.dtype)

    def _product(self, B: Tensor, kind: _Kind, C: Tensor | None = None) -> Tensor:
        """Return A·B in the type of its sums, repaired."""
        self._note_stream()
        if C is None:
            C = B.new_empty((self._rows, B.shape[1]), dtype=kind.sums)
        whole = self._whole
        if whole:
            torch.mm(self._last, B[whole:], out=C, **kind.out_dtype)
            torch.addmm(C, self._first, B[:whole], out=C, **kind.out_dtype)
        else:
            torch.mm(self._A, B, out=C, **kind.out_dtype)
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            self._repair(kind, B, C)
        else:
            with torch.cuda.device(device):
                self._repair(kind, B, C)
        return C

    def _note_stream(self) -> None:
        """Keep the tensors' memory from being reused until the current stream has read it."""
        stream = current_stream_handle(self._device)
        if stream not in self._streams:
            parts = (*self._tensors.values(), self._values, *self._packed.values())
            record_stream(parts, self._device)
            self._streams.add(stream)

    def _repair(self, kind: _Kind, B: Tensor, C: Tensor) -> None:
        stream = current_stream_handle(self._device)
        for launch in kind.repairs:
            launch(stream, B.data_ptr(), C.data_ptr())

    def _kind(self, B: Tensor) -> _Kind | None:
        """Return the shared parts of products with matrices like B; None if unsupported."""
        if B.dtype is torch.float16 and adds_in_float16(B.dtype):
            return None
        key = kind_of(B, B.data_ptr())
        try:
            return self._kinds[key]
        except KeyError:
            return self._prepare(key, B)

    def _prepare(self, key: Kind, B: Tensor) -> _Kind | None:
        kind = None
        if 0 not in (*B.shape, *self._A.shape) and within_reach(B):
            sums = torch.float32 if B.dtype.itemsize == 2 else B.dtype
            with on_device(self._device):
                ensure_cuda_context(self._device)
                launches = self._exact.prepare_repairs(self._exact_tensors, self._values, B, sums)
            if launches is not None:
                out_dtype: dict[str, Any] = {} if sums is B.dtype else {"out_dtype": sums}
                kind = _Kind([each.launch for each in launches], sums, out_dtype)
        return self._kinds.keep(key, kind)

    def _general(self, B: Tensor, epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
        out = B.new_empty(self._rows, B.shape[1]) if out is None else out
        if B.shape[1]:
            self._note_stream()
            self._runner.spmm(
                self._tensors, self._values, self._packed, reachable(B), out, epilogue
            )
        return out
