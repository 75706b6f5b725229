"""Kept weights and the bits of their places, as a layer stores them, read by GPU kernels.

They become a dense weight or packed entries, or are multiplied with a token or a few. torch's
operations for the first two write and read tens of bytes for each weight
(``formats/entry_streams.py``, ``nn/masks.py``); these kernels read each kept weight once and write
each result once.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.formats.entry_streams import EntryStreams, place_rows
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.linear_entries import ENTRY_TYPES
from sparsetile.kernels.masked_rows import (
    LINEAR_MASKED,
    MASKED_TOKENS,
    MASKED_WARPS,
    PACK_ENTRIES,
    SPREAD_MASKED,
    SPREAD_WARPS,
    masked_config,
    masked_shared,
    pack_capacity,
    pack_config,
    pack_shared_bytes,
    spread_config,
)
from sparsetile.launch.epilogue import readable, row_bias_params
from sparsetile.launch.interface import Epilogue
from sparsetile.launch.kept import KeptLaunches, Kind, kind_of

__all__ = [
    "PACKED_COLUMNS", "MaskedRows", "pack_masked", "spread_masked", "takes_few", "takes_rows",
]  # fmt: skip

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


def takes_few(weight: Tensor, cols: int, tokens: int) -> bool:
    """Whether this many tokens are multiplied by kept weights and bits as they are."""
    return (
        0 < tokens <= MASKED_TOKENS
        and weight.dtype in ENTRY_TYPES
        and weight.is_contiguous()
        and masked_shared(tokens, cols)[1] <= machine(weight.device).shared_block
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
    row_bytes, index = bits.shape[1], bits.device.index
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


_PATCH = ("b", "c", "row_bias", "weight", "bits")
_Key: TypeAlias = tuple[Kind, torch.dtype | None]


class MaskedRows:
    """The product of a few tokens with kept weights and bits, on their GPU.

    It keeps where each row's weights begin, and rewrites that in place.
    """

    def __init__(self, weight: Tensor, bits: Tensor, cols: int) -> None:
        self.cols = cols
        self.kept_begin = torch.empty(len(bits) + 1, dtype=torch.int64, device=bits.device)
        self.rewrite(weight, bits)
        self._launches = KeptLaunches[_Key, PreparedLaunch]()

    def rewrite(self, weight: Tensor, bits: Tensor) -> None:
        """Take other weights and bits of the same sizes."""
        self.kept_begin.copy_(_count(bits, self.cols)[1])
        self.weight, self.bits = weight.detach(), bits

    @property
    def nbytes(self) -> int:
        return self.kept_begin.nbytes

    def takes(self, tokens: int) -> bool:
        return takes_few(self.weight, self.cols, tokens)

    def _prepare(self, X: Tensor, bias: Tensor | None) -> PreparedLaunch:
        (tokens, cols), (rows, row_bytes) = X.shape, self.bits.shape
        index = self.bits.device.index
        padded, shared = masked_shared(tokens, cols)
        kernel = LINEAR_MASKED.load(masked_config(self.weight.dtype, tokens), index, shared)
        facts = machine(self.bits.device)
        # X is copied once by each block of an SM.
        resident = max(min(facts.shared_processor // (shared + 1024), 32 // MASKED_WARPS), 1)
        blocks = min(-(-rows // MASKED_WARPS), resident * facts.processors)
        params: dict[str, Any] = {
            "b": 0, "c": 0, "bits": 0, "weight": 0, "kept_begin": self.kept_begin.data_ptr(),
            **row_bias_params(Epilogue(row_bias=bias)), "x_stride": X.stride(0), "c_stride": rows,
            "rows": rows, "cols": cols, "row_bytes": row_bytes, "padded": padded, "n": tokens,
        }  # fmt: skip
        return kernel.prepare((blocks, 1, 1), 32 * MASKED_WARPS, params, _PATCH, overlap=True)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x·Wᵀ + bias for x [..., columns]."""
        rows, index = self.bits.shape[0], self.bits.device.index
        X = x.reshape(-1, self.cols)
        if X.stride(1) != 1:
            X = X.contiguous()
        bias = readable(bias)
        Y = X.new_empty((X.shape[0], rows))
        if Y.numel():
            pointer = X.data_ptr()
            key = (kind_of(X, pointer), None if bias is None else bias.dtype)
            with on_device(index):
                ensure_cuda_context(index)
                found = self._launches.get(key)
                if found is None:
                    found = self._launches.keep(key, self._prepare(X, bias))
                address = 0 if bias is None else bias.data_ptr()
                found.launch(
                    current_stream_handle(index), pointer, Y.data_ptr(), address,
                    self.weight.data_ptr(), self.bits.data_ptr(),
                )  # fmt: skip
        return Y.view(*x.shape[:-1], rows)
