"""Launches of ``linear_blocks``: a linear layer of kept blocks on any GPU from sm_80 on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import capability, machine
from sparsetile.jit import LoadedKernel
from sparsetile.jit.loader import (
    PreparedLaunch,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.linear_blocks import (
    BLOCKS_ACCESS,
    BLOCKS_TYPES,
    BLOCKS_UNITS,
    LINEAR_BLOCKS,
    BlocksTile,
    blocks_config,
    choose_layer_tile,
)
from sparsetile.launch.epilogue import epilogue_params, row_bias_params
from sparsetile.launch.geometry import aligned
from sparsetile.launch.interface import Epilogue

__all__ = ["LayerBlocks"]

_AMPERE = (8, 0)
# Parameters that change from call to call.
_OPERANDS = ("b", "c")


class LayerBlocks:
    """The kernel for one weight's size; its tile depends on the tokens and the GPU."""

    def __init__(self, rows: int, cols: int, unit: int, paired: bool = False) -> None:
        # A pair, gate and up, makes half of the rows.
        self.rows, self.cols = rows // 2 if paired else rows, cols
        self._unit, self._paired = unit, paired
        self._kernels: dict[tuple[Any, ...], LoadedKernel] = {}

    def reasons(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Return why this kernel does not support the weight; empty if it does."""
        found = []
        if dtype not in BLOCKS_TYPES:
            found.append(f"takes 16 bits and TF32, not {str(dtype).removeprefix('torch.')}")
        if dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
            found.append(
                "rounds float32 to TF32, which torch does not allow now: set "
                "torch.backends.cuda.matmul.allow_tf32 = True"
            )
        if self._unit not in BLOCKS_UNITS:
            found.append(f"takes blocks of {BLOCKS_UNITS}, not {self._unit}")
        if self.cols * dtype.itemsize % BLOCKS_ACCESS:
            least = BLOCKS_ACCESS // dtype.itemsize
            found.append(f"takes inputs of a multiple of {least} features, not {self.cols}")
        if device.type != "cuda" or capability(device) < _AMPERE:
            found.append("needs a GPU of sm_80 or newer")
        return found

    @staticmethod
    def takes(X: Tensor) -> bool:
        """Whether X [tokens, K] is read in place."""
        return X.stride(-1) == 1 and aligned(X)

    def _load(
        self, dtype: torch.dtype, tokens: int, device: int
    ) -> tuple[LoadedKernel, BlocksTile]:
        facts = machine(torch.device("cuda", device))
        high = -(-self.rows // self._unit)
        tile = choose_layer_tile(
            tokens, self._unit, high, facts.processors, facts.shared_processor, self._paired
        )
        key = (dtype, tile, device)
        if key not in self._kernels:
            config = blocks_config(dtype, tile)
            self._kernels[key] = LINEAR_BLOCKS.load(config, device, tile.shared_bytes)
        return self._kernels[key], tile

    def _grid(self, tile: BlocksTile, tokens: int) -> tuple[int, int, int]:
        return (-(-self.rows // self._unit), tile.slabs(tokens), 1)

    def _params(
        self, work: Tensor, col_idx: Tensor, blocks: Tensor, X: Tensor, c_stride: int,
        epilogue: Epilogue, silu: bool,
    ) -> dict[str, int | float]:  # fmt: skip
        return {
            "b": 0, "c": 0, "blocks": blocks.data_ptr(), "work": work.data_ptr(),
            "block_col_idx": col_idx.data_ptr(), **row_bias_params(epilogue),
            "x_stride": X.stride(0), "c_stride": c_stride, "indptr": 0,
            **epilogue_params(epilogue), "silu": silu, "rows": self.rows, "n": X.shape[0],
            "cols": self.cols,
        }  # fmt: skip

    def run(
        self, work: Tensor, col_idx: Tensor, blocks: Tensor, X: Tensor, Y: Tensor,
        epilogue: Epilogue, *, silu: bool = False,
    ) -> None:  # fmt: skip
        """Write activation(X·Aᵀ + bias) into Y [tokens, rows], whose rows are contiguous.

        ``work`` lists the block rows, those with the most blocks first; for a pair it alternates
        block rows of the gate and of up. ``blocks`` of float32 are rounded to TF32.
        """
        device = X.device.index
        kernel, tile = self._load(X.dtype, X.shape[0], device)
        params = self._params(work, col_idx, blocks, X, Y.stride(0), epilogue, silu)
        params |= {"b": X.data_ptr(), "c": Y.data_ptr()}
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            kernel.launch(self._grid(tile, X.shape[0]), tile.threads, stream, params)

    def prepare(
        self, work: Tensor, col_idx: Tensor, blocks: Tensor, X: Tensor, epilogue: Epilogue,
        silu: bool,
    ) -> PreparedLaunch:  # fmt: skip
        """Return the launch for inputs like X and contiguous results, ready for addresses of X and
        Y."""
        kernel, tile = self._load(X.dtype, X.shape[0], X.device.index)
        params = self._params(work, col_idx, blocks, X, self.rows, epilogue, silu)
        return kernel.prepare(self._grid(tile, X.shape[0]), tile.threads, params, _OPERANDS)
