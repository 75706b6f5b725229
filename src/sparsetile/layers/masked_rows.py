"""Dense weights and packed entries of kept weights and the bits of their places, by GPU kernels.

torch's operations for the same write and read tens of bytes for each weight
(``formats/entry_streams.py``, ``nn/masks.py``); these kernels read each kept weight once and write
each result once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.formats.entry_streams import EntryStreams, place_rows
from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.kernels.masked_rows import (
    PACK_ENTRIES,
    SPREAD_MASKED,
    SPREAD_WARPS,
    pack_capacity,
    pack_config,
    pack_shared_bytes,
    spread_config,
)

__all__ = ["PACKED_COLUMNS", "pack_masked", "spread_masked", "takes_rows"]

# Columns up to which a row's entries fit into the shared memory of any GPU since sm_80.
PACKED_COLUMNS = 30000


def takes_rows(weight: Tensor, bits: Tensor) -> bool:
    """Whether the kernels take kept weights and bits: 16 bits, on a GPU."""
    return (
        weight.dtype.itemsize == 2
        and weight.is_cuda
        and bits.device == weight.device
        and weight.is_contiguous()
        and bits.is_contiguous()
        and weight.numel() > 0
    )


def _count(bits: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return the entries of each row, and the kept weights before it [rows + 1]."""
    rows, row_bytes = bits.shape
    index = bits.device.index
    lengths, kept = (torch.empty(rows, dtype=torch.int32, device=bits.device) for _ in range(2))
    with on_device(index):
        ensure_cuda_context(index)
        kernel = PACK_ENTRIES.load(pack_config(True), index, 0)
        kernel.launch(
            (rows, 1, 1), 32, current_stream_handle(index),
            {
                "bits": bits.data_ptr(), "weight": 0, "kept_begin": 0, "row_ids": 0, "offsets": 0,
                "lengths": lengths.data_ptr(), "kept_counts": kept.data_ptr(), "stream": 0,
                "starts": 0, "cols": cols, "row_bytes": row_bytes, "parts": 1, "capacity": 0,
            },
        )  # fmt: skip
    before = torch.zeros(rows + 1, dtype=torch.int64, device=bits.device)
    torch.cumsum(kept, 0, out=before[1:])
    return lengths, before


@torch.no_grad()
def spread_masked(weight: Tensor, bits: Tensor, cols: int) -> Tensor:
    """Return the dense weight [rows, cols]. The host does not wait."""
    rows, row_bytes = bits.shape
    index = bits.device.index
    _, before = _count(bits, cols)
    dense = weight.new_empty(rows, cols)
    with on_device(index):
        kernel = SPREAD_MASKED.load(spread_config(), index)
        kernel.launch(
            (-(-rows // SPREAD_WARPS), 1, 1), 32 * SPREAD_WARPS, current_stream_handle(index),
            {
                "bits": bits.data_ptr(), "weight": weight.data_ptr(),
                "kept_begin": before.data_ptr(), "dense": dense.data_ptr(), "rows": rows,
                "cols": cols, "row_bytes": row_bytes,
            },
        )  # fmt: skip
    return dense


@torch.no_grad()
def pack_masked(weight: Tensor, bits: Tensor, cols: int, parts: int) -> EntryStreams:
    """As ``pack_entries`` of the dense weight, for at most ``PACKED_COLUMNS`` columns."""
    rows, row_bytes = bits.shape
    index = bits.device.index
    lengths, before = _count(bits, cols)
    made = place_rows(lengths, cols, parts)
    with on_device(index):
        shared = pack_shared_bytes(cols)
        kernel = PACK_ENTRIES.load(pack_config(False), index, shared)
        kernel.launch(
            (made.row_ids.numel(), 1, 1), 32, current_stream_handle(index),
            {
                "bits": bits.data_ptr(), "weight": weight.data_ptr(),
                "kept_begin": before.data_ptr(), "row_ids": made.row_ids.data_ptr(),
                "offsets": made.offsets.data_ptr(), "lengths": lengths.data_ptr(),
                "kept_counts": 0, "stream": made.stream.data_ptr(),
                "starts": made.starts.data_ptr(), "cols": cols, "row_bytes": row_bytes,
                "parts": parts, "capacity": pack_capacity(cols),
            },
        )  # fmt: skip
    return made
