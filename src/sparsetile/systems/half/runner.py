"""Two launches per product: ``half_rows`` copies B, ``spmm_half`` gathers from the copy.

Rows of A are scheduled as in ``csr`` for operands of 16 bits. The copy is allocated for each
product, on its stream, and returns to torch's pool with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.engines.rows.work import Launch
from sparsetile.engines.runner import Runner
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import THREADS, choose_bundle_tile, choose_tile, vector_width
from sparsetile.kernels.half import (
    COPY_DTYPE,
    COPY_THREADS,
    HALF_ROWS,
    SPMM_HALF,
    copy_config,
    copy_grid,
    copy_pitch,
    half_config,
)
from sparsetile.launch.bound import BoundProduct
from sparsetile.launch.geometry import stride_params
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = ["HalfRunner"]

# Values of a bundle outside of these, times rows of B in the copy, might overflow float32: then no
# row is gathered from the copy. For single rows the kernel checks each entry.
LARGEST, SMALLEST = 2.0**80, 2.0**-80
# Most bytes of a copy; a larger B is copied and multiplied in parts of its columns.
MOST_COPIED = 2**32
_SCALES_AT = 256  # alignment of the scales in bytes
# Addresses that a product has beside those of B and C.
_PLACES = ("copy", "scales", "partials", "arrivals")


class _Launches:
    """Both launches of a product, prepared; each product looks up its memory."""

    def __init__(
        self, steps: Sequence[PreparedLaunch], device: int, sizes: tuple[int, int, int, int]
    ) -> None:
        self._steps = [step.launch_with for step in steps]
        self._device = device
        self._place = torch.device("cuda", device)  # parsing its name per product costs time
        self._sizes = sizes

    def launch(self, stream: int, *values: Any) -> None:
        """Multiply B, at the first address, into C, at the second."""
        copied, scales, partials, counters = self._sizes
        memory = torch.empty(copied, dtype=torch.uint8, device=self._place)
        at = memory.data_ptr()
        rest = (0, 0)
        if counters or partials:
            sums, arrivals = scratch(self._device, stream, partials, counters)
            rest = (sums.data_ptr(), arrivals.data_ptr())
        for launch in self._steps:
            launch(stream, (at, at + scales, *rest), *values)


class HalfRunner(Runner):
    """Packed if rows are bundled: ``values``, those of ``csr``'s bundles; ``unfit`` [1], whether
    some of A's values are too large or small for the copy."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        rows = self._rows = RowRunner(meta)
        self._work = rows.plain if rows.mixed is None else rows.mixed  # schedule of products
        self.packed_names = ("values", "unfit") if self._work.bundled else ()
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        if not self._work.bundled:
            return {}
        unfit = torch.zeros(1, dtype=torch.int32, device=tensors["indptr"].device)
        if values is not None and values.numel():
            sizes = values.abs()
            wide = (sizes > LARGEST) | ((sizes < SMALLEST) & (sizes > 0))
            unfit = (wide & torch.isfinite(sizes)).any().to(torch.int32).reshape(1)
        return {"values": self._rows.pack(tensors, values, dtype)["values"], "unfit": unfit}

    def _launch_for(self, n: int, vector: int, weighted: bool, device: int) -> Launch:
        key = (n, vector, weighted, device)
        found = self._launches.get(key)
        if found is None:
            rows, facts = self._rows, machine(torch.device("cuda", device))
            shape = replace(rows.shape, small=False, shared=False)
            work = self._work
            if work.bundled:
                items = work.sections[1] + work.sections[3]
                tile = choose_bundle_tile(COPY_DTYPE, n, vector, items)
            else:
                tile = choose_tile(COPY_DTYPE, n, vector, shape, cols=self.cols, l2=facts.l2_bytes)
            config = half_config(tile, weighted, bundles=work.bundled, shape=shape)
            kernel = SPMM_HALF.load(config, device)
            found = Launch.of(kernel, work, tile, n, shape, facts.processors)
            self._launches[key] = found
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self._rows.plain.items:
            number = device_index(device)
            self._launch_for(n, vector_width(COPY_DTYPE, n), weighted, number)
            HALF_ROWS.load(copy_config(n, vector_width(torch.float32, n)), number)

    def _sizes(self, launch: Launch, n: int) -> tuple[int, int, int, int]:
        """Bytes of the copy and its scales, offset of the scales, scratch bytes, counters."""
        scales = -(-self.cols * copy_pitch(n) * COPY_DTYPE.itemsize // _SCALES_AT) * _SCALES_AT
        slots = launch.slabs * launch.work.slots
        partials = slots * launch.partial_bytes(COPY_DTYPE, False)
        return scales + 4 * self.cols, scales, partials, launch.slabs * launch.work.nodes

    def _in_parts(self, launch: Launch, n: int) -> bool:
        """Whether all columns are too many for one launch or one copy."""
        return launch.too_wide or self._sizes(launch, n)[0] > MOST_COPIED

    def _params(
        self, launch: Launch, tensors: Tensors, values: Tensor | None, packed: Tensors | None,
        epilogue: Epilogue, n: int, strides: tuple[int, int],
    ) -> dict[str, Any]:  # fmt: skip
        """Parameters without addresses of B, C, the copy and scratch memory. ``strides``: row
        strides of B in bytes and of C in elements."""
        found = self._rows.params(launch, tensors, values, packed, "sum", epilogue)
        del found["heads"]
        pitch = copy_pitch(n)
        return {
            **found, **stride_params((pitch * COPY_DTYPE.itemsize, strides[1], 0, 0)),
            **dict.fromkeys((*_PLACES, "b", "c"), 0),
            "unfit": 0 if not packed else packed["unfit"].data_ptr(), "wide_row_bytes": strides[0],
            "k": self.cols, "n": n, "pitch": pitch,
        }  # fmt: skip

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        n = B.shape[-1]
        if n == 0 or self._rows.plain.items == 0:
            return
        if packed is None:
            packed = self.pack(tensors, values, B.dtype)
        for one, c in [(B, out)] if B.dim() == 2 else zip(B, out, strict=True):
            self._multiply(tensors, values, packed, one, c, epilogue)

    def _multiply(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue,
    ) -> None:  # fmt: skip
        n, device = B.shape[1], B.device.index
        vector = vector_width(COPY_DTYPE, n, out.stride(0), out.data_ptr() // 4)
        launch = self._launch_for(n, vector, values is not None, device)
        if n > 1 and self._in_parts(launch, n):
            half = n // 2 // THREADS * THREADS or n // 2
            for columns in (slice(0, half), slice(half, None)):
                bias = None if epilogue.bias is None else epilogue.bias[columns]
                some = replace(epilogue, bias=bias)
                self._multiply(tensors, values, packed, B[:, columns], out[:, columns], some)
            return
        strides = (B.stride(0) * 4, out.stride(0))
        params = self._params(launch, tensors, values, packed, epilogue, n, strides)
        copied, scales, partials, counters = self._sizes(launch, n)
        memory = torch.empty(copied, dtype=torch.uint8, device=B.device)
        at = memory.data_ptr()
        params |= {"b": B.data_ptr(), "c": out.data_ptr(), "copy": at, "scales": at + scales}
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            if counters or partials:
                sums, arrivals = scratch(device, stream, partials, counters)
                params |= {"partials": sums.data_ptr(), "arrivals": arrivals.data_ptr()}
            if self.cols:
                vector = self._copy_vector(B)
                copier = HALF_ROWS.load(copy_config(n, vector), device)
                blocks = copy_grid(self.cols, n, vector)
                copier.launch(blocks, COPY_THREADS, stream, params, overlap=True)
            grid = launch.grid(1)
            launch.kernel.launch(grid, THREADS, stream, params, overlap=launch.overlap)

    def _copy_vector(self, B: Tensor) -> int:
        return 4 if vector_width(B.dtype, B.shape[1], B.stride(0), B.data_ptr() // 4) == 4 else 1

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return both launches of B -> C, plain matrices; None if a grid is too small."""
        if not self._rows.plain.items:
            return ()
        if not self.cols or (packed is None and self._work.bundled):
            return None
        n, device = B.shape[1], tensors["indptr"].device.index
        launch = self._launch_for(n, vector_width(COPY_DTYPE, n), values is not None, device)
        if self._in_parts(launch, n):
            return None
        params = self._params(launch, tensors, values, packed, epilogue, n, (B.stride(0) * 4, n))
        patch = ("b", "c") if epilogue.plain else ("b", "c", "bias", "alpha")
        vector = self._copy_vector(B)
        copier = HALF_ROWS.load(copy_config(n, vector), device)
        blocks = copy_grid(self.cols, n, vector)
        steps = (
            copier.prepare(blocks, COPY_THREADS, params, patch, _PLACES, overlap=True),
            launch.kernel.prepare(
                launch.grid(1), THREADS, params, patch, _PLACES, overlap=launch.overlap
            ),
        )
        return [_Launches(steps, device, self._sizes(launch, n))]

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundProduct | None:
        return BoundProduct(self, tensors, values, packed) if self.rows else None
