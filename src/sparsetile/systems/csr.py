"""``csr``: CUDA cores on plain rows. For matrices that no tile fits; the yardstick of the rest.

Parts: row pointers and column ids as given, plus the segment schedule (balance/segments.py).
Deterministic, exact FP32 arithmetic, any shape, every dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import schedule_segments
from sparsetile.formats import pack_rows
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import current_stream_handle, on_device
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import (
    ELEMENTS,
    LANES,
    SDDMM_CSR,
    SPMM_CSR,
    THREADS,
    RowTile,
    choose_tile,
    sddmm_config,
    spmm_config,
    vector_width,
)
from sparsetile.systems.base import (
    PLAIN,
    Epilogue,
    PatternRunner,
    Request,
    Stage,
    System,
    make_recipe,
)

__all__ = ["CSRSystem"]

# Entries of the longest item: long enough that a group's start-up (item, column ids, first row of
# B) is a small share of its work, short enough that one dense row spreads over the whole GPU.
SEGMENT_LENGTH = 256


class CSRRunner(PatternRunner):
    """Launches ``spmm_csr`` and ``sddmm_csr``. Parts: indptr, columns, items, parents, nodes."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        super().__init__(meta)
        self._items = int(meta["items"])
        self._slots = int(meta["slots"])
        self._nodes = int(meta["nodes"])
        self._kernels: dict[tuple[Any, ...], tuple[LoadedKernel, RowTile, int, int]] = {}

    def _kernel(
        self,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        n: int,
        vector: int,
        mode: str,
        weighted: bool,
        device: int,
    ) -> tuple[LoadedKernel, RowTile, int, int]:
        key = (dtype, out_dtype, n, vector, mode, weighted, device)
        found = self._kernels.get(key)
        if found is None:
            repair = mode == "repair"
            tile = RowTile(vector, LANES[-1]) if repair else choose_tile(n, vector)
            config = spmm_config(
                dtype, out_dtype, tile, "sum" if repair else mode, weighted, repair
            )
            kernel = SPMM_CSR.load(config, device)
            slabs = tile.slabs(n)
            blocks = -(-self._items // (THREADS // tile.lanes)) * slabs
            found = self._kernels[key] = (kernel, tile, slabs, blocks)
        return found

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and self.rows:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._kernel(dtype, dtype, n, vector_width(dtype, n), "sum", weighted, index)

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        self._launch(parts, values, B, out, None, "sum", epilogue)

    def repair(
        self, parts: Sequence[Tensor], values: Tensor | None, B: Tensor, out: Tensor
    ) -> None:
        """Recompute, from A's entries alone, the elements of A·B in ``out`` that are not finite.

        For systems whose tiles invent zeros: a zero of theirs times an Inf or NaN of B is NaN.
        """
        self._launch(parts, values, B, out, None, "repair", PLAIN)

    def extremum(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor,
        maximum: bool,
    ) -> None:
        self._launch(parts, values, B, out, args, "max" if maximum else "min", PLAIN)

    def _launch(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        mode: str,
        epilogue: Epilogue,
    ) -> None:
        n = B.shape[-1]
        if n == 0 or self.rows == 0:
            return
        batched = B.dim() == 3
        batches = B.shape[0] if batched else 1
        if batches == 0:
            return
        _, columns, items, parents, nodes = parts
        b_stride, c_stride = B.stride(-2), out.stride(-2)
        b_batch = B.stride(0) if batched else 0
        c_batch = out.stride(0) if batched else 0
        b_pointer, c_pointer = B.data_ptr(), out.data_ptr()
        size = B.element_size()
        vector = vector_width(
            B.dtype, n, b_stride, c_stride, b_batch, c_batch,
            b_pointer // size, c_pointer // out.element_size(),
        )  # fmt: skip
        device = B.device.index
        kernel, tile, slabs, blocks = self._kernel(
            B.dtype, out.dtype, n, vector, mode, values is not None, device
        )
        bias = epilogue.bias
        with on_device(device):
            stream = current_stream_handle(device)
            partials = arrivals = partial_args = 0
            if self._slots:
                elements = batches * self._slots * slabs * tile.slab
                acc_bytes = 8 if B.dtype is torch.float64 else 4
                arg_bytes = 4 if args is not None else 0
                memory, counters = scratch(
                    device,
                    stream,
                    elements * (acc_bytes + arg_bytes),
                    batches * slabs * self._nodes,
                )
                partials, arrivals = memory.data_ptr(), counters.data_ptr()
                partial_args = partials + elements * acc_bytes
            kernel.launch(
                (blocks, 1, batches), THREADS, stream,
                items.data_ptr(), parents.data_ptr(), nodes.data_ptr(), arrivals,
                columns.data_ptr(), 0 if values is None else values.data_ptr(),
                b_pointer, c_pointer, 0 if bias is None else bias.data_ptr(),
                partials, partial_args, 0 if args is None else args.data_ptr(),
                b_stride, c_stride, b_batch, c_batch,
                epilogue.alpha, epilogue.beta,
                n, self._items, slabs, self._slots, self._nodes,
                0, epilogue.mean, epilogue.relu,
            )  # fmt: skip

    def sddmm(self, parts: Sequence[Tensor], G: Tensor, B: Tensor) -> Tensor:
        batches = B.shape[0] if B.dim() == 3 else 1
        n = B.shape[-1]
        acc = torch.float64 if B.dtype is torch.float64 else torch.float32
        out = torch.empty((batches, self.nnz), dtype=acc, device=B.device)
        if n == 0:
            out.zero_()
        elif self.nnz and batches:
            self._launch_sddmm(parts, G, B, out, batches)
        return (out[0] if batches == 1 else out.sum(0)).to(B.dtype)

    def _launch_sddmm(
        self, parts: Sequence[Tensor], G: Tensor, B: Tensor, out: Tensor, batches: int
    ) -> None:
        n = B.shape[-1]
        batched = B.dim() == 3
        g_batch = G.stride(0) if batched else 0
        b_batch = B.stride(0) if batched else 0
        size = B.element_size()
        vector = vector_width(
            B.dtype, n, G.stride(-2), B.stride(-2), g_batch, b_batch,
            G.data_ptr() // size, B.data_ptr() // size,
        )  # fmt: skip
        tile = choose_tile(n, vector)
        device = B.device.index
        kernel = SDDMM_CSR.load(sddmm_config(B.dtype, tile), device)
        _, columns, items, _, _ = parts
        with on_device(device):
            kernel.launch(
                (-(-self._items // (THREADS // tile.lanes)), 1, batches), THREADS,
                current_stream_handle(device),
                items.data_ptr(), columns.data_ptr(), G.data_ptr(), B.data_ptr(), out.data_ptr(),
                G.stride(-2), B.stride(-2), g_batch, b_batch, self.nnz,
                n, self._items,
            )  # fmt: skip


class CSRSystem(System):
    """CUDA cores, deterministic, every shape and dtype."""

    name = "csr"
    summary = "CUDA cores on plain rows, long rows cut, sums in a fixed order"
    devices = ("cuda",)
    dtypes = tuple(ELEMENTS)
    deterministic = True
    architectures = "sm_80 and newer"

    def further_reasons(self, request: Request) -> list[str]:
        if request.csr.nnz >= 2**31:
            return [f"holds under 2^31 entries, A has {request.csr.nnz}"]
        return []

    def build(self, request: Request) -> Stage:
        rows = pack_rows(request.csr)
        schedule = schedule_segments(
            request.csr, SEGMENT_LENGTH, row_order=request.permutation.perm
        )
        recipe = make_recipe(
            self.name,
            request.csr,
            items=schedule.item_count,
            slots=schedule.slot_count,
            nodes=schedule.node_count,
        )
        choices = {
            "format": f"rows, {rows.format_bytes} bytes",
            "schedule": f"{schedule.item_count} items of at most {SEGMENT_LENGTH} entries, "
            f"{schedule.slot_count} partial sums",
        }
        parts = (rows.indptr, rows.columns, schedule.items, schedule.parent_of_slot, schedule.nodes)
        return Stage(self.name, parts, recipe, choices)

    def make_runner(self, meta: Mapping[str, Any]) -> CSRRunner:
        return CSRRunner(meta)
