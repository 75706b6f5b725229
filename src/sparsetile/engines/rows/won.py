"""Launches of ``spmm_won``: the gradient of a max or min, collected by rows of the transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.rows.work import Work
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.csr import THREADS
from sparsetile.kernels.won import SPMM_WON, won_config, won_lanes, won_vector
from sparsetile.launch.columns import prepare_changing
from sparsetile.launch.geometry import MAX_SCRATCH, MAX_SLABS, batch_count, batch_pieces
from sparsetile.launch.interface import Tensors
from sparsetile.launch.kept import KeptLaunches

__all__ = ["WonElements"]


class WonElements:
    """What ``ExactRunner.won`` does on a GPU, for a matrix of ``rows`` rows."""

    def __init__(self, work: Work, rows: int) -> None:
        self._work, self._rows = work, rows
        self._launches = KeptLaunches[tuple[Any, ...], Callable[..., None]]()

    def __call__(
        self, tensors: Tensors, values: Tensor | None, grad: Tensor, args: Tensor, order: Tensor,
        indptr: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        n, batches, work = grad.shape[-1], batch_count(grad), self._work
        if not (n and batches and work.items):
            return
        device, vector = device_index(grad.device), won_vector(grad.dtype, args.dtype, n)
        lanes = won_lanes(n, vector)
        slabs = -(-n // (vector * lanes))
        slot_bytes = lanes * vector * (8 if grad.dtype is torch.float64 else 4)
        pieces = batch_pieces(batches, MAX_SCRATCH // max(slabs * work.slots * slot_bytes, 1))
        if len(pieces) > 1 or slabs > MAX_SLABS:
            halves = ((..., slice(0, n // 2)), (..., slice(n // 2, None)))
            for part in pieces if len(pieces) > 1 else halves:
                some = torch.empty_like(out[part], memory_format=torch.contiguous_format)
                cut = grad[part].contiguous(), args[part].contiguous()
                self(tensors, values, *cut, order, indptr, some)
                out[part] = some
            return
        with on_device(device):
            ensure_cuda_context(device)
            key = (n, batches, grad.shape[-2], grad.dtype, args.dtype, device)
            launch = self._launches.get(key)
            if launch is None:
                config = won_config(grad.dtype, args.dtype, vector, lanes)
                launch = self._launches.keep(key, self._prepare(config, lanes, slabs, key))
            stream, arrivals, partials = current_stream_handle(device), 0, 0
            if work.slots:
                layers = batches * slabs
                memory, counters = scratch(
                    device, stream, layers * work.slots * slot_bytes, layers * work.nodes
                )
                arrivals, partials = counters.data_ptr(), memory.data_ptr()
            launch(
                stream, tensors["items"].data_ptr(), tensors["columns"].data_ptr(),
                order.data_ptr(), indptr.data_ptr(), 0 if values is None else values.data_ptr(),
                grad.data_ptr(), args.data_ptr(), out.data_ptr(),
                tensors["parent_of_slot"].data_ptr(), tensors["nodes"].data_ptr(), arrivals,
                partials,
            )  # fmt: skip

    def _prepare(
        self, config: dict[str, Any], lanes: int, slabs: int, key: tuple[Any, ...]
    ) -> Callable[..., None]:
        n, batches, grad_rows, *_, device = key
        sections = self._work.section_params(lanes)
        constants = {
            **sections, "n": n, "grad_batch_stride": grad_rows * n,
            "out_batch_stride": self._rows * n, "slot_count": self._work.slots,
            "node_count": self._work.nodes,
        }  # fmt: skip
        grid = (sections["block_end"][-1], slabs, batches)
        return prepare_changing(SPMM_WON, config, device, grid, THREADS, constants)
