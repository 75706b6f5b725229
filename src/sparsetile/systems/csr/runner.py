"""Launches of ``spmm_csr`` and ``sddmm_csr``: from a plan's tensors to kernel parameters.

Parts, in order: indptr, columns; items, parents, nodes of the plain schedule (every row by
itself: max, min, repair, SDDMM); then, where rows were bundled, tagged columns, bundle rows,
entries and slots of the packed values, and items, parents, nodes of the mixed schedule that sums
use.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.formats.bundles import BUNDLE_ROWS, scatter_values
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import (
    BUNDLE_DTYPES,
    MIXED_ROWS,
    SDDMM_CSR,
    SPMM_CSR,
    THREADS,
    RowShape,
    RowTile,
    choose_bundle_tile,
    choose_tile,
    sddmm_config,
    sddmm_tile,
    spmm_config,
    vector_width,
)
from sparsetile.systems.base import PLAIN, Epilogue, PatternRunner
from sparsetile.systems.shared.bound import BoundProduct
from sparsetile.systems.shared.cuda_context import enter
from sparsetile.systems.shared.geometry import Geometry, batch_count, batch_pieces

__all__ = ["CSRRunner"]

# Fields of the parameter struct that change from call to call: b and c, after six pointers.
_OPERANDS = struct.Struct("@2P")
_OPERANDS_OFFSET = 6 * struct.calcsize("@P")
_ARRIVALS, _B, _C, _PARTIALS, _ARGS, _MINIMUM = 3, 6, 7, 13, 14, -3
# Blocks an SM holds, about, and waves of them from which on the next kernel may start early.
BLOCKS_PER_SM, MANY_WAVES = 8, 2


@dataclass(frozen=True)
class Work:
    """One schedule: where its tensors lie in the parts, and its sizes."""

    start: int
    sections: tuple[int, int, int, int]
    slots: int
    nodes: int
    bundled: bool

    def block_ends(self, lanes: int) -> tuple[int, ...]:
        """Where each section ends in blocks; the first two hold wide items, one a warp."""
        per_block = (THREADS // 32, THREADS // 32, THREADS // lanes, THREADS // lanes)
        blocks = [-(-c // b) for c, b in zip(self.sections, per_block, strict=True)]
        return tuple(itertools.accumulate(blocks))


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with what depends on the width alone."""

    kernel: LoadedKernel
    work: Work
    tile: RowTile
    slabs: int
    block_ends: tuple[int, ...]
    slab_fast: bool
    early: bool

    @property
    def overlap(self) -> bool:
        """Whether the kernel may start before its predecessor ends: not where rows are cut.

        There it measured slower (docs/csr.md).
        """
        return self.work.slots == 0

    def grid(self, batches: int) -> tuple[int, int, int]:
        """Blocks of items and slabs, one of them as the fast dimension."""
        blocks = self.block_ends[-1]
        x, y = (blocks * self.slabs, 1) if self.slab_fast else (blocks, self.slabs)
        return x, y, batches

    def partial_bytes(self, dtype: torch.dtype, args: bool) -> int:
        """Bytes of a slot: the device's Accumulator for each lane of a group."""
        wide = dtype is torch.float64
        rows = BUNDLE_ROWS if self.work.bundled else 1
        vectors = self.tile.vector * self.tile.times
        lane = vectors * (rows * (8 if wide else 4) + (4 if args else 0))
        return self.tile.lanes * (-(-lane // 8) * 8 if wide else lane)


class CSRRunner(PatternRunner):
    """See the module's text for the parts."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        plain, mixed = meta["plain"], meta["mixed"]
        self._plain = Work(2, tuple(plain["sections"]), plain["slots"], plain["nodes"], False)
        self._mixed = (
            None
            if mixed is None
            else Work(9, tuple(mixed["sections"]), mixed["slots"], mixed["nodes"], True)
        )
        self.packs = self._mixed is not None
        self._elements = int(meta["elements"])
        self._shape = RowShape(**meta["shape"])
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self._mixed is None or values is None or dtype not in BUNDLE_DTYPES:
            return torch.empty(0, dtype=dtype, device=parts[0].device)
        return scatter_values(values.to(dtype), parts[7], parts[8], self._elements)

    def _launch_for(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        mode: str,
        weighted: bool,
        device: int,
    ) -> Launch:
        key = (dtype, out_dtype, n, vector, mode, weighted, device)
        found = self._launches.get(key)
        if found is None:
            bundles = mode == "sum" and self._mixed is not None and dtype in BUNDLE_DTYPES
            work = self._mixed if bundles and self._mixed is not None else self._plain
            properties = torch.cuda.get_device_properties(device)
            if mode == "repair":
                tile = RowTile(vector, 32)
            elif bundles:
                items = work.sections[0] + work.sections[2]
                tile = choose_bundle_tile(dtype, n, vector, items)
            else:
                l2 = properties.L2_cache_size
                args = mode in ("argmax", "argmin")
                tile = choose_tile(dtype, n, vector, self._shape, cols=self.cols, l2=l2, args=args)
            config = spmm_config(
                dtype,
                tile,
                weighted,
                out_dtype=out_dtype,
                extremum=mode in ("max", "min", "argmax", "argmin"),
                args=mode in ("argmax", "argmin"),
                bundles=bundles,
                repair=mode == "repair",
                shape=self._shape if mode == "sum" else MIXED_ROWS,
            )
            slabs, block_ends = tile.slabs(n), work.block_ends(tile.lanes)
            # Blocks of the next kernel go to the SMs that are done first: uneven unless they are
            # many.
            waves = block_ends[-1] * slabs / (properties.multi_processor_count * BLOCKS_PER_SM)
            found = self._launches[key] = Launch(
                SPMM_CSR.load(config, device),
                work,
                tile,
                slabs,
                block_ends,
                slab_fast=slabs > 1 and self._shape.slabs_first(bundles),
                early=work.slots == 0 and waves >= MANY_WAVES,
            )
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._launch_for(dtype, dtype, n, vector_width(dtype, n), "sum", weighted, index)

    def _params(
        self,
        launch: Launch,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        n: int,
        strides: tuple[int, int, int, int],
        epilogue: Epilogue,
    ) -> list[int | float]:
        """Fields of the struct; operands, scratch and args are filled in by the caller."""
        work = launch.work
        items, parents, nodes = (part.data_ptr() for part in parts[work.start : work.start + 3])
        tagged = bundle_rows = four = 0
        if work.bundled:
            tagged, bundle_rows = parts[5].data_ptr(), parts[6].data_ptr()
            four = 0 if packed is None else packed.data_ptr()
        bias = epilogue.bias
        return [
            items, parents, nodes, 0,
            parts[1].data_ptr(), 0 if values is None else values.data_ptr(), 0, 0,
            tagged, four, bundle_rows, parts[0].data_ptr(),
            0 if bias is None else bias.data_ptr(), 0, 0,
            *strides,
            epilogue.alpha, epilogue.beta,
            *itertools.accumulate(work.sections), *launch.block_ends,
            n, launch.slabs, work.slots, work.nodes,
            not epilogue.plain, epilogue.mean, epilogue.relu, 0, launch.slab_fast, launch.early,
        ]  # fmt: skip

    def _run(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        mode: str,
        epilogue: Epilogue,
        only_if: Tensor | None = None,
    ) -> None:
        n, batches = B.shape[-1], batch_count(B)
        if n == 0 or self.rows == 0 or batches == 0:
            return
        if len(pieces := batch_pieces(batches)) > 1:
            for piece in pieces:
                some = None if args is None else args[piece]
                self._run(
                    parts, values, packed, B[piece], out[piece], some, mode, epilogue, only_if
                )
            return
        shape = Geometry.of(B, out)
        device, weighted = shape.device, values is not None
        launch = self._launch_for(B.dtype, out.dtype, n, shape.vector, mode, weighted, device)
        work = launch.work
        if work.bundled and values is not None and packed is None:
            packed = self.pack(parts, values, B.dtype)
        params = self._params(launch, parts, values, packed, n, shape.strides, epilogue)
        params[_B], params[_C] = shape.b, shape.c
        noted = only_if if args is None else args
        params[_ARGS] = 0 if noted is None else noted.data_ptr()
        params[_MINIMUM] = mode in ("min", "argmin")
        with on_device(device):
            enter(device)
            stream = current_stream_handle(device)
            if work.slots:
                layers = batches * launch.slabs
                slot_bytes = launch.partial_bytes(B.dtype, args is not None)
                memory, arrivals = scratch(
                    device, stream, layers * work.slots * slot_bytes, layers * work.nodes
                )
                params[_ARRIVALS], params[_PARTIALS] = arrivals.data_ptr(), memory.data_ptr()
            launch.kernel.launch(
                launch.grid(batches), THREADS, stream, *params, overlap=launch.overlap
            )

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        self._run(parts, values, packed, B, out, None, "sum", epilogue)

    def repair(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
        only_if: Tensor | None = None,
    ) -> None:
        """Recompute, from A's entries alone, the elements of ``out`` that are not finite.

        For systems whose tiles invent zeros: a zero of theirs times an Inf or NaN of B is NaN, and
        stays NaN through an epilogue, which is then part of what is computed again. ``beta`` must
        be 0: what ``out`` held is gone. Where ``only_if`` [1] (int64) is 0, ``out`` is not even
        looked at.
        """
        self._run(parts, values, None, B, out, None, "repair", epilogue, only_if)

    def prepare_repair(
        self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        """Compile what :meth:`repair` of a product of width ``n`` will need."""
        if n and self.rows:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._launch_for(dtype, dtype, n, vector_width(dtype, n), "repair", weighted, index)

    def extremum(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        mode = ("" if args is None else "arg") + ("max" if maximum else "min")
        self._run(parts, values, None, B, out, args, mode, PLAIN)

    def prepare_launch(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None, B: Tensor
    ) -> PreparedLaunch | None:
        """Return the launch of B -> C, both plain matrices; None where rows were cut."""
        n, stride, size = B.shape[1], B.stride(0), B.element_size()
        vector = vector_width(B.dtype, n, stride, B.data_ptr() // size)
        weighted = values is not None
        device = parts[0].device.index
        launch = self._launch_for(B.dtype, B.dtype, n, vector, "sum", weighted, device)
        if launch.work.slots:
            return None
        params = self._params(launch, parts, values, packed, n, (stride * size, n, 0, 0), PLAIN)
        return launch.kernel.prepare(
            launch.grid(1), THREADS, tuple(params), _OPERANDS, _OPERANDS_OFFSET,
            overlap=launch.overlap,
        )  # fmt: skip

    def bind(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        return BoundProduct(self, parts, values, packed) if self.rows else None

    def sddmm(self, parts: Sequence[Tensor], G: Tensor, B: Tensor) -> Tensor:
        n, batches = B.shape[-1], batch_count(B)
        acc = torch.float64 if B.dtype is torch.float64 else torch.float32
        out = torch.empty((batches, self.nnz), dtype=acc, device=B.device)
        if n == 0:
            out.zero_()
        elif self.nnz:
            for piece in batch_pieces(batches):
                cut = piece if B.dim() == 3 else slice(None)
                self._launch_sddmm(parts, G[cut], B[cut], out[piece])
        return (out[0] if batches == 1 else out.sum(0)).to(B.dtype)

    def _launch_sddmm(self, parts: Sequence[Tensor], G: Tensor, B: Tensor, out: Tensor) -> None:
        n, batches = B.shape[-1], batch_count(B)
        batched = B.dim() == 3
        g_batch, b_batch = (G.stride(0), B.stride(0)) if batched else (0, 0)
        size = B.element_size()
        vector = vector_width(
            B.dtype, n, G.stride(-2), B.stride(-2), g_batch, b_batch,
            G.data_ptr() // size, B.data_ptr() // size,
        )  # fmt: skip
        tile = sddmm_tile(B.dtype, n, vector)
        device = B.device.index
        kernel = SDDMM_CSR.load(sddmm_config(B.dtype, tile), device)
        work = self._plain
        block_ends = work.block_ends(tile.lanes)
        with on_device(device):
            enter(device)
            kernel.launch(
                (block_ends[-1], 1, batches), THREADS,
                current_stream_handle(device),
                parts[2].data_ptr(), parts[1].data_ptr(), G.data_ptr(), B.data_ptr(),
                out.data_ptr(),
                G.stride(-2), B.stride(-2), g_batch, b_batch, self.nnz,
                *itertools.accumulate(work.sections), *block_ends, n,
            )  # fmt: skip
