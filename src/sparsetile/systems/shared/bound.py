"""B -> C of one plan with little host time: parameters packed once for each kind of B."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import current_device, current_stream_handle, on_device
from sparsetile.jit.workspace import scratch
from sparsetile.systems.base import PLAIN, Epilogue, Tensors
from sparsetile.systems.shared.cuda_context import ensure_cuda_context
from sparsetile.systems.shared.geometry import reachable, within_reach

__all__ = ["Bindable", "BoundProduct", "Prepared", "Scratch", "Step", "prepare_steps"]


class Prepared(Protocol):
    """A launch that lacks addresses: ``jit``'s, or a runner's own around it."""

    def launch(self, stream: int, *values: Any) -> None:
        """Multiply B, at the first address, into C, at the second.

        Launches that were prepared with an epilogue also take the bias's address and alpha.
        """


class Bindable(Protocol):
    """A runner whose product is a sequence of launches that B's width and alignment fix."""

    rows: int

    def prepare_launches(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:
        """Return the launches for matrices like B; None where they need copies.

        Of an epilogue that is not plain, mean and ReLU are as given; each launch brings its own
        alpha and bias. Beta is 0.
        """

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


@dataclass(frozen=True)
class Scratch:
    """Memory in which the pieces of cut work meet (``jit.workspace``).

    Attributes
    ----------
    bytes, counters : int
        Of partial sums, and counters of those that have arrived.
    partials, arrivals : mapping of str to int
        Parameters that are addresses in the first and in the second, and how many bytes behind its
        beginning.
    owned : bool
        Whether a second launch reads what the first leaves: no other thread's may come between.
    """

    bytes: int
    counters: int
    partials: Mapping[str, int] = field(default_factory=lambda: {"partials": 0})
    arrivals: Mapping[str, int] = field(default_factory=lambda: {"arrivals": 0})
    owned: bool = False


class _CutLaunches:
    """Launches that share scratch memory, looked up for each product: it may grow."""

    def __init__(self, launches: Sequence[Prepared], device: int, needed: Scratch) -> None:
        self._launches = [each.launch for each in launches]
        self._device = device
        self._sizes = needed.bytes, needed.counters
        self._partials = tuple(needed.partials.values())
        self._arrivals = tuple(needed.arrivals.values())
        self._owned = needed.owned

    def launch(self, stream: int, *values: Any) -> None:
        owner = threading.get_ident() if self._owned else 0
        memory, counters = scratch(self._device, stream, *self._sizes, owner)
        at, count = memory.data_ptr(), counters.data_ptr()
        places = [at + offset for offset in self._partials]
        places += [count + offset for offset in self._arrivals]
        for launch in self._launches:
            launch(stream, *values, *places)


@dataclass(frozen=True)
class Step:
    """One launch of a product."""

    kernel: LoadedKernel
    grid: tuple[int, int, int]
    threads: int
    overlap: bool


def prepare_steps(
    steps: Sequence[Step],
    params: Mapping[str, Any],
    epilogue: Epilogue,
    device: int,
    needed: Scratch | None = None,
) -> Sequence[Prepared]:
    """Return the launches of all steps, which take the same parameters, in their order."""
    patch = ("b", "c") if epilogue.plain else ("b", "c", "bias", "alpha")
    if needed is not None:
        patch = (*patch, *needed.partials, *needed.arrivals)
    prepared = [
        step.kernel.prepare(step.grid, step.threads, params, patch, overlap=step.overlap)
        for step in steps
    ]
    return prepared if needed is None else [_CutLaunches(prepared, device, needed)]


class BoundProduct:
    """A product bound to a plan's tensors. Operands that need copies go the general way."""

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
        # By width, stride and alignment of B; of fused products also by mean and ReLU.
        self._prepared: dict[tuple[int, ...], Sequence[Prepared] | None] = {}

    def __call__(self, B: Tensor) -> Tensor:
        n, stride, pointer = B.shape[1], B.stride(0), B.data_ptr()
        out = B.new_empty(self._rows, n)  # a third quicker than with a tuple
        if n == 0:
            return out
        key = (n, stride, pointer & 15)
        try:
            prepared = self._prepared[key]
        except KeyError:
            prepared = self._prepared[key] = self._prepare(B, PLAIN)
        if prepared is None:
            self._runner.spmm(self._tensors, self._values, self._packed, reachable(B), out)
        else:
            self._launch(prepared, pointer, out.data_ptr())
        return out

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        n, stride, pointer = B.shape[1], B.stride(0), B.data_ptr()
        out = B.new_empty(self._rows, n)  # a third quicker than with a tuple
        if n == 0:
            return out
        address = 0
        if bias is not None:
            wide = torch.float64 if B.dtype is torch.float64 else torch.float32
            if bias.dtype is not wide or not bias.is_contiguous():
                bias = bias.to(wide).contiguous()
            address = bias.data_ptr()
        key = (n, stride, pointer & 15, mean, relu)
        try:
            prepared = self._prepared[key]
        except KeyError:
            epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
            prepared = self._prepared[key] = self._prepare(B, epilogue)
        if prepared is None:
            epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
            self._runner.spmm(
                self._tensors, self._values, self._packed, reachable(B), out, epilogue
            )
        else:
            self._launch(prepared, pointer, out.data_ptr(), address, alpha)
        return out

    def _launch(self, prepared: Sequence[Prepared], *values: int | float) -> None:
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            stream = current_stream_handle(device)
            for each in prepared:
                each.launch(stream, *values)
        else:
            with torch.cuda.device(device):
                stream = current_stream_handle(device)
                for each in prepared:
                    each.launch(stream, *values)

    def _prepare(self, B: Tensor, epilogue: Epilogue) -> Sequence[Prepared] | None:
        """Ask the runner for the launches, in a thread that may have done no CUDA work yet."""
        if not within_reach(B):
            return None
        with on_device(self._device):
            ensure_cuda_context(self._device)
            return self._runner.prepare_launches(
                self._tensors, self._values, self._packed, B, epilogue
            )
