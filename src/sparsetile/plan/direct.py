"""A variant without a schedule: products straight from A's arrays, for plans of few products.

A schedule of the exact system takes as long as some dozens of products, and saves a part of each
(``tune/account.py``). A plan for fewer products begins without one. It is built as soon as anything
but a plain product needs it (gradients, maxima, files, tracers), and after as many products as
would have paid for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import record_stream, refuse_capture, settle
from sparsetile.engines.request import Request
from sparsetile.intake.csr import CSR, VALUE_DTYPES
from sparsetile.jit.loader import current_stream_handle
from sparsetile.launch.direct import direct_product, product_into, takes_arrays
from sparsetile.launch.geometry import reachable
from sparsetile.launch.interface import Epilogue, Tensors
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.traced.flat import Direction, flatten
from sparsetile.plan.variant import Variant
from sparsetile.reorder import Permutation
from sparsetile.systems import runner
from sparsetile.systems.registry import exact_system

__all__ = ["ArraysProduct", "DirectVariant", "multiplies_arrays"]

# What :meth:`DirectVariant.schedule` makes.
_BUILT = ("built", "runner", "direction", "flat", "packed", "bound_linear")


def multiplies_arrays(request: Request) -> bool:
    """Whether products straight from the arrays of A support the request."""
    csr = request.csr
    return (
        csr.device.type == "cuda"
        and request.dtype in VALUE_DTYPES
        and request.permutation.perm is None
        and request.ablation is None
        and not (request.in_place or request.timed)
        and 0 < csr.nnz < entry_limit()
        and takes_arrays(csr.indptr, csr.indices, csr.shape[1], request.n)
    )


class ArraysProduct:
    """A product bound to A's arrays and values (:class:`sparsetile.launch.interface.Bound`)."""

    def __init__(self, csr: CSR, values: Tensor | None) -> None:
        self._indptr, self._indices, self._values = csr.indptr, csr.indices, values
        self._device = csr.indptr.get_device()
        self._streams: set[int] = set()  # that products were launched on

    def _note_stream(self) -> None:
        """Keep the arrays' memory from other work until the current stream has read it."""
        stream = current_stream_handle(self._device)
        if stream not in self._streams:
            record_stream((self._indptr, self._indices, self._values), self._device)
            self._streams.add(stream)

    def __call__(self, B: Tensor, out: Tensor | None = None) -> Tensor:
        self._note_stream()
        if out is None:
            return direct_product(self._indptr, self._indices, self._values, B)
        if out.numel():
            product_into(self._indptr, self._indices, self._values, B, out)
        return out

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""
        self._note_stream()
        if bias is not None:
            wide = torch.float64 if B.dtype is torch.float64 else torch.float32
            bias = bias.to(wide).contiguous()
        epilogue = Epilogue(alpha=alpha, mean=mean, bias=bias, relu=relu)
        reduce = "mean" if mean else "sum"
        return direct_product(
            self._indptr, self._indices, self._values, reachable(B), reduce, epilogue
        )


class DirectVariant(Variant):
    """A variant of the exact system that has no schedule yet; it is built at first use."""

    def __init__(
        self, csr: CSR, n: int, dtype: torch.dtype, permutation: Permutation, *,
        deterministic: bool, report: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._building = threading.RLock()
        self._begin(csr, n, dtype, permutation, deterministic, report, False)
        self.system = exact_system(self.device.type).name
        self.take(*self.prepare(None if csr.values is None else csr.values.detach()))

    def __getattr__(self, name: str) -> Any:
        if name not in _BUILT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.schedule()
        return self.__dict__[name]

    @property
    def scheduled(self) -> bool:
        return "built" in self.__dict__

    @outside_modes
    def schedule(self) -> None:
        with self._building:
            if self.scheduled:
                return
            refuse_capture("run", self.device, "Call it once before the capture")
            started = time.perf_counter()
            csr = self.csr.with_values(self.values)
            request = Request(csr, self.n, self.dtype, self.permutation, self.deterministic)
            on_gpu = self.device.type == "cuda"
            with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                built = exact_system(self.device.type).build(request)
                work = runner(built.recipe)
                work.prepare(self.n, self.dtype, self.values is not None, self.device)
                direction = Direction(csr.indptr, built, built)
                packed = None
                if work.needs_packed_values:
                    packed = work.pack(built.tensors, self.values, self.dtype)
                settle(self.device)
            self.report["build"] = dict(built.seconds)
            self.report["schedule_seconds"] = time.perf_counter() - started
            # Another thread sees all of it or nothing.
            self.__dict__.update(
                bound=work.bind(built.tensors, self.values, packed), packed=packed, runner=work,
                bound_linear=work.bind_linear(built.tensors, packed), direction=direction,
                flat=flatten(direction, None, None, None), built=built,
            )  # fmt: skip

    def prepare(self, values: Tensor | None) -> tuple[Tensor | None, Tensors | None]:
        if self.scheduled:
            return super().prepare(values)
        return None if values is None else values.to(self.dtype).resolve_neg(), None

    def take(self, values: Tensor | None, packed: Tensors | None) -> None:
        with self._building:
            if self.scheduled:
                if packed is None and self.runner.needs_packed_values:
                    _, packed = super().prepare(values)  # scheduled since they were prepared
                super().take(values, packed)
                return
            if self.values is not None and values is not None:
                self.values.copy_(values)
                return
            self.values, self.weighted = values, values is not None
            self.bound = ArraysProduct(self.csr, values)

    def read_tensors(self) -> list[Tensor | None]:
        if self.scheduled:
            return super().read_tensors()
        return [self.csr.indptr, self.csr.indices, self.values, *self.csr.order_tensors()]

    def parts(self) -> dict[str, Tensors]:
        if self.scheduled:
            return super().parts()
        return {"values": {} if self.values is None else {"values": self.values}}

    def exact_tensors(self) -> Tensors:
        return super().exact_tensors() if self.scheduled else {}

    @property
    def format_bytes(self) -> int:
        return super().format_bytes if self.scheduled else 0

    @property
    def choices(self) -> Mapping[str, str]:
        if self.scheduled:
            return super().choices
        return {"format": "A's arrays as they are", "schedule": "none yet"}
