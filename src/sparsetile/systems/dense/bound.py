"""B -> C of one plan by cuBLAS with little host time.

Parts of A and the launch that finishes C (``finish_dense.cu``) are made once for each kind of B.
Made for every product they took 142 us of host time for 4267 x 4267 times 256 columns, whose
kernels take 46.

Only torch's variants with ``out=`` are called: autocast does not change those, and disabling it
around a product costs tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.core.streams import record_stream
from sparsetile.engines.library import adds_in_float16
from sparsetile.engines.request import part
from sparsetile.engines.runner import Runner
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    current_device,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.finish import (
    FINISH_BLOCKS,
    FINISH_DENSE,
    FINISH_THREADS,
    WATCH_BLOCKS,
    finish_config,
    finish_vector,
)
from sparsetile.launch.bound import Step, prepare_steps
from sparsetile.launch.epilogue import epilogue_params
from sparsetile.launch.geometry import reachable, within_reach
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.launch.kept import KeptLaunches, kind_of

__all__ = ["BoundDense", "load_finish"]

_MOST = 2**31 - 2**20  # elements of C that 32-bit numbers count


def load_finish(
    n: int, dtype: torch.dtype, weighted: bool, device: int, *, plain: bool
) -> LoadedKernel:
    """Return ``finish_dense`` for C of ``n`` columns; ``plain``: without an epilogue."""
    config = finish_config(
        dtype, finish_vector(dtype, n), weighted, plain=plain and dtype.itemsize != 2
    )
    return FINISH_DENSE.load(config, device)


@dataclass(frozen=True)
class _Kind:
    """Shared by products with one kind of B, mean and ReLU."""

    # Finishes C: takes a stream, the addresses of B, C and the sums, and of fused products those of
    # the bias and alpha.
    finish: Callable[..., None]
    sums: torch.dtype  # type of the sums
    out_dtype: dict[str, Any]  # the same as an argument of torch's products, if not B's type


class BoundDense:
    """A product bound to a plan's tensors. Unsupported operands go through the runner's ``spmm``.

    Columns of A from ``whole`` on are multiplied first, unless it is 0.
    """

    def __init__(
        self, runner: Runner, tensors: Tensors, values: Tensor | None, packed: Tensors, whole: int
    ) -> None:
        self._runner = runner
        self._tensors, self._values, self._packed = tensors, values, packed
        self._exact = part("exact", tensors)
        self._rows = runner.rows
        self._whole = whole
        self._A = A = packed["A"]
        self._first, self._last = A[:, :whole], A[:, whole:]
        self._device = A.device.index
        self._kinds = KeptLaunches[tuple[Any, ...], _Kind | None]()
        self._streams: set[int] = set()  # streams of earlier launches

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        kind = self._kind(B, kind_of(B, B.data_ptr()), PLAIN)
        if kind is None:
            return self._general(B, PLAIN, out)
        C = B.new_empty((self._rows, B.shape[1])) if out is None else out
        return self._product(B, kind, C)

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        if bias is not None:
            wide = torch.float64 if B.dtype is torch.float64 else torch.float32
            bias = bias.to(wide).contiguous()
        epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
        kind = self._kind(B, (kind_of(B, B.data_ptr()), mean, relu), epilogue)
        if kind is None:
            return self._general(B, epilogue)
        C = B.new_empty((self._rows, B.shape[1]))
        return self._product(B, kind, C, 0 if bias is None else bias.data_ptr(), alpha)

    def _product(self, B: Tensor, kind: _Kind, C: Tensor, *more: float) -> Tensor:
        """Write A·B into C, finished with ``more``: the address of a bias and alpha."""
        self._note_stream()
        sums = C
        if kind.sums is not C.dtype:
            sums = B.new_empty(C.shape, dtype=kind.sums)
        whole = self._whole
        if whole:
            torch.mm(self._last, B[whole:], out=sums, **kind.out_dtype)
            torch.addmm(sums, self._first, B[:whole], out=sums, **kind.out_dtype)
        else:
            torch.mm(self._A, B, out=sums, **kind.out_dtype)
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            self._finish(kind, B, C, sums, more)
        else:
            with torch.cuda.device(device):
                self._finish(kind, B, C, sums, more)
        return C

    def _note_stream(self) -> None:
        """Keep the tensors' memory from being reused until the current stream has read it."""
        stream = current_stream_handle(self._device)
        if stream not in self._streams:
            parts = (*self._tensors.values(), self._values, *self._packed.values())
            record_stream(parts, self._device)
            self._streams.add(stream)

    def _finish(
        self, kind: _Kind, B: Tensor, C: Tensor, sums: Tensor, more: tuple[float, ...]
    ) -> None:
        stream = current_stream_handle(self._device)
        kind.finish(stream, B.data_ptr(), C.data_ptr(), *more, sums.data_ptr())

    def _kind(self, B: Tensor, key: tuple[Any, ...], epilogue: Epilogue) -> _Kind | None:
        """Return the shared parts of products with matrices like B; None if unsupported."""
        if B.dtype is torch.float16 and adds_in_float16(B.dtype):
            return None
        try:
            return self._kinds[key]
        except KeyError:
            return self._prepare(key, B, epilogue)

    def _prepare(self, key: tuple[Any, ...], B: Tensor, epilogue: Epilogue) -> _Kind | None:
        kind, n = None, B.shape[1]
        if 0 not in (*B.shape, *self._A.shape) and within_reach(B) and self._rows * n < _MOST:
            sums = torch.float32 if B.dtype.itemsize == 2 else B.dtype
            with on_device(self._device):
                ensure_cuda_context(self._device)
                launch = self._prepare_finish(B, epilogue)
            out_dtype: dict[str, Any] = {} if sums is B.dtype else {"out_dtype": sums}
            kind = _Kind(launch, sums, out_dtype)
        return self._kinds.keep(key, kind)

    def _prepare_finish(self, B: Tensor, epilogue: Epilogue) -> Callable[..., None]:
        """Return the launch that makes C of the sums."""
        exact, values, n, dtype = self._exact, self._values, B.shape[1], B.dtype
        kernel = load_finish(n, dtype, values is not None, self._device, plain=epilogue.plain)
        params = {
            "columns": exact["columns"].data_ptr(),
            "values": 0 if values is None else values.data_ptr(),
            "indptr": exact["indptr"].data_ptr(),
            "b": 0, "c": 0, "sums": 0, "b_row_stride": B.stride(0), "rows": self._rows, "n": n,
            **epilogue_params(epilogue),
        }  # fmt: skip
        processors = machine(B.device).processors
        if epilogue.plain and dtype.itemsize != 2:
            blocks = min(self._rows, WATCH_BLOCKS * processors)
        else:
            groups = self._rows * n // finish_vector(dtype, n)
            blocks = min(-(-groups // FINISH_THREADS), FINISH_BLOCKS * processors)
        grid = (blocks, 1, 1)
        step = Step(kernel, grid, FINISH_THREADS, overlap=True)
        (launch,) = prepare_steps([step], params, epilogue, self._device, more=("sums",))
        return launch.launch

    def _general(self, B: Tensor, epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
        out = B.new_empty(self._rows, B.shape[1]) if out is None else out
        if B.shape[1]:
            self._note_stream()
            self._runner.spmm(
                self._tensors, self._values, self._packed, reachable(B), out, epilogue
            )
        return out
