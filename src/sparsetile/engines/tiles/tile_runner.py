"""Shared launches of kernels on bitmap tiles: from a plan's tensors to parameters.

Both ``spmm_bittcf`` and ``spmm_wcsr`` take packed values in tile order, a row order with a count
of positions, and items of work. A runner may own all rows of C or some: positions past ``order``
do not exist, and rows without a position are not written.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsetile.core.device import machine
from sparsetile.engines.runner import Runner
from sparsetile.formats.values import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import vector_width
from sparsetile.kernels.repair import REDO_BLOCKS
from sparsetile.launch.bound import BoundProduct, Scratch, Step, prepare_steps
from sparsetile.launch.epilogue import epilogue_params
from sparsetile.launch.geometry import (
    ACCESS_BYTES,
    MAX_SCRATCH,
    MAX_SLABS,
    Geometry,
    aligned,
    batch_count,
    batch_pieces,
    padded_like,
    stride_params,
)
from sparsetile.launch.interface import PLAIN, Epilogue, Prepared, Tensors

__all__ = [
    "AlignedTileRunner", "LaterLaunch", "TileLaunch", "TileRunner", "redo_blocks", "sm_count",
]  # fmt: skip

# Packed values are copied in words of four bytes, or in pieces of sixteen.
_VALUE_MARGIN = 8
# Columns that are too many for one grid are split at a multiple of this, so that both parts are
# aligned like the whole.
_PART_COLUMNS = 512


@dataclass(frozen=True)
class LaterLaunch:
    """A kernel after the product, with the same parameters, slabs and matrices."""

    kernel: LoadedKernel
    threads: int
    blocks: int


@dataclass(frozen=True)
class TileLaunch:
    """A loaded kernel with the parameters that depend only on the width."""

    kernel: LoadedKernel
    threads: int  # of a thread block
    blocks: int  # for the items
    slabs: int  # for the columns of B
    slot_bytes: int  # of a partial sum in its slot
    # Counters of cut windows and flags of what a later launch recomputes (``redo.cuh``), per slab
    # of one matrix. All are zero between products.
    counters: int = 0
    flags: int = 0
    # The kernel that adds up cut windows, if the first one does not, then the one that recomputes.
    later: tuple[LaterLaunch, ...] = ()
    params: Mapping[str, int] = field(default_factory=dict)  # that depend on type and width

    def scratch(self, slots: int, layers: int, params: Mapping[str, Any]) -> Scratch | None:
        """Return the memory that ``layers`` slabs need, or None for none."""
        if not (slots or self.flags):
            return None
        places = {"arrivals": 0, "redo": 4 * layers * self.counters if self.flags else None}
        return Scratch(
            layers * slots * self.slot_bytes,
            layers * (self.counters + self.flags),
            arrivals={k: v for k, v in places.items() if k in params and v is not None},
            owned=bool(self.later),
        )


def sm_count(device: int) -> int:
    return machine(torch.device("cuda", device)).processors


def redo_blocks(units: int, slabs: int, device: int) -> int:
    """Thread blocks that recompute ``units`` of a slab: those of all slabs run at once."""
    most = REDO_BLOCKS * sm_count(device)
    return max(1, min(units, -(-most // slabs)))


class TileRunner(Runner):
    """Packed ``values``: A's values in tile order, float32 rounded to TF32.

    ``meta``: ``positions`` (its rows of C), ``items``, ``slots`` (partial sums), ``nodes`` (sums of
    them).
    """

    packed_names = ("values",)

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._positions = int(meta["positions"])
        self._items = int(meta["items"])
        self._slots = int(meta["slots"])
        self._nodes = int(meta["nodes"])
        self._launches: dict[tuple[Any, ...], TileLaunch] = {}

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        entries = tensors["entries"]
        if values is None:
            return {"values": torch.empty(0, dtype=dtype, device=entries.device)}
        packed = values.to(dtype)[entries]
        if dtype is torch.float32:
            packed = round_tf32(packed)
        margin = packed.new_zeros(-packed.numel() % _VALUE_MARGIN)
        return {"values": torch.cat([packed, margin])}

    @abstractmethod
    def _load(
        self, dtype: torch.dtype, out_dtype: torch.dtype, n: int, vector: int, weighted: bool,
        device: int,
    ) -> TileLaunch:  # fmt: skip
        """Return the launch for products of ``n`` columns; ``vector`` elements per access."""

    @abstractmethod
    def _format_params(self, tensors: Tensors) -> dict[str, int]:
        """Return the parameters of the kernel's own format and schedule."""

    def _launch_for(self, *key: Any) -> TileLaunch:
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._load(*key)
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self._items:
            vector = vector_width(dtype, n)
            self._launch_for(dtype, dtype, n, vector, weighted, device_index(device))

    def _params(
        self, tensors: Tensors, packed: Tensors | None, epilogue: Epilogue
    ) -> dict[str, int | float]:
        """Parameters that do not depend on B, C and scratch memory."""
        return {
            **self._format_params(tensors),
            "values": 0 if packed is None else packed["values"].data_ptr(),
            "order": tensors["order"].data_ptr(), "indptr": tensors["indptr"].data_ptr(),
            "rows": self._positions, "slot_count": self._slots, "partials": 0,
            **epilogue_params(epilogue),
        }  # fmt: skip

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        n, batches = B.shape[-1], batch_count(B)
        if n == 0 or self._items == 0 or batches == 0:
            return
        if values is not None and packed is None:
            packed = self.pack(tensors, values, B.dtype)
        shape = Geometry.of(B, out)
        device = shape.device
        launch = self._launch_for(B.dtype, out.dtype, n, shape.vector, values is not None, device)
        if launch.slabs > MAX_SLABS:
            self._in_halves(tensors, values, packed, B, out, epilogue)
            return
        scratch_bytes = max(launch.slabs * self._slots * launch.slot_bytes, 1)  # of a matrix
        if len(pieces := batch_pieces(batches, MAX_SCRATCH // scratch_bytes)) > 1:
            for piece in pieces:
                self.spmm(tensors, values, packed, B[piece], out[piece], epilogue)
            return
        params = {**self._params(tensors, packed, epilogue), **launch.params, **shape.params}
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            needed = launch.scratch(self._slots, batches * launch.slabs, params)
            if needed is not None:
                # A later launch reads this one's result: no other thread's may come between.
                owner = threading.get_ident() if needed.owned else 0
                memory, counters = scratch(device, stream, needed.bytes, needed.counters, owner)
                params["partials"] = memory.data_ptr()
                for name, offset in needed.arrivals.items():
                    params[name] = counters.data_ptr() + offset
            grid = (launch.blocks, launch.slabs, batches)
            launch.kernel.launch(grid, launch.threads, stream, params, overlap=not self._slots)
            for later in launch.later:
                grid = (later.blocks, launch.slabs, batches)
                later.kernel.launch(grid, later.threads, stream, params, overlap=True)

    def _in_halves(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue,
    ) -> None:  # fmt: skip
        """Multiply more columns than one grid holds, in two parts."""
        n = B.shape[-1]
        half = n // (2 * _PART_COLUMNS) * _PART_COLUMNS or n // 2
        for part in (slice(0, half), slice(half, None)):
            bias = None if epilogue.bias is None else epilogue.bias[part]
            rest = replace(epilogue, bias=bias)
            self.spmm(tensors, values, packed, B[..., part], out[..., part], rest)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launches of B -> C, both plain matrices; None if a grid is too small."""
        if not self._items:
            return ()
        n, stride, size = B.shape[1], B.stride(0), B.element_size()
        vector = vector_width(B.dtype, n, stride, B.data_ptr() // size)
        device = tensors["indptr"].device.index
        launch = self._launch_for(B.dtype, B.dtype, n, vector, values is not None, device)
        if launch.slabs > MAX_SLABS:
            return None
        params = {
            **self._params(tensors, packed, epilogue),
            **launch.params,
            **stride_params((stride * size, n, 0, 0)),
            "b": 0, "c": 0, "n": n,
        }  # fmt: skip
        needed = launch.scratch(self._slots, launch.slabs, params)
        grid = (launch.blocks, launch.slabs, 1)
        steps = [Step(launch.kernel, grid, launch.threads, overlap=not self._slots)]
        for later in launch.later:
            grid = (later.blocks, launch.slabs, 1)
            steps.append(Step(later.kernel, grid, later.threads, overlap=True))
        return prepare_steps(steps, params, epilogue, device, needed)

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundProduct | None:
        return BoundProduct(self, tensors, values, packed) if self.rows else None


class AlignedTileRunner(TileRunner):
    """For kernels that move whole 16-byte pieces of rows.

    B and C that are not aligned to 16 bytes, or not whole pieces wide, are copied.
    """

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        n, columns = B.shape[-1], ACCESS_BYTES // B.element_size()
        whole = n % columns == 0
        if not whole or not aligned(B):  # zeros behind the last column are multiplied, too
            B = pad(B, (0, -n % columns))[..., :n]
        if not whole and epilogue.bias is not None:  # stores are whole, too, and add it whole
            epilogue = replace(epilogue, bias=pad(epilogue.bias, (0, -n % columns)))
        target = out
        if not whole or not aligned(out):
            target = padded_like(out, columns)
            if epilogue.beta != 0.0:
                target.copy_(out)
        super().spmm(tensors, values, packed, B, target, epilogue)
        if target is not out:
            out.copy_(target)

    def prepare_launches(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> Sequence[Prepared] | None:  # fmt: skip
        """Return the launches of B -> C; None if copies are needed."""
        if B.shape[1] * B.element_size() % ACCESS_BYTES or not aligned(B):
            return None
        return super().prepare_launches(tensors, values, packed, B, epilogue)
