"""A linear layer of single kept weights, multiplied with a token or a few entry by entry.

``formats/entry_streams.py`` has the weight as the kernel reads it; ``linear_entries.cu`` is the
kernel; ``entry_layer_cost.py`` says when it is faster than the dense product.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetile.core.device import capability, machine
from sparsetile.formats.entry_streams import EntryStreams
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.linear_entries import (
    ENTRY_TOKENS,
    ENTRY_TYPES,
    LINEAR_ENTRIES,
    EntryTile,
    choose_entry_tile,
    entries_config,
    entry_zeros,
)
from sparsetile.launch.epilogue import readable, row_bias_params
from sparsetile.launch.interface import Epilogue
from sparsetile.launch.kept import KeptLaunches, Kind, kind_of

__all__ = ["EntryLayer", "entry_reasons"]

_AMPERE = (8, 0)
# Parameters that change from call to call.
_PATCH = ("b", "c", "row_bias")
_Key: TypeAlias = tuple[Kind, torch.dtype | None]


def entry_reasons(tokens: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return why the kernel does not support a product; empty if it does.

    :meth:`EntryLayer.takes` says whether X fits into shared memory.
    """
    found = []
    if dtype not in ENTRY_TYPES:
        found.append(f"takes 16 bits, not {str(dtype).removeprefix('torch.')}")
    if tokens > ENTRY_TOKENS:
        found.append(f"takes up to {ENTRY_TOKENS} tokens, not {tokens}")
    if device.type != "cuda" or capability(device) < _AMPERE:
        found.append("needs a GPU of sm_80 or newer")
    return found


class EntryLayer:
    """The product with one packed weight, on its GPU.

    It keeps the addresses of the packed weight, which may be rewritten in place.
    """

    def __init__(self, packed: EntryStreams, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self._index = packed.stream.device.index
        self._machine = machine(packed.stream.device)
        self._launches = KeptLaunches[_Key, PreparedLaunch]()

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def _tile(self, tokens: int) -> tuple[EntryTile, int]:
        """Return the tile of a number of tokens, and its shared memory."""
        packed, facts = self.packed, self._machine
        tile = choose_entry_tile(
            tokens, packed.parts, packed.blocks, packed.cols, packed.steps, facts.processors,
            facts.shared_processor,
        )  # fmt: skip
        return tile, tile.shared_bytes(packed.cols, entry_zeros(packed.steps))

    def takes(self, tokens: int) -> bool:
        """Whether X of this many tokens fits into shared memory."""
        return self._tile(tokens)[1] <= self._machine.shared_block

    def _prepare(self, X: Tensor, bias: Tensor | None, paired: bool) -> PreparedLaunch:
        packed = self.packed
        tile, shared = self._tile(X.shape[0])
        kernel = LINEAR_ENTRIES.load(entries_config(self.dtype, tile), self._index, shared)
        params: dict[str, Any] = {
            "b": 0, "c": 0, "stream": packed.stream.data_ptr(),
            "offsets": packed.offsets.data_ptr(), "starts": packed.starts.data_ptr(),
            "row_ids": packed.row_ids.data_ptr(), **row_bias_params(Epilogue(row_bias=bias)),
            "x_stride": X.stride(0), "c_stride": packed.rows, "cols": packed.cols,
            "zeros": entry_zeros(packed.steps), "n": X.shape[0], "paired": paired,
            "let_next": tile.let_next,
        }  # fmt: skip
        return kernel.prepare((packed.blocks, 1, 1), tile.threads, params, _PATCH, overlap=True)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x·Wᵀ + bias for x [..., columns]."""
        rows, cols = self.packed.rows, self.packed.cols
        X = x.reshape(-1, cols)
        if X.stride(1) != 1:
            X = X.contiguous()
        bias = readable(bias)
        Y = X.new_empty((X.shape[0], rows))
        if Y.numel():
            pointer = X.data_ptr()
            key = (kind_of(X, pointer), None if bias is None else bias.dtype)
            with on_device(self._index):
                ensure_cuda_context(self._index)
                found = self._launches.get(key)
                if found is None:
                    paired = pointer % 4 == 0 and cols % 2 == 0 and X.stride(0) % 2 == 0
                    found = self._launches.keep(key, self._prepare(X, bias, paired))
                address = 0 if bias is None else bias.data_ptr()
                stream = current_stream_handle(self._index)
                found.launch(stream, pointer, Y.data_ptr(), address)
        return Y.view(*x.shape[:-1], rows)
