"""Launches of kernels on bitmap tiles, from a plan's tensors to parameters: what they share.

``spmm_bittcf`` and ``spmm_wcsr`` take the same parameter struct and parts, in order: first tile of
each window, first value of each part of a tile, column ids, bits, entry number of each packed
value, row order (empty: the given one), row pointers; items, parents and nodes of the schedule
(of ``spmm_wcsr``: nothing, and the windows in pieces).
"""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.formats.bittcf import round_tf32
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import PreparedLaunch, current_stream_handle, on_device
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import vector_width
from sparsetile.systems.base import PLAIN, Epilogue, Runner
from sparsetile.systems.shared.bound import BoundProduct
from sparsetile.systems.shared.cuda_context import enter
from sparsetile.systems.shared.geometry import Geometry, batch_count, batch_pieces

__all__ = ["TileLaunch", "TileRunner"]

_ENTRIES, _ORDER, _INDPTR, _ITEMS = 4, 5, 6, 7
# Fields of the parameter struct that change from call to call: b and c, after four pointers.
_OPERANDS = struct.Struct("@2P")
_OPERANDS_OFFSET = 4 * struct.calcsize("@P")
_ARRIVALS, _B, _C, _PARTIALS = 3, 4, 5, 14
# Bytes of partial sums that a launch may have; batches that need more go in pieces.
MAX_SCRATCH = 2**28


@dataclass(frozen=True)
class TileLaunch:
    """A loaded kernel with what depends on the width alone.

    Attributes
    ----------
    threads, blocks, slabs : int
        Threads of a block, blocks for the items, slabs for the columns of B.
    slot_bytes : int
        Bytes of a partial sum in its slot.
    join : LoadedKernel or None
        The kernel that adds up what cut windows left, where the first does not do it itself, with
        its threads and its blocks for each such window.
    """

    kernel: LoadedKernel
    threads: int
    blocks: int
    slabs: int
    slot_bytes: int
    join: LoadedKernel | None = None
    join_threads: int = 0
    join_blocks: int = 0


class TileRunner(Runner):
    """See the module's text for the parts. Packed: values in tile order, float32 as TF32."""

    packs = True

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._items = int(meta["items"])
        self._slots = int(meta["slots"])
        self._nodes = int(meta["nodes"])
        self._launches: dict[tuple[Any, ...], TileLaunch] = {}

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        if values is None:
            return torch.empty(0, dtype=dtype, device=parts[0].device)
        packed = values.to(dtype)[parts[_ENTRIES]]
        if dtype is torch.float32:
            packed = round_tf32(packed)
        # The kernels copy words of four bytes, or pieces of sixteen.
        return torch.cat([packed, packed.new_zeros(-packed.numel() % 8)])

    @abstractmethod
    def _load(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        weighted: bool,
        device: int,
    ) -> TileLaunch:
        """Return the launch for products of ``n`` columns; ``vector`` elements an access."""

    def _launch_for(self, *key: Any) -> TileLaunch:
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._load(*key)
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._launch_for(dtype, dtype, n, vector_width(dtype, n), weighted, index)

    def _params(
        self,
        parts: Sequence[Tensor],
        packed: Tensor | None,
        n: int,
        strides: tuple[int, int, int, int],
        epilogue: Epilogue,
    ) -> list[int | float]:
        """Fields of the struct; operands and scratch are filled in by the caller."""
        offsets, tc_offset, columns, bits = (part.data_ptr() for part in parts[:_ENTRIES])
        items, parents, nodes = (part.data_ptr() for part in parts[_ITEMS : _ITEMS + 3])
        bias = epilogue.bias
        return [
            items, parents, nodes, 0, 0, 0,
            offsets, tc_offset, columns, bits,
            0 if packed is None else packed.data_ptr(),
            parts[_ORDER].data_ptr(), parts[_INDPTR].data_ptr(),
            0 if bias is None else bias.data_ptr(), 0,
            *strides,
            epilogue.alpha, epilogue.beta,
            self._items, self.rows, n, self._slots, self._nodes,
            not epilogue.plain, epilogue.mean, epilogue.relu,
        ]  # fmt: skip

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        n, batches = B.shape[-1], batch_count(B)
        if n == 0 or self.rows == 0 or batches == 0:
            return
        if values is not None and packed is None:
            packed = self.pack(parts, values, B.dtype)
        shape = Geometry.of(B, out)
        device = shape.device
        launch = self._launch_for(B.dtype, out.dtype, n, shape.vector, values is not None, device)
        scratch_bytes = max(launch.slabs * self._slots * launch.slot_bytes, 1)  # of a matrix
        if len(pieces := batch_pieces(batches, MAX_SCRATCH // scratch_bytes)) > 1:
            for piece in pieces:
                self.spmm(parts, values, packed, B[piece], out[piece], epilogue)
            return
        params = self._params(parts, packed, n, shape.strides, epilogue)
        params[_B], params[_C] = shape.b, shape.c
        with on_device(device):
            enter(device)
            stream = current_stream_handle(device)
            if self._slots:
                layers = batches * launch.slabs
                # A second launch reads what this one leaves: no other thread's may come between.
                owner = 0 if launch.join is None else threading.get_ident()
                memory, arrivals = scratch(
                    device, stream, layers * self._slots * launch.slot_bytes,
                    layers * self._nodes, owner,
                )  # fmt: skip
                params[_ARRIVALS] = arrivals.data_ptr()
                params[_PARTIALS] = memory.data_ptr()
            grid = (launch.blocks, launch.slabs, batches)
            launch.kernel.launch(grid, launch.threads, stream, *params, overlap=not self._slots)
            if self._slots and launch.join is not None:
                grid = (self._nodes * launch.join_blocks, launch.slabs, batches)
                launch.join.launch(grid, launch.join_threads, stream, *params, overlap=True)

    def prepare_launch(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None, B: Tensor
    ) -> PreparedLaunch | None:
        """Return the launch of B -> C, both plain matrices; None where windows were cut."""
        if self._slots:
            return None
        n, stride, size = B.shape[1], B.stride(0), B.element_size()
        vector = vector_width(B.dtype, n, stride, B.data_ptr() // size)
        weighted = values is not None
        launch = self._launch_for(B.dtype, B.dtype, n, vector, weighted, parts[0].device.index)
        params = self._params(parts, packed, n, (stride * size, n, 0, 0), PLAIN)
        grid = (launch.blocks, launch.slabs, 1)
        return launch.kernel.prepare(
            grid, launch.threads, tuple(params), _OPERANDS, _OPERANDS_OFFSET, overlap=True
        )

    def bind(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        return BoundProduct(self, parts, values, packed) if self.rows else None
