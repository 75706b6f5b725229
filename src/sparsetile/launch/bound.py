"""B -> C of one plan with little host time: parameters packed once for each kind of B."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.core.streams import record_stream
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_device,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.launch.geometry import aligned, reachable, within_reach
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors
from sparsetile.launch.kept import KeptLaunches, kind_of

__all__ = [
    "Bindable", "BoundExtremum", "BoundLinear", "BoundProduct", "Prepared", "Scratch", "Step",
    "prepare_steps",
]  # fmt: skip


class Bindable(Protocol):
    """A runner whose product is a sequence of launches that B's width and alignment fix."""

    rows: int

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launches for matrices like B; None if they need copies.

        Of an epilogue that is not plain, mean and ReLU are as given; each launch brings its own
        alpha and bias. Beta is 0.
        """

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        """Multiply operands of any strides and batches."""


@dataclass(frozen=True)
class Scratch:
    """Memory in which the pieces of cut work meet (``jit.workspace``)."""

    bytes: int  # of partial sums
    counters: int  # of those that have arrived
    # Parameters that are addresses in the first and in the second, and how many bytes behind its
    # beginning.
    partials: Mapping[str, int] = field(default_factory=lambda: {"partials": 0})
    arrivals: Mapping[str, int] = field(default_factory=lambda: {"arrivals": 0})
    owned: bool = False  # a second launch reads what the first leaves: no other thread between


_Launches = Sequence[Callable[..., None]]


class _CutLaunches:
    """Launches that share scratch memory, looked up for each product: it may grow."""

    def __init__(self, launches: Sequence[PreparedLaunch], device: int, needed: Scratch) -> None:
        self._launches = [each.launch_with for each in launches]
        self._device = device
        # Addresses of the scratch memory of the last product, and what launches take of them.
        self._last: tuple[int, int, tuple[int, ...]] = (-1, -1, ())
        self._sizes = needed.bytes, needed.counters
        self._partials = tuple(needed.partials.values())
        self._arrivals = tuple(needed.arrivals.values())
        self._owned = needed.owned

    def launch(self, stream: int, *values: Any) -> None:
        owner = threading.get_ident() if self._owned else 0
        memory, counters = scratch(self._device, stream, *self._sizes, owner)
        at, count = memory.data_ptr(), counters.data_ptr()
        last_at, last_count, places = self._last
        if at != last_at or count != last_count:
            places = (
                *(at + offset for offset in self._partials),
                *(count + offset for offset in self._arrivals),
            )
            self._last = (at, count, places)
        for launch in self._launches:
            launch(stream, places, *values)


@dataclass(frozen=True)
class Step:
    """One launch of a product."""

    kernel: LoadedKernel
    grid: tuple[int, int, int]
    threads: int
    overlap: bool


def prepare_steps(
    steps: Sequence[Step], params: Mapping[str, Any], epilogue: Epilogue, device: int,
    needed: Scratch | None = None, more: tuple[str, ...] = (),
) -> Sequence[Prepared]:  # fmt: skip
    """Return the launches of all steps, which take the same parameters, in their order.

    ``more`` names addresses that each launch brings after those of B and C, the bias's and alpha.
    """
    patch = ("b", "c", *(() if epilogue.plain else ("bias", "alpha")), *more)
    rare = () if needed is None else (*needed.partials, *needed.arrivals)
    prepared = [
        step.kernel.prepare(step.grid, step.threads, params, patch, rare, overlap=step.overlap)
        for step in steps
    ]
    return prepared if needed is None else [_CutLaunches(prepared, device, needed)]


class _Reader:
    """What launches kernels that read the same tensors in every product."""

    def __init__(self, device: int, tensors: Iterable[Tensor | None]) -> None:
        self._device = device
        self._read = tuple(tensors)
        self._streams: set[int] = set()  # that products were launched on

    def _note_stream(self, stream: int) -> None:
        """Keep the tensors' memory from other work until this stream has read it."""
        if stream not in self._streams:
            record_stream(self._read, self._device)
            self._streams.add(stream)

    def _launch_elsewhere(self, launches: _Launches, *values: int | float) -> None:
        """Launch if another device is the current one."""
        with torch.cuda.device(self._device):
            stream = current_stream_handle(self._device)
            self._note_stream(stream)
            for launch in launches:
                launch(stream, *values)


class LinearRunner(Protocol):
    """A runner whose linear layer is one launch."""

    rows: int
    cols: int

    def prepare_linear(
        self, tensors: Tensors, packed: Tensors, X: Tensor, epilogue: Epilogue
    ) -> Prepared | None:
        """Return the launch for tokens like X [tokens, K], aligned, and a contiguous Y.

        It takes the addresses of X and Y and, if the epilogue has a row bias, of that.
        """


class BoundLinear(_Reader):
    """X -> relu(X·Aᵀ + bias) bound to a plan's tensors, for X [..., K] as it is."""

    def __init__(self, runner: LinearRunner, tensors: Tensors, packed: Tensors) -> None:
        device = next(iter(tensors.values())).device.index
        super().__init__(device, (*tensors.values(), *packed.values()))
        self._runner, self._tensors, self._packed = runner, tensors, packed
        # By shape, strides and alignment of X, bias and ReLU: the launch and the sizes of Y.
        self._prepared = KeptLaunches[
            tuple[Any, ...], tuple[Callable[..., None], tuple[int, ...]] | None
        ]()

    def __call__(self, X: Tensor, bias: Tensor | None, relu: bool) -> Tensor | None:
        """Return the result; None if X needs copies. ``bias`` [M]: as kernels read it."""
        pointer = X.data_ptr()
        key = (kind_of(X, pointer), bias is None or bias.dtype, relu)
        try:
            found = self._prepared[key]
        except KeyError:
            found = self._prepared.keep(key, self._prepare(X, bias, relu))
        if found is None:
            return None
        launch, sizes = found
        Y = X.new_empty(*sizes)
        places = (pointer, Y.data_ptr()) if bias is None else (
            pointer, Y.data_ptr(), bias.data_ptr())  # fmt: skip
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            stream = current_stream_handle(device)
            if stream not in self._streams:
                self._note_stream(stream)
            launch(stream, *places)
        else:
            self._launch_elsewhere([launch], *places)
        return Y

    def _prepare(
        self, X: Tensor, bias: Tensor | None, relu: bool
    ) -> tuple[Callable[..., None], tuple[int, ...]] | None:
        cols = self._runner.cols
        if not X.dim() or X.shape[-1] != cols or not X.numel():
            return None
        tokens = X.reshape(X.shape[:-1].numel(), cols)
        if tokens.data_ptr() != X.data_ptr() or tokens.stride(1) != 1 or not aligned(tokens):
            return None  # tokens that do not follow one another at one distance are copied
        with on_device(self._device):
            ensure_cuda_context(self._device)
            epilogue = Epilogue(row_bias=bias, relu=relu)
            made = self._runner.prepare_linear(self._tensors, self._packed, tokens, epilogue)
        return None if made is None else (made.launch, (*X.shape[:-1], self._runner.rows))


class BoundProduct(_Reader):
    """A product bound to a plan's tensors. Operands that need copies take ``spmm``."""

    def __init__(
        self, runner: Bindable, tensors: Tensors, values: Tensor | None, packed: Tensors | None,
    ) -> None:  # fmt: skip
        read = (*tensors.values(), values, *(packed or {}).values())
        super().__init__(next(iter(tensors.values())).device.index, read)
        self._runner = runner
        self._rows = runner.rows
        self._tensors = tensors
        self._values = values
        self._packed = packed
        # By shape, strides and alignment of B; of fused products also by mean and ReLU.
        self._prepared = KeptLaunches[tuple[Any, ...], tuple[int, _Launches | None]]()

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        pointer = B.data_ptr()
        key = kind_of(B, pointer)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepare(key, B, PLAIN)
        n, launches = found
        if out is None:
            out = B.new_empty(self._rows, n)  # a third quicker than with a tuple
        if launches is None:
            if n:
                self._note_stream(current_stream_handle(self._device))
                self._runner.spmm(self._tensors, self._values, self._packed, reachable(B), out)
            return out
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            stream = current_stream_handle(device)
            if stream not in self._streams:
                self._note_stream(stream)
            for launch in launches:
                launch(stream, pointer, out.data_ptr())
        else:
            self._launch_elsewhere(launches, pointer, out.data_ptr())
        return out

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        pointer, address = B.data_ptr(), 0
        if bias is not None:
            wide = torch.float64 if B.dtype is torch.float64 else torch.float32
            if bias.dtype is not wide or not bias.is_contiguous():
                bias = bias.to(wide).contiguous()
            address = bias.data_ptr()
        key = (kind_of(B, pointer), mean, relu)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepare(key, B, Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu))
        n, launches = found
        out = B.new_empty(self._rows, n)
        if launches is None:
            if n:
                self._note_stream(current_stream_handle(self._device))
                epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
                self._runner.spmm(
                    self._tensors, self._values, self._packed, reachable(B), out, epilogue
                )
            return out
        device = self._device
        ensure_cuda_context(device)
        if current_device() == device:
            stream = current_stream_handle(device)
            if stream not in self._streams:
                self._note_stream(stream)
            for launch in launches:
                launch(stream, pointer, out.data_ptr(), address, alpha)
        else:
            self._launch_elsewhere(launches, pointer, out.data_ptr(), address, alpha)
        return out

    def _prepare(
        self, key: tuple[Any, ...], B: Tensor, epilogue: Epilogue
    ) -> tuple[int, _Launches | None]:
        """Ask the runner for the launches, in a thread that may have done no CUDA work yet, and
        keep them with the columns of B."""
        launches: _Launches | None = None
        if B.shape[1] and within_reach(B):
            with on_device(self._device):
                ensure_cuda_context(self._device)
                prepared = self._runner.prepare_launches(
                    self._tensors, self._values, self._packed, B, epilogue
                )
            launches = None if prepared is None else [each.launch for each in prepared]
        return self._prepared.keep(key, (B.shape[1], launches))


class ExtremumRunner(Protocol):
    """A runner whose maximum is a sequence of launches that B's width and alignment fix."""

    rows: int

    @property
    def place_dtype(self) -> torch.dtype:
        """Type of the place of an entry in its row."""

    def prepare_extremum(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, mode: str
    ) -> Sequence[Prepared] | None:
        """Return the launches for matrices like B, None if they need copies.

        They take the addresses of B, C and the winners' places.
        """


class BoundExtremum(_Reader):
    """The max or min of each row's products, bound to a plan's tensors."""

    def __init__(self, runner: ExtremumRunner, tensors: Tensors, values: Tensor | None) -> None:
        super().__init__(next(iter(tensors.values())).device.index, (*tensors.values(), values))
        self._runner, self._tensors, self._values = runner, tensors, values
        self._prepared = KeptLaunches[tuple[Any, ...], _Launches | None]()

    def __call__(self, B: Tensor, reduce: str, winners: bool) -> tuple[Tensor, Tensor] | None:
        """Return the result and the winners' places, if asked for; None if B needs a copy."""
        pointer, mode = B.data_ptr(), f"arg{reduce}" if winners else reduce
        key = (kind_of(B, pointer), B.dtype, mode)
        try:
            launches = self._prepared[key]
        except KeyError:
            launches = self._prepared.keep(key, self._prepare(B, mode))
        if launches is None:
            return None
        rows, n = self._runner.rows, B.shape[1]
        out = B.new_empty(rows, n)
        args = B.new_empty((rows, n) if winners else (0,), dtype=self._runner.place_dtype)
        device = self._device
        ensure_cuda_context(device)
        places = pointer, out.data_ptr(), args.data_ptr()
        if current_device() == device:
            stream = current_stream_handle(device)
            if stream not in self._streams:
                self._note_stream(stream)
            for launch in launches:
                launch(stream, *places)
        else:
            self._launch_elsewhere(launches, *places)
        return out, args

    def _prepare(self, B: Tensor, mode: str) -> _Launches | None:
        if not B.numel() or (B.stride(1) != 1 and B.shape[1] > 1) or not within_reach(B):
            return None
        with on_device(self._device):
            ensure_cuda_context(self._device)
            found = self._runner.prepare_extremum(self._tensors, self._values, B, mode)
        return None if found is None else [each.launch for each in found]
